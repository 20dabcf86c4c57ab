"""Weights of a checkpoint as tensors of torch: views of the file, or BF16 where they are quantized."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.output_tensors import OtherTensor, bytes_of, decoded_others
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.pack_quantized import METHOD
from ktconvert.layouts.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

FP8 = "fp8"  # quant_method of E4M3 with a scale per block
# quant_method of checkpoints that transformers loads: whole, and beside experts of ours (native_quant/runtime/hf_rest).
BY_TRANSFORMERS = {True: ("", FP8, METHOD), False: (FP8,)}
FLOATS = ("BF16", "F16", "F32", "F64")


def decode_weights(source: TensorSource, *, whole: bool) -> dict[str, torch.Tensor] | None:
    """Return the weights of a quantized checkpoint by their names, all in memory; None where transformers can load it.

    whole: with the routed experts. Raises UnsupportedError for a format that cannot be read.
    """
    method = source.quantization.method
    if method in BY_TRANSFORMERS[whole] or not {info.dtype for info in source.tensors.values()}.difference(FLOATS):
        return None
    taken = () if whole else recognise(source, to_read=True).expert_tensor_names()
    tensors = decoded_others(other_tensors(source, taken, source.quantization))
    if not any(isinstance(tensor.stored, Weight) for tensor in tensors):
        return None
    # Copies: a write to a view of the file would end the process.
    return {tensor.key: read_tensor(source, tensor, "use the model's BF16 release").clone() for tensor in tensors}


def read_tensor(source: TensorSource, tensor: OtherTensor, remedy: str) -> torch.Tensor:
    """Return a stored tensor, decoded if it is quantized: a view of the file where its bytes can be used as they are.
    Raises UnsupportedError for a dtype that cannot be computed with.
    """
    import torch

    info, entry = tensor.reads[0], tensor.entry
    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}.get(entry.dtype)
    if kind is None:
        what = f"is {entry.dtype}, which cannot be computed with"
        raise UnsupportedError.of_tensor(info.name, what, remedy, source.path(info))
    if tensor.stored is info and info.start % kind.itemsize == 0:
        raw = source.view(info).reshape(-1).view(np.uint8)
    else:
        raw = np.concatenate(list(bytes_of(source, tensor)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the map is read-only: nothing writes to weights here
        return torch.from_numpy(raw).view(kind).reshape(entry.shape)
