"""GGUF files that other programs wrote: converted, they are what the definition makes of gguf-py's values.

KTCONVERT_GOLDEN=FOLDER tests more files of the same kind, also those of a split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest

from ktconvert.layouts.checkpoints.containers.gguf_split import parts_of
from ktconvert.layouts.checkpoints.experts import PROJECTIONS, recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.native_quant import kernels
from ktconvert.quantizers import reference
from rig import golden
from rig.safetensors import bits_of, read_file, read_folder

EVERY = [path for name, path in golden.files("*.gguf").items() if "imatrix" not in name]
OF_KT_KERNEL = [golden.FOLDER / f"gguf_{name}.gguf" for name in ("Q4_0", "Q8_0")]


def values(path: Path) -> dict[tuple[int, str], Any]:
    """float32 [E, n, k] by layer and projection: gguf-py's reader and its values."""
    out = {}
    for tensor in (t for name in parts_of(path.name) for t in library.GGUFReader(path.with_name(name)).tensors):
        block, layer, part, *_ = [*tensor.name.split("."), "", ""]
        if block == "blk" and part.endswith("_exps"):
            key = int(layer), part.removeprefix("ffn_").removesuffix("_exps")
            out[key] = library.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return out


def expected(path: Path, bits: int, parts: int) -> dict[str, bytes]:
    """Weights and scales of a merged output."""
    out = {}
    for (layer, projection), experts in values(path).items():
        for expert, linear in enumerate(experts):
            bf16 = reference.f32_to_bf16(linear)
            for i, piece in enumerate(np.split(bf16, parts, axis=1 if projection == "down" else 0)):
                key = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{i}"
                weight, scale = reference.quantize_pack(bits, np.ascontiguousarray(piece))
                out |= {f"{key}.weight": weight.tobytes(), f"{key}.scale": scale.tobytes()}
    return out


def converted(cli: Any, source: Path, folder: Path, bits: int, parts: int, *options: str) -> dict[str, bytes]:
    """The tensors of an output; loose ones are merged first."""
    out = folder / f"{source.stem}-{bits}-{parts}-{len(options)}"
    cli("cpu", "-i", source, "-o", out, "--quant-method", f"int{bits}", "--threadpool-count", parts, *options)
    if options:
        cli("merge", "-i", out, "-o", out := out.with_name(f"{out.name}-merged"))
    return {name: tensor.data for name, tensor in read_folder(out).items()}


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_values_are_gguf_pys(path: Path) -> None:
    moe = recognise(open_checkpoint(path))
    for (layer, projection), experts in values(path).items():
        for expert, linear in enumerate(experts):
            assert (kernels.decode(moe.linear(layer, expert, projection)) == reference.f32_to_bf16(linear)).all()


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_converted_merged_and_loose(path: Path, cli: Any, tmp_path: Path) -> None:
    assert converted(cli, path, tmp_path, 4, 2) == expected(path, 4, 2)
    assert converted(cli, path, tmp_path, 8, 1, "--no-merge-safetensor") == expected(path, 8, 1)


@pytest.mark.long
@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_converted_in_every_way(path: Path, cli: Any, tmp_path: Path) -> None:
    for bits in (4, 8):
        for parts in (1, 2):
            for options in ((), ("--no-merge-safetensor",)):
                assert converted(cli, path, tmp_path, bits, parts, *options) == expected(path, bits, parts)


@pytest.mark.parametrize("path", OF_KT_KERNEL, ids=lambda path: path.stem)
def test_the_forward_is_kt_kernels_reference(path: Path) -> None:
    """In float64: on gguf-py's values it is the reference, on ours it is that but for their rounding to BF16."""
    stored = bits_of(read_file(path.with_suffix(".safetensors")))
    hidden = reference.bf16_to_f32(stored["in.hidden"]).astype(np.float64)
    moe, exact = recognise(open_checkpoint(path)), values(path)

    def forward(weight: Any) -> Any:
        out = np.zeros_like(hidden)
        for token, x in enumerate(hidden):
            for expert, routed in zip(stored["in.topk_ids"][token], stored["in.topk_weights"][token], strict=True):
                gate, up, down = (weight(int(expert), projection) for projection in PROJECTIONS)
                g = gate @ x
                out[token] += float(routed) * (down @ (g / (1 + np.exp(-g)) * (up @ x)))
        return out

    wanted = stored["out.float64_reference"]
    size = np.linalg.norm(wanted)
    theirs = forward(lambda expert, projection: exact[0, projection][expert].astype(np.float64))
    ours = forward(
        lambda expert, projection: reference.bf16_to_f32(kernels.decode(moe.linear(0, expert, projection))).astype(
            float
        )
    )
    assert np.linalg.norm(theirs - wanted) < 1e-12 * size
    assert np.linalg.norm(ours - wanted) < 4e-3 * size
