"""Contradictory headers of every quantized encoding in safetensors are read, or refused in one sentence.

KTCONVERT_FUZZ=N tries N times as many mutations, with new random draws in each run.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.sources.config import parse_quantization
from ktconvert.layouts.sources.containers.safetensors import DTYPE_BITS
from ktconvert.layouts.sources.source import TensorSource, open_checkpoint
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from rig.encodings import ENCODINGS, PROJECTIONS, write

REPEAT = int(os.environ.get("KTCONVERT_FUZZ", "1"))


METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "modelopt", "mxfp4", "auto-round")
KEYS = (
    *("quant_method", "bits", "group_size", "checkpoint_format", "version", "format", "is_marlin_format"),
    *(
        "dynamic",
        "weight_block_size",
        "config_groups",
        "sym",
        "desc_act",
        "packing_format",
        "extra_config",
        "data_type",
    ),
)
VALUES = (
    *(None, 0, 1, -1, 2, 3, 4, 7, 8, 32, 96, 128, 1 << 40, 1.5, True, "4", "gemm", "marlin", "x" * 3000),
    *("auto_round", "auto_round:auto_gptq", "auto_round:auto_awq", ":", "mx_int"),
    *([], {}, [128, 128], [0, 1], [1, 32], {"a": {"bits": 8}}, {"group_0": {"weights": 1}}),
)
SUFFIXES = (
    *(".weight", ".weight_packed", ".qweight", "_blocks", ".scale", ".weight_scale", ".weight_scale_inv", "_scales"),
    *(".weight_scale_2", ".weight_global_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape", ".scales"),
    *(".qzeros", ".g_idx", ".bias", ".input_scale", ".SCB", "_weight_scale", "_weight_scale_2"),
)


def change_config(random: Random, config: dict[str, Any]) -> None:
    """Change a value of quantization_config, or of a group of weights of compressed-tensors."""
    quant = config.get("quantization_config")
    if not isinstance(quant, dict) or random.random() < 0.1:
        config["quantization_config"] = random.choice((None, [], "gptq", {"quant_method": random.choice(METHODS)}))
    elif isinstance(groups := quant.get("config_groups"), dict) and groups and random.random() < 0.5:
        scheme = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
        scheme[random.choice((*scheme, "strategy", "block_structure"))] = random.choice(VALUES)
        quant["config_groups"] = {**groups, "group_1": {"weights": scheme}}
    else:
        key = random.choice(KEYS)
        quant[key] = random.choice((*METHODS, *VALUES) if key == "quant_method" else VALUES)


def change_tensor(random: Random, info: TensorInfo) -> TensorInfo:
    """Return the tensor with a different dtype or shape that needs no more bytes."""
    dtype = random.choice(tuple(DTYPE_BITS)) if random.random() < 0.4 else info.dtype
    bits, shape, factor = DTYPE_BITS[dtype], info.shape, random.choice((2, 4, 8, 16))
    items = info.nbytes * 8 // bits
    shapes: list[tuple[int, ...]] = [shape, shape[::-1], (items,), (), (0,), (0, *shape[1:]), (*shape[:-1], 0)]
    shapes += [(1, *shape), (*shape, 1), (2, *shape), tuple(random.choice((1, 2, n, n // 2)) for n in shape)]
    if len(shape) > 1:
        first, *inner, last = shape
        difference = random.randint(1, 8)
        shapes += [(first // factor, *inner, last * factor), (first * factor, *inner, last // factor)]
        shapes += [(max(1, first - difference), *inner, last), (first, *inner, max(1, last - difference))]
    shape = random.choice(shapes)
    if math.prod(shape) > items or math.prod(shape) * bits % 8:
        shape = (0,)
    return msgspec.structs.replace(info, dtype=dtype, shape=shape, nbytes=math.prod(shape) * bits // 8)


def change_tensors(random: Random, tensors: dict[str, TensorInfo]) -> None:
    """Remove, change, rename or duplicate the tensors of one role, of one expert or of all."""
    suffixes = {name.partition("_proj")[2] or "." + name.rpartition(".")[2] for name in tensors}
    suffix, new_suffix = random.choice(sorted(suffixes or {""})), random.choice(SUFFIXES)
    names = [name for name in tensors if name.endswith(suffix)]
    action, seed = random.choice(("drop", "rename", "duplicate", "change", "change", "change")), random.getrandbits(64)
    for name in random.choice((names, names, names[:1])):
        info = tensors[name]
        if action in ("drop", "rename"):
            del tensors[name]
        if action in ("rename", "duplicate"):
            new = name.removesuffix(suffix) + new_suffix
            tensors[new] = msgspec.structs.replace(info, name=new)
        if action == "change":
            tensors[name] = change_tensor(Random(seed), info)


def read(source: TensorSource) -> Iterator[InputError | UnsupportedError]:
    """Decode the headers as a conversion and `dequantize` do; yield the refusals."""
    try:
        model = recognize(source, to_read=True)
        for expert in range(min(2, model.shape(0)[0])):
            for projection in PROJECTIONS:
                model.memory_for_reading(0, backward=True)
                kernels.decode(model.linear(0, expert, projection))
    except (InputError, UnsupportedError) as error:
        yield error
    try:
        for stored in find_non_expert_tensors(source, (), parse_quantization(source.config)).tensors.values():
            if isinstance(stored, Weight) and 0 not in stored.shape:
                kernels.decode(stored.read_linear(source, 0))
    except (InputError, UnsupportedError) as error:
        yield error


@pytest.mark.parametrize("name", ENCODINGS)
def test_contradictory_headers_give_one_sentence(name: str, tmp_path: Path) -> None:
    """Tensors are missing, or have a different type, shape or name, and entries of the config change."""
    with open_checkpoint(write(name, tmp_path)[0]) as source:
        config, tensors = json.dumps(source.config), source.tensors

        @settings(max_examples=60 * REPEAT, deadline=None, database=None, derandomize=REPEAT == 1)
        @given(st.integers(0, (1 << 64) - 1))
        def check(seed: int) -> None:
            random = Random(f"{name} {seed}")
            source.config, source.tensors = json.loads(config), dict(tensors)
            for _ in range(random.randint(1, 3)):
                if random.random() < 0.3:
                    change_config(random, source.config)
                else:
                    change_tensors(random, source.tensors)
            for refusal in read(source):
                assert len(str(refusal)) > 20 and "\n" not in str(refusal)

        check()
