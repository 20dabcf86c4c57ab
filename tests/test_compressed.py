"""Pack-quantized experts have the names, tensors, config and ignore list that compressed-tensors and loaders expect."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_archs import Model

from ktconvert.layouts.checkpoints.archs import ARCHS, Arch, Fused, Separate, Stacked, Style
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings import pack_quantized
from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.errors import UnsupportedError, UsageError
from ktconvert.layouts.outputs import FORMATS, ignore, linear_names
from ktconvert.layouts.outputs.slices import NumaSlice, allocate_slices
from ktconvert.layouts.outputs.whole_model import DOCUMENT_VERSION, notes_on_loading, quantization_config
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.native_quant.matrix import Matrix
from rig import stored

ROWS = {arch.matches[0]: arch for arch in ARCHS}
E, H, I = 3, 256, 128  # noqa: E741
BF16 = "BF16"
ENCODINGS = (FORMATS["W4A16"].encoding, FORMATS["W8A16"].encoding)
Build = Callable[..., MoeModel]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Return a function that builds a checkpoint with layer 1, and MTP layer 2 if wanted, in any style."""

    def make(
        family: str,
        style: Style,
        prefix: str = "model.",
        *,
        shape: tuple[int, int, int] = (E, H, I),
        mtp: bool = False,
        extra: dict[str, tuple[int, ...]] | None = None,
    ) -> MoeModel:
        arch = ROWS.get(family, Arch("?", (family,)))
        model = Model(arch, style, prefix, shape=shape, layers=(1,), mtp=(2,) if mtp else ())
        model.config["model_type"] = family
        model.non_experts = {name: model.bits(*size) for name, size in (extra or {}).items()}
        return model.read(tmp_path)

    return make


def style_of(family: str, kind: type[Style], n: int = 0) -> Style:
    return [style for style in ROWS[family].stored if isinstance(style, kind)][n]


W132, USUAL = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("prefix", ["model.", "", "model.language_model."])
@pytest.mark.parametrize(
    ("family", "kind", "n", "block", "names"),
    [
        ("qwen3_moe", Separate, 0, "mlp.experts", USUAL),
        ("qwen3_moe", Fused, 0, "mlp.experts", USUAL),
        ("mixtral", Separate, 0, "block_sparse_moe.experts", W132),
        ("mixtral", Fused, 0, "block_sparse_moe.experts", W132),  # with the names of single experts of this family
        ("mixtral", Fused, 1, "mlp.experts", W132),  # with the names that transformers looks for
        ("minimax_m2", Separate, 0, "block_sparse_moe.experts", W132),
        ("lfm2_moe", Fused, 0, "feed_forward.experts", W132),
        ("llama4", Fused, 0, "feed_forward.experts", USUAL),
        ("step3p5", Stacked, 0, "moe.experts", USUAL),
        ("gemma4", Fused, 0, "experts", USUAL),
        ("unheard_of", Fused, 0, "mlp.experts", USUAL),
    ],
)
def test_linears_have_the_names_that_loaders_expect(
    build: Build, prefix: str, family: str, kind: type[Style], n: int, block: str, names: tuple[str, ...]
) -> None:
    model = build(family, style_of(family if family in ROWS else "qwen3_moe", kind, n), prefix)
    expected = [f"{prefix}layers.1.{block}.{e}.{name}" for e in range(E) for name in names]
    linears = list(linear_names.iterate_linears(model, 1))
    assert [name for _, _, name, _, _ in linears] == expected
    assert [(n, k) for _, _, _, n, k in linears[:3]] == [(I, H), (I, H), (H, I)]
    assert [name for _, _, name, _, _ in linear_names.iterate_linears(model, 1, [2])] == expected[-3:]
    if kind is Separate:
        assert {f"{name}.weight" for name in expected} == model.expert_tensor_names()


def quantize_to_nearest(encoding: Encoding, linear: Matrix) -> tuple[Any, Any, Any]:
    """Return the packed words, shape and scales of a linear, rounded to nearest."""
    n, k = linear.shape
    [(_, tensors)] = allocate_slices(encoding, [NumaSlice(0, 0, "gate", 0, n, k)])
    encoding.quantize(linear, tensors)
    packed, shape, scale = tensors
    return packed.view("<i4").reshape(n, -1), shape.view("<i8"), scale.view("<u2").reshape(n, -1)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda f: f.name)
