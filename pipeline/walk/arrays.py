"""Arrays in a file: what a walk stores of tokens and statistics, and what it and workers hand to each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.engine.units import Written
from ktconvert.pipeline.walk import bf16

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, npt.NDArray[Any]]
KINDS = {"I64": "<i8", "I32": "<i4", "F64": "<f8", "F32": "<f4", "BF16": "<u2", "U8": "u1"}
DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in KINDS.items()}


def write_arrays(path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> Written:
    """Write them to a new file, synced."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    plan = plan_shard([TensorInfo(key, names[x.dtype], x.shape, x.nbytes) for key, x in arrays.items()], metadata or {})
    with DirectFile(path, plan.size) as file:
        file.append(plan.header)
        for values in arrays.values():
            file.append(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return Written("", plan.size, file.close())


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Those of these names, or all. Raises InputError for a damaged file."""
    stored = {}
    for entry in read_header(path).entries:
        if names is None or entry.name in names:
            dtype = DTYPES[entry.dtype]
            values = np.fromfile(path, dtype, entry.nbytes // dtype.itemsize, offset=entry.start)
            stored[entry.name] = values.reshape(entry.shape)
    return stored


def of_tensor(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array; BF16 as its bits."""
    bits = str(tensor.dtype) == "torch.bfloat16"
    return bf16.to_bits(tensor) if bits else tensor.detach().contiguous().cpu().numpy()


def tensor_of(array: npt.NDArray[Any], device: Any = "cpu") -> torch.Tensor:
    """The inverse. The copy lies where torch would have put it: matrix libraries may add in another order elsewhere."""
    import torch

    return (bf16.to_tensor(array) if array.dtype == np.uint16 else torch.from_numpy(array)).clone().to(device)
