"""The machine of a prediction: known GPUs by name, and the GPUs of this machine as NVIDIA's library lists them."""

from __future__ import annotations

import contextlib
import ctypes
import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU: its memory in bytes, and the bandwidth of that memory in bytes per second."""

    memory: int
    bandwidth: float


def _gpu(gib: float, gigabytes_per_second: float) -> Gpu:
    return Gpu(int(gib * 2**30), gigabytes_per_second * 1e9)


# Names without spaces, in lower case -> memory that programs see, and bandwidth by the vendor's data sheet.
GPUS: dict[str, Gpu] = {
    "rtx3060": _gpu(11.8, 360),
    "rtx3090": _gpu(23.6, 936),
    "rtx4060ti": _gpu(15.6, 288),
    "rtx4070tisuper": _gpu(15.6, 672),
    "rtx4080": _gpu(15.6, 717),
    "rtx4090": _gpu(23.6, 1008),
    "rtx5070ti": _gpu(15.5, 896),
    "rtx5080": _gpu(15.5, 960),
    "rtx5090": _gpu(31.4, 1792),
    "rtxa6000": _gpu(47.4, 768),
    "rtx6000ada": _gpu(47.4, 960),
    "rtxpro6000": _gpu(94.9, 1792),
    "l4": _gpu(22.5, 300),
    "a10": _gpu(22.5, 600),
    "l20": _gpu(44.5, 864),
    "l40s": _gpu(44.5, 864),
    "a100": _gpu(79.2, 1935),
    "h20": _gpu(95.1, 4000),
    "h100": _gpu(79.2, 3350),
    "h200": _gpu(139.8, 4800),
    "b200": _gpu(178.4, 8000),
}
USUAL_GPU_BANDWIDTH = 800e9  # if neither an option nor the name of the card tells it
NAME_LENGTH = 96  # of nvmlDeviceGetName


class NvmlMemory(ctypes.Structure):
    """nvmlMemory_t: sizes in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def find_gpu(name: str) -> Gpu | None:
    """Return the known GPU that a name means, such as "4090" or "NVIDIA H100 80GB HBM3"; None if unknown."""
    words = re.split(r"[\s_-]+", name.lower())
    runs = ("".join(words[i:j]) for i in range(len(words)) for j in range(len(words), i, -1))
    return next((GPUS[known] for run in runs for known in (run, f"rtx{run}") if known in GPUS), None)


def list_gpus() -> list[tuple[str, int]]:
    """Return name and memory in bytes of each GPU of this machine; [] without NVIDIA's driver."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            try:
                return _list_devices(nvml)
            finally:
                nvml.nvmlShutdown()
    return []


def _list_devices(nvml: ctypes.CDLL) -> list[tuple[str, int]]:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    gpus = []
    for index in range(count.value):
        device, memory, name = ctypes.c_void_p(), NvmlMemory(), ctypes.create_string_buffer(NAME_LENGTH)
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
            nvml.nvmlDeviceGetName(device, name, NAME_LENGTH)
            gpus.append((name.value.decode(errors="replace"), memory.total))
    return gpus