def test_quantization_config_equals_that_of_compressed_tensors(encoding: Encoding) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors import __version__
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    scheme = preset_name_to_scheme(encoding.name, ["Linear"])
    scheme.format = "pack-quantized"
    options = {"quantization_status": QuantizationStatus.COMPRESSED, "format": "pack-quantized"}
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], **options)
    ours = quantization_config(encoding.grid, ["lm_head"])
    assert QuantizationConfig.model_validate(ours) == config
    if __version__ == DOCUMENT_VERSION:
        assert ours == {**config.model_dump(mode="json"), "version": __version__}


EXTRA = {
    "lm_head.weight": (8, H),
    "model.embed_tokens.weight": (8, H),
    "model.norm.weight": (H,),
    "model.layers.0.mlp.gate_proj.weight": (8, H),
    "model.layers.1.input_layernorm.weight": (H,),
    "model.layers.1.self_attn.q_proj.weight": (8, H),
    "model.layers.1.mlp.gate.weight": (E, H),
    "model.layers.1.mlp.shared_experts.up_proj.weight": (8, H),
}
LOADER_NAMES = ["language_model.model.layers.10.mlp.gate_proj", "layers.7.mlp.gate_proj"]


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return ignore.IgnoreList(patterns, "config.json").find(name) is not None


def test_the_ignore_list_names_everything_but_routed_experts(build: Build) -> None:
    model = build("deepseek_v3", style_of("deepseek_v3", Separate), extra=EXTRA, mtp=True)
    assert model.mtp_layers == (2,)
    names = ignore.make_ignore_list(model)
    assert names[: len(ignore.USUAL_PATTERNS)] == ignore.USUAL_PATTERNS
    assert len(names) <= len(ignore.USUAL_PATTERNS) + 3, names
    others = [name.removesuffix(".weight") for name, size in EXTRA.items() if len(size) == 2]
    mtp = [f"model.layers.2.mlp.experts.{e}.{p}" for e in range(E) for p in USUAL] + ["model.layers.2.mlp.experts"]
    for name in (*others, *mtp, *LOADER_NAMES):
        assert matches(name, names), name
    for e in range(E):
        for p in USUAL:
            assert not matches(f"model.layers.1.mlp.experts.{e}.{p}", names)
    assert not matches("model.layers.1.mlp.experts", names)
    assert not matches("model.layers.12.mlp.experts.0.gate_proj", names)


def test_routers_of_every_name_are_ignored(build: Build) -> None:
    """kt-kernel's own patterns only match routers named mlp.gate."""
    extra = {"model.layers.1.block_sparse_moe.gate.weight": (E, H), "model.layers.1.feed_forward.router.weight": (E, H)}
    model = build("mixtral", style_of("mixtral", Separate), extra=extra)
    for name in extra:
        assert not matches(name.removesuffix(".weight"), ignore.USUAL_PATTERNS)
        assert matches(name.removesuffix(".weight"), ignore.make_ignore_list(model))
        assert matches(name.removesuffix(".weight").replace("layers.1", "layers.31"), ignore.make_ignore_list(model))
    with pytest.raises(UsageError, match=r"the router model\.layers\.1\.\S+, so that loaders would treat it"):
        ignore.check_ignore_list(model, ignore.IgnoreList(ignore.USUAL_PATTERNS, "config.json"))


def test_experts_of_other_blocks_are_ignored(build: Build) -> None:
    """Loaders split stacked experts, so that the pattern must match the name of their container."""
    extra = {"mtp.layers.0.mlp.experts.gate_up_proj": (E, 2 * I, H), "mtp.layers.0.mlp.experts.down_proj": (E, H, I)}
    names = ignore.make_ignore_list(build("qwen3_5_moe", style_of("qwen3_5_moe", Fused), extra=extra))
    for name in ("mtp.layers.0.mlp.experts.2.gate_proj", "model.mtp.layers.0.mlp.experts", *extra):
        assert matches(name, names), (name, names)
    assert not matches("model.layers.0.mlp.experts.2.gate_proj", names)


def test_patterns_that_match_a_routed_expert_are_refused(build: Build) -> None:
    model = build("mixtral", style_of("mixtral", Separate))
    message = r"would exclude the routed expert model\.layers\.1\.block_sparse_moe\.experts"
    routed = "model.layers.1.block_sparse_moe.experts.1.w3"
    for pattern in ("re:.*gate.*", r"re:model\.layers\.1\..*", "re:.*experts$", "re:.*w2$", "Linear", routed):
        with pytest.raises(UsageError, match=message) as e:
            ignore.make_ignore_list(model, (*ignore.USUAL_PATTERNS, pattern))
        assert repr(pattern) in str(e.value)


