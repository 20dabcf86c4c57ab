"""Tensors of a quantized checkpoint for transformers: each is read, and decoded to BF16, when transformers asks for it.

A model therefore needs memory for itself and for one tensor, in the numbers that `ktconvert dequantize` writes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor, find_non_expert_tensors, read_chunks
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.sources.source import TensorSource

if TYPE_CHECKING:
    import torch

FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes of weights that are not quantized
UNQUANTIZED = (*FLOATS, "I64", "BOOL")  # dtypes of tensors that are no part of a quantized weight
# torch's names of the dtypes that models compute with; others belong to quantized weights.
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool", "U8": "uint8"}
DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
REMEDY = "use the model's BF16 release"
# Names of scales of activations and of the KV cache, which models with BF16 weights do not have.
ACTIVATION_SCALES = r"\.(([qkv]|kv|prob|input|output)_scale|(k|v)_zero_point)$"


def find_stored_tensors(source: TensorSource, *, whole: bool) -> dict[str, StoredTensor] | None:
    """Return the tensors of a checkpoint by name; None if no weight is quantized, so that transformers can read them.

    whole: with the routed experts. Reads no weights. Raises UnsupportedError for an encoding that cannot be read, and
    for a directory in which transformers would read other weights.
    """
    if all(info.dtype in UNQUANTIZED for info in source.tensors.values()):
        return None
    experts: frozenset[str] | set[str] = frozenset()
    if not whole:
        model = recognize(source, to_read=True)
        experts = {*model.expert_tensor_names(), *model.mtp_tensors}
    tensors = find_non_expert_tensors(source, experts, source.quantization).output_tensors()
    if not any(isinstance(tensor.stored, Weight) for tensor in tensors):
        return None
    source.require_one_reading()
    return {tensor.key: StoredTensor(source, tensor) for tensor in tensors}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that transformers reads like a slice of a safetensors file."""

    source: TensorSource
    tensor: OutputTensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.entry.shape)

    def get_dtype(self) -> str:
        return self.tensor.entry.dtype

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.source, self.tensor, REMEDY)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a copy, since a write to a view of the file would end the process."""
        values = read_tensor(self.source, self.tensor, REMEDY, copy=True)
        for info in self.tensor.reads:
            self.source.release(info)
        return values[index]


def torch_dtype(source: TensorSource, tensor: OutputTensor, remedy: str) -> torch.dtype:
    """Return torch's dtype of a tensor as it is loaded. Raises UnsupportedError for a dtype that models do not use."""
    import torch

    info, name = tensor.reads[0], DTYPES.get(tensor.entry.dtype)
    if name is None:
        problem = f"is {tensor.entry.dtype}, which is not supported"
        raise UnsupportedError.from_tensor(info.name, problem, remedy, source.path(info))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def read_tensor(source: TensorSource, tensor: OutputTensor, remedy: str, *, copy: bool = False) -> torch.Tensor:
    """Return a stored tensor: a view of the file if its bytes can be used as they are, else decoded to BF16.

    copy: never a view. Raises UnsupportedError for a dtype that models do not use.
    """
    import torch

    info, entry = tensor.reads[0], tensor.entry
    dtype = torch_dtype(source, tensor, remedy)
    if tensor.stored is info and info.start % dtype.itemsize == 0 and not copy:
        raw = source.view(info).reshape(-1).view(np.uint8)
    else:
        raw = np.empty(entry.nbytes, np.uint8)
        start = 0
        for chunk in read_chunks(source, tensor):
            raw[start : start + chunk.size] = chunk
            start += chunk.size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only, but nothing modifies these weights
        return torch.from_numpy(raw).view(dtype).reshape(entry.shape)
