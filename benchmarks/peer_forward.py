"""A worker of forward.py for a Python that has kt-kernel: the same calls as our_forward.py, through its own API.

python peer_forward.py SCRATCH THREADS        SCRATCH contains state.so

In kt-kernel's favour, it calls the C++ object directly (forward_task, submit, sync), without the copies of its wrapper.
KT_KERNEL_CPU_VARIANT chooses its instruction set.
"""

import sys
import time
from pathlib import Path

import cpu_only_torch  # noqa: F401  # before kt_kernel
import kt_kernel
import numpy as np
import torch
from kt_kernel.utils import amx
from state import LIBRARY, Detector
from turns import WORKERS, serve, tasks, time_calls, touch_memory

MAX_TOKENS = 1024  # must be a multiple of 32, or kt-kernel aborts
TOPK = 8


class NeverSave(amx.MOEConfig):
    """A configuration that never saves. kt-kernel's wrapper sets `save` regardless of its caller."""

    save = property(lambda self: False, lambda self, value: None)


class Peer:
    """The loaded layers and the inputs of the current cell."""

    def __init__(self, scratch: Path, threads: int):
        self.scratch = scratch
        self.threads = threads
        self.detector = None
        self.layers = []
        self.variants = []
        self.inputs = ()
        self.out = None

    def describe(self):
        return f"kt-kernel {kt_kernel.__version__} with its {kt_kernel.__cpu_variant__} variant"

    def list_unsupported(self, methods):
        """Return the methods that its variant does not support; its wrapper says so before it looks for weights."""
        return [method for method in methods if self._is_unsupported(method)]

    def _is_unsupported(self, method):
        try:
            self._wrapper(str(self.scratch / "nothing"), 0, method, TOPK, 256, 256)
        except RuntimeError as error:
            return "not available" in str(error) or "not compiled" in str(error)
        except OSError:  # the weights are missing
            return False
        return False

    def load_source(self, source, method, scratch):
        """Return the seconds of load_weights_from_tensors, which always saves loose files, with and without saving."""
        tensors = [
            torch.from_numpy(np.load(Path(source) / f"{name}.npy")).view(torch.bfloat16)
            for name in ("gate", "up", "down")
        ]
        experts, intermediate, hidden = tensors[0].shape
        order = torch.arange(experts, dtype=torch.int64)
        seconds = {}
        original = amx.MOEConfig
        for name, config in (("unsaved", NeverSave), ("saved", original)):
            moe = self._wrapper(scratch, 0, method, experts, hidden, intermediate)
            amx.MOEConfig = config
            touch_memory(2 * sum(tensor.nbytes for tensor in tensors))
            start, cpu = time.perf_counter(), time.process_time()
            moe.load_weights_from_tensors(*tensors, order)
            seconds |= {name: time.perf_counter() - start, f"{name}_cpu": time.process_time() - cpu}
            del moe
        return seconds

    def open(self, folder, layers, method, experts, hidden, intermediate):
        self.layers = [self._wrapper(folder, layer, method, experts, hidden, intermediate) for layer in range(layers)]
        for layer in self.layers:
            layer.load_weights(torch.arange(experts, dtype=torch.int64))
        workers = [number for number, name in tasks().items() if name.startswith(WORKERS)]
        self.detector = Detector(self.scratch / LIBRARY, workers, caller_computes=False)

    def batch(self, folder):
        hidden, ids, weights = (np.load(Path(folder) / f"{name}.npy") for name in ("hidden", "ids", "weights"))
        self.inputs = hidden, ids, weights
        self.out = np.empty_like(hidden[0])
        self.count = np.array([len(self.out)], np.int32)
        self.variants = [tuple(a.ctypes.data for a in (ids[v], weights[v], hidden[v])) for v in range(len(hidden))]

    def call(self, number):
        self._forward(self.layers[number % len(self.layers)], number // len(self.layers))

    def time(self, first, count, warm):
        return time_calls(self.call, first, count, warm, self.detector)

    def answer(self, path):
        seconds = self.time(0, 1, False)
        np.save(path, self.out)
        return seconds

    def _forward(self, layer, variant):
        ids, weights, hidden = self.variants[variant % len(self.variants)]
        task = layer.moe.forward_task(self.count.ctypes.data, TOPK, ids, weights, hidden, self.out.ctypes.data, False)
        layer.cpu_infer.submit(task)
        layer.cpu_infer.sync()

    def _wrapper(self, folder, layer, method, experts, hidden, intermediate):
        return kt_kernel.KTMoEWrapper(
            layer_idx=layer,
            num_experts=experts,
            num_experts_per_tok=TOPK,
            hidden_size=hidden,
            moe_intermediate_size=intermediate,
            gpu_experts_mask=torch.zeros(experts, dtype=torch.bool),
            cpuinfer_threads=self.threads,
            threadpool_count=1,
            weight_path=folder,
            chunked_prefill_size=MAX_TOKENS,
            cpu_save=False,
            method=method,
        )


peer = Peer(Path(sys.argv[1]), int(sys.argv[2]))
serve(
    {
        name: getattr(peer, name)
        for name in ("describe", "list_unsupported", "load_source", "open", "batch", "time", "answer")
    }
)