def test_patterns_match_as_in_compressed_tensors(build: Build) -> None:
    model = build("qwen3_moe", style_of("qwen3_moe", Separate))
    for harmless in ("experts", r"re:experts", r".*experts.*", r"re:mlp\.experts\.0", r"re:.*shared_experts.*"):
        assert harmless in ignore.make_ignore_list(model, (harmless,))
    with pytest.raises(UsageError, match=r"^--ignore-patterns: '\(' is not a regular expression"):
        ignore.make_ignore_list(model, ("re:(",))
    library = pytest.importorskip("compressed_tensors.utils.match", reason="compressed-tensors is not installed")
    names = ["lm_head", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts.0.gate_proj", "a.self_attn.q"]
    for pattern in (*ignore.USUAL_PATTERNS, "re:experts", "re:.*experts", "model.layers.1.mlp.gate"):
        for name in names:
            assert matches(name, (pattern,)) == library.match_name(name, pattern)


def test_groups_and_ranks_that_do_not_divide_rows_are_refused(build: Build) -> None:
    output_format, style = FORMATS["W4A16"], style_of("qwen3_moe", Separate)
    for shape, what in (((E, 192, 128), "hidden size 192"), ((E, 256, 64), "expert width 64")):
        with pytest.raises(
            UnsupportedError, match=f"groups of 128 columns, but the {what} of this model is not a multiple"
        ):
            notes_on_loading(output_format, build("qwen3_moe", style, shape=shape), (1,))
    model = build("qwen3_moe", style, shape=(E, 128, 768))
    note = "Experts 768 wide in groups of 128 can be loaded with tensor parallelism 1, 2."
    assert notes_on_loading(output_format, model, (1, 2)) == (note,)
    message = r"768 cannot be split into 4 tensor-parallel ranks .* choose one of 1, 2\.$"
    with pytest.raises(UnsupportedError, match=message):
        notes_on_loading(output_format, model, (4,))


@pytest.mark.parametrize("source", ["BF16", "FP8"])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda f: f.name)
def test_a_whole_checkpoint_equals_model_free_ptq(
    encoding: Encoding, source: str, example: Path, tmp_path: Path, write_safetensors: Any
) -> None:
    """llmcompressor's model_free_ptq with our ignore list gives the same names and bytes, and packs nothing else."""
    llmcompressor = pytest.importorskip("llmcompressor", reason="llmcompressor is not installed")
    import torch
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
    from safetensors.torch import load_file

    input_path = stored.model(example, tmp_path / "given", source)
    converter = FP8BlockDequantizer(targets=[r"re:.*_proj$"]) if source == "FP8" else None
    model = recognize(open_checkpoint(input_path))
    patterns = ignore.make_ignore_list(model)
    where = (str(input_path), str(tmp_path / "theirs"))
    llmcompressor.model_free_ptq(*where, encoding.name, ignore=patterns, device="cpu", converter=converter)
    files = (tmp_path / "theirs").glob("*.safetensors")
    theirs = {name: tensor for path in files for name, tensor in load_file(path).items()}
    packed_names = {name for name in theirs if name.rpartition(".")[2] in pack_quantized.SUFFIXES}
    for layer in model.layers:
        for expert, projection, name, n, k in linear_names.iterate_linears(model, layer):
            packed, _, scale = quantize_to_nearest(encoding, model.linear(layer, expert, projection))
            assert (theirs[f"{name}.weight_packed"].numpy() == packed).all()
            assert (theirs[f"{name}.weight_scale"].view(torch.uint16).numpy() == scale).all()
            assert theirs[f"{name}.weight_shape"].tolist() == [n, k]
            packed_names -= {f"{name}.{suffix}" for suffix in pack_quantized.SUFFIXES}
    assert not packed_names
    quantization = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    (scheme,) = quantization["config_groups"].values()
    scheme["weights"]["observer"] = None  # how the library found the scales
    assert not quantization.pop("transform_config")
    assert quantization | {"config_groups": {"group_0": scheme}} == quantization_config(encoding.grid, patterns)
