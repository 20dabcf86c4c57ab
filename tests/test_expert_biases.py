"""Experts with biases (gpt-oss) and without a gate (Nemotron-H): read as published, stored, changed and computed."""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktconvert.layouts.checkpoints.expert_function import ExpertFunction
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings.fp4 import dequantize
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant.matrix import decode
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.training import Lora
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper
from ktconvert.quantizers.reference import bf16_to_f32
from rig import conversion, decided, family_models, gguf, training
from rig.floats import from_bits, to_bits
from rig.safetensors import edit_file, write_file

# As in gpt-oss (2880 = 45 * 64), the sizes are multiples of 64, but not of 128.
EXPERTS, HIDDEN, WIDTH, TOPK = 4, 192, 320, 2
OAI = ExpertFunction("swiglu_oai", limit=7.0, alpha=1.702, biases=True)
RELU2 = ExpertFunction("relu2", gated=False)
BOUNDS = {"int8": 0.03, "mxfp4": 0.005, "bf16": 0.005, "rawint4": 0.2, None: 0.005}  # all numbers are MXFP4 numbers
Stored = dict[str, tuple[str, Any]]


@dataclass
class Layer:
    """The experts of a layer: projection -> MXFP4 codes [E, n, k], their exponents, numbers, and biases [E, n]."""

    function: ExpertFunction
    codes: dict[str, Any]
    exponents: dict[str, Any]
    matrices: dict[str, Any]
    biases: dict[str, Any]

    def compute(self, x: Any, ids: Any, weights: Any) -> Any:
        """Compute the weighted sum of each token's experts in float64."""
        out = np.zeros(x.shape)
        for token, expert in np.ndindex(ids.shape):
            number = ids[token, expert]
            products = {
                p: m[number] @ x[token] + self.biases[p][number] for p, m in self.matrices.items() if p != "down"
            }
            act = self.function.compute(*products.values())
            down = self.matrices["down"][number] @ act + self.biases["down"][number]
            out[token] += weights[token, expert] * down
        return out


def make_layer(function: ExpertFunction, seed: int = 0) -> Layer:
    rng = np.random.default_rng(seed)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    if not function.gated:
        del shapes["gate"]
    layer = Layer(function, {}, {}, {}, {})
    for projection, (n, k) in shapes.items():
        codes = layer.codes[projection] = rng.integers(0, 16, (EXPERTS, n, k), np.uint8)
        exponents = layer.exponents[projection] = rng.integers(119, 124, (EXPERTS, n, k // 32), np.uint8)
        values = dequantize(codes.reshape(-1, k), exponents.reshape(-1, k // 32))
        layer.matrices[projection] = values.reshape(EXPERTS, n, k).astype(np.float64)
        scale = 2.0 if function.biases else 0.0
        layer.biases[projection] = from_bits(to_bits(scale * rng.standard_normal((EXPERTS, n))))
    return layer


def join(layer: Layer, arrays: Mapping[str, Any], *, halves: bool) -> Any:
    """Join gate and up [E, I, ...] to [E, 2I, ...]: in halves, or in turn."""
    if halves:
        return np.concatenate([arrays["gate"], arrays["up"]], axis=1)
    return np.stack([arrays["gate"], arrays["up"]], axis=2).reshape(EXPERTS, 2 * WIDTH, *arrays["up"].shape[2:])


def write_folder(folder: Path, tensors: Stored, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    write_file(
        folder / "model.safetensors", {name: (dtype, np.ascontiguousarray(a)) for name, (dtype, a) in tensors.items()}
    )
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_experts_per_tok": TOPK}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return folder


def write_fused(folder: Path, layer: Layer, *, mxfp4: bool = False, halves: bool = False) -> Path:
    """Write a layer as gpt-oss publishes it, in BF16 [E, k, n] or MXFP4 [E, n, k / 32, 16]; or in halves."""
    base, tensors = "model.layers.0.mlp.", dict[str, tuple[str, Any]]()
    for name, pick in (
        ("gate_up_proj", lambda arrays: join(layer, arrays, halves=halves)),
        ("down_proj", lambda arrays: arrays["down"]),
    ):
        if mxfp4:
            codes = pick(layer.codes)
            packed = codes[..., ::2] | codes[..., 1::2] << 4
            tensors[f"{base}experts.{name}_blocks"] = "U8", packed.reshape(*codes.shape[:2], -1, 16)
            tensors[f"{base}experts.{name}_scales"] = "U8", pick(layer.exponents)
        else:
            tensors[f"{base}experts.{name}"] = "BF16", to_bits(pick(layer.matrices).swapaxes(1, 2))
        tensors[f"{base}experts.{name}_bias"] = "BF16", to_bits(pick(layer.biases))
    tensors[f"{base}router.weight"] = "BF16", np.zeros((EXPERTS, HIDDEN), np.uint16)
    tensors[f"{base}router.bias"] = "BF16", np.zeros(EXPERTS, np.uint16)
    config: dict[str, Any] = {"model_type": "openai_privacy_filter" if halves else "gpt_oss", "hidden_act": "silu"}
    config |= {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "swiglu_limit": 7.0}
    return write_folder(folder, tensors, config | ({"quantization_config": {"quant_method": "mxfp4"}} if mxfp4 else {}))


def write_nemotron(folder: Path, layer: Layer) -> Path:
    """Write a layer of experts that compute in a latent space, as Nemotron 3 Super."""
    base = "backbone.layers.0.mixer."
    tensors: Stored = {
        f"{base}experts.{expert}.{p}_proj.weight": ("BF16", to_bits(matrix[expert]))
        for p, matrix in layer.matrices.items()
        for expert in range(EXPERTS)
    }
    tensors[f"{base}gate.weight"] = "BF16", np.zeros((EXPERTS, 2 * HIDDEN), np.uint16)
    tensors[f"{base}gate.e_score_correction_bias"] = "F32", np.zeros(EXPERTS, np.float32)
    config = {"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "n_routed_experts": EXPERTS}
    sizes = {"moe_intermediate_size": WIDTH, "moe_latent_size": HIDDEN, "hidden_size": 2 * HIDDEN}
    return write_folder(folder, tensors, config | sizes)


def write_gguf(folder: Path, layer: Layer, arch: str) -> Path:
    """Write a layer as llama.cpp does: MXFP4 blocks of a scale, and codes of columns 0 to 15 and of 16 to 31."""
    tensors: Stored = {}
    for projection, codes in layer.codes.items():
        halves = codes.reshape(*codes.shape[:2], -1, 2, 16)
        packed = halves[..., 0, :] | halves[..., 1, :] << 4
        blocks = np.concatenate([layer.exponents[projection][..., None], packed], axis=-1)
        tensors[f"blk.0.ffn_{projection}_exps.weight"] = "MXFP4", blocks.reshape(*codes.shape[:2], -1)
        if layer.function.biases:
            tensors[f"blk.0.ffn_{projection}_exps.bias"] = "F32", layer.biases[projection].astype(np.float32)
    sizes = {"embedding_length": HIDDEN, "expert_count": EXPERTS, "expert_feed_forward_length": WIDTH}
    return gguf.write(folder / "model.gguf", tensors, gguf.model_metadata(1, arch, **sizes), arch)


FORMS: dict[str, tuple[ExpertFunction, Callable[[Path, Layer], Path]]] = {
    "gpt-oss BF16": (OAI, write_fused),
    "gpt-oss MXFP4": (OAI, lambda folder, layer: write_fused(folder, layer, mxfp4=True)),
    "gpt-oss GGUF": (OAI, lambda folder, layer: write_gguf(folder, layer, "gpt-oss")),
    "privacy filter": (OAI, lambda folder, layer: write_fused(folder, layer, halves=True)),
    "Nemotron-H": (RELU2, write_nemotron),
    "Nemotron-H GGUF": (RELU2, lambda folder, layer: write_gguf(folder, layer, "nemotron_h_moe")),
}
LAYERS = {function: make_layer(function) for function in (OAI, RELU2)}


def write(form: str, folder: Path) -> tuple[Path, Layer]:
    function, write_form = FORMS[form]
    return write_form(folder, LAYERS[function]), LAYERS[function]


def run(*arguments: object) -> None:
    done = conversion.run_in_process(*arguments)
    assert done.exception is None, done.exception


def convert(source: Path, out: Path, method: str, slices: int = 1, *options: str) -> Path:
    run("cpu", "-i", source, "-o", out, "--quant-method", method, "--threadpool-count", slices, "-q", *options)
    run("verify", out, "--against", source)
    return out


def distance(layer: Layer, path: Path, number: int = 0) -> float:
    """Return the relative distance of computed outputs to the definition, for inputs that reach the limits."""
    rng = np.random.default_rng(1)
    bits = to_bits(rng.standard_normal((9, HIDDEN)))
    ids = np.array([rng.permutation(EXPERTS)[:TOPK] for _ in bits])
    weights = rng.random(ids.shape, np.float32)
    expected = layer.compute(from_bits(bits), ids, weights.astype(np.float64))
    with KTExperts.load(path, number) as experts:
        assert experts._function == layer.function
        actual = from_bits(experts.forward(bits, ids, weights))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


# Five slices of 64 columns; BF16 also has ten of 32.
CASES = [(form, "int8", 5) for form in FORMS] + [(form, "mxfp4", 1) for form in FORMS]
CASES += [("gpt-oss MXFP4", "mxfp4", 5), ("gpt-oss BF16", "bf16", 10), ("Nemotron-H", "bf16", 2)]
CASES += [(form, method, 0) for form in ("gpt-oss MXFP4", "Nemotron-H") for method in ("rawint4", "mxfp4", "bf16")]


@pytest.mark.parametrize(("form", "method", "slices"), CASES)
def test_outputs_compute_the_definition(form: str, method: str, slices: int, tmp_path: Path) -> None:
    """Without slices (0) in kt-kernel's layout."""
    source, layer = write(form, tmp_path / "model")
    layout = () if slices else ("--layout", "kt")
    out = convert(source, tmp_path / "out", method, slices or 1, *layout)
    assert distance(layer, out) < BOUNDS[method]
    facts = json.loads((out / "manifest.json").read_text())["model"]
    assert facts["functions"] == {"0": layer.function.to_dict()}


@pytest.mark.parametrize("form", ["gpt-oss MXFP4", "privacy filter", "Nemotron-H"])
@pytest.mark.parametrize("method", ["rawint4", "W4A16", "W8A16"])
def test_packed_integers_compute_what_they_stand_for(form: str, method: str, tmp_path: Path) -> None:
    """Outputs of `cpu` and `gpu` are checkpoints for every reader of compressed-tensors' names and ours."""
    source, layer = write(form, tmp_path / "model")
    if method == "rawint4":
        out = convert(source, tmp_path / "out", method)
    else:
        out, kind = tmp_path / "out", ("--quant-method", "RTN", "--quant-type", method, "--group-size", 32)
        run("gpu", "-i", source, "-o", out, *kind, "-q")
        run("verify", out, "--against", source, "--no-load")
    model = recognize(open_checkpoint(out))
    assert set(model.projections) == set(layer.matrices) and model.functions == {0: layer.function}
    stored = {p: [bf16_to_f32(decode(model.linear(0, e, p))) for e in range(EXPERTS)] for p in model.projections}
    for (projection, matrices), expert in itertools.product(stored.items(), range(EXPERTS)):
        error = np.linalg.norm(matrices[expert] - layer.matrices[projection][expert])
        assert error < (0.01 if method == "W8A16" else 0.1) * np.linalg.norm(matrices[expert])
        bias = model.bias(0, expert, projection)
        assert (bias is not None) == layer.function.biases
        if bias is not None:
            np.testing.assert_array_equal(bias, layer.biases[projection][expert])
    if method != "W8A16":  # which this runtime has no method for
        matrices = {projection: np.stack(each).astype(np.float64) for projection, each in stored.items()}
        assert distance(replace(layer, matrices=matrices), out) < BOUNDS["bf16"]


def test_layers_without_experts_may_lie_between_those_of_an_output(tmp_path: Path) -> None:
    source, layer = write("Nemotron-H", tmp_path / "model")
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 3}
    (source / "config.json").write_text(json.dumps(config))

    def move_layer(tensors: Any) -> None:
        for name in [*tensors]:
            tensors[name.replace("layers.0.", "layers.2.")] = tensors[name]
        for number in (0, 1):
            tensors[f"backbone.layers.{number}.norm.weight"] = tensors["backbone.layers.0.mixer.gate.weight"]
        for name in [name for name in tensors if "layers.0.mixer" in name]:
            del tensors[name]

    edit_file(source / "model.safetensors", move_layer)
    out = convert(source, tmp_path / "out", "bf16", 1, "--layout", "kt")
    assert distance(layer, out, 2) < BOUNDS["bf16"]


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_compute_the_definition_without_conversion(form: str, tmp_path: Path) -> None:
    source, layer = write(form, tmp_path / "model")
    assert distance(layer, source) < BOUNDS[None]


@pytest.mark.parametrize("form", ["gpt-oss BF16", "gpt-oss MXFP4", "gpt-oss GGUF"])
def test_the_wrapper_computes_gpt_oss_as_the_directory_records(form: str, tmp_path: Path) -> None:
    """Without constants, as upstream SGLang calls it, and with those that sglang-kt passes for MXFP4."""
    source, layer = write(form, tmp_path / "model")
    method = {"gpt-oss BF16": "BF16", "gpt-oss MXFP4": "MXFP4", "gpt-oss GGUF": "LLAMAFILE"}[form]
    forms = {method: source, "AMXINT8": convert(source, tmp_path / "out", "int8")}
    rng = np.random.default_rng(5)
    x, ids = to_bits(rng.standard_normal((6, HIDDEN))), rng.integers(0, EXPERTS, (6, TOPK))
    scores = rng.random((6, TOPK)).astype(np.float32)
    expected = layer.compute(from_bits(x), ids, scores)
    hidden = torch.from_numpy(x).view(torch.bfloat16)
    constants: list[dict[str, float]] = [{}, {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}, {"swiglu_limit": 7.0}]
    for name, path in forms.items():
        sizes = (0, EXPERTS, TOPK, HIDDEN, WIDTH, None, 2, 1, str(path), 512)
        for given in constants:
            wrapper = KTMoEWrapper(*sizes, method=name, **given)
            wrapper.load_weights()
            out = wrapper.forward(hidden, torch.from_numpy(ids), torch.from_numpy(scores)).double().numpy()
            assert (
                np.linalg.norm(out - expected) / np.linalg.norm(expected)
                < BOUNDS["int8" if name == "AMXINT8" else None]
            )
        with pytest.raises(UnsupportedError, match=r"layer 0 compute gate .* limited to 7 with biases, not silu.* 10"):
            KTMoEWrapper(*sizes, method=name, swiglu_limit=10.0).load_weights()


@pytest.mark.parametrize("form", ["gpt-oss BF16", "Nemotron-H"])
def test_the_wrapper_trains_experts_as_the_directory_records(form: str, tmp_path: Path) -> None:
    """With biases, which stay; without a gate, init_lora_weights gets four tensors and four gradients."""
    source, layer = write(form, tmp_path / "model")
    out = convert(source, tmp_path / "out", "bf16")
    sizes = (0, EXPERTS, TOPK, HIDDEN, WIDTH, None, 2, 1, str(out), 512)
    wrapper: Any = KTMoEWrapper(*sizes, method="AMXBF16_SFT", mode="sft", lora_rank=4, lora_alpha=8.0)
    wrapper.load_weights()
    generator = torch.Generator().manual_seed(0)
    tensors: list[torch.Tensor] = []
    for _, rows, columns in (matrix.shape for matrix in layer.matrices.values()):
        for shape in ((EXPERTS, 4, columns), (EXPERTS, rows, 4)):
            tensors.append(torch.randn(shape, generator=generator).mul(0.1).bfloat16())
    lora, buffers = Lora.from_tensors(tensors), Lora.from_tensors(map(torch.zeros_like, tensors))
    wrapper.init_lora_weights(*lora.tensors, *buffers.tensors)
    hidden, gradient = (torch.randn(30, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in hidden])
    weights = torch.rand(30, TOPK, generator=generator)
    found = [wrapper.forward(hidden, ids, weights), *wrapper.backward(gradient), *buffers.tensors]
    linears, biases = (tuple(map(torch.from_numpy, x.values())) for x in (layer.matrices, layer.biases))
    given = hidden, ids, weights, linears, lora, 2.0, gradient, layer.function, biases
    output, expected = training.differentiate(*given)
    wanted = [output, expected.hidden, expected.weights, *(expected.lora.tensors if expected.lora else ())]
    for actual, want in zip(found, wanted, strict=True):
        assert training.distance(actual, want) < 8e-3
    with pytest.raises(TypeError, match="without a gate four and four, not 3 tensors"):
        wrapper.init_lora_weights(*tensors[:3])


def make_tensors(layer: Layer) -> tuple[list[Any], dict[str, Any]]:
    """Return gate (None without one), up and down, and the named biases, as torch tensors."""
    matrices = [layer.matrices.get(p) for p in PROJECTIONS]
    biases = {f"{p}_bias": torch.from_numpy(bias).bfloat16() for p, bias in layer.biases.items()}
    return [m if m is None else torch.from_numpy(m) for m in matrices], biases if layer.function.biases else {}


@pytest.mark.parametrize("form", ["gpt-oss BF16", "Nemotron-H"])
@pytest.mark.parametrize(("method", "slices", "save"), [("AMXINT8", 5, True), ("MXFP4", 1, False), ("BF16", 2, False)])
def test_tensors_with_biases_or_without_a_gate_compute_the_definition(
    form: str, method: str, slices: int, save: bool, tmp_path: Path
) -> None:
    """The config.json in the folder of the files tells what they compute."""
    source, layer = write(form, tmp_path / "model")
    arguments = (EXPERTS, TOPK, HIDDEN, WIDTH, None, 2, slices, str(source), 512, save)
    wrapper = KTMoEWrapper(0, *arguments, method=method)
    matrices, biases = make_tensors(layer)
    wrapper.load_weights_from_tensors(*matrices, **biases)
    rng = np.random.default_rng(6)
    x, ids = to_bits(rng.standard_normal((6, HIDDEN))), rng.integers(0, EXPERTS, (6, TOPK))
    scores = rng.random((6, TOPK)).astype(np.float32)
    call = torch.from_numpy(x).view(torch.bfloat16), torch.from_numpy(ids), torch.from_numpy(scores)
    actual, expected = wrapper.forward(*call), layer.compute(from_bits(x), ids, scores)
    bound = BOUNDS["int8" if method == "AMXINT8" else "bf16"]
    assert np.linalg.norm(actual.double().numpy() - expected) < bound * np.linalg.norm(expected)
    if save:
        (source / "model.safetensors").unlink()
        saved = KTMoEWrapper(0, *arguments[:-1], method=method)
        saved.load_weights()
        assert torch.equal(saved.forward(*call), actual)


def test_wrong_biases_of_tensors_are_refused(tmp_path: Path) -> None:
    source, layer = write("gpt-oss BF16", tmp_path / "model")
    wrapper = KTMoEWrapper(0, EXPERTS, TOPK, HIDDEN, WIDTH, None, 2, 1, str(source), 512, method="BF16")
    matrices, biases = make_tensors(layer)
    infinite = {**biases, "down_bias": biases["down_bias"].clone().index_fill_(0, torch.tensor([1]), torch.inf)}
    for given, message in (
        ({}, "other biases or gates than"),
        ({"up_bias": biases["up_bias"]}, "biases must be those of gate, up, down, not of up"),
        ({**biases, "down_bias": biases["up_bias"]}, r"the bias of down must be a NumPy array of float32 \[4, 192\]"),
        (infinite, "the bias of down must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.load_weights_from_tensors(*matrices, **given)
    with pytest.raises(ValueError, match="other biases or gates than"):
        wrapper.load_weights_from_tensors(None, *matrices[1:], up_bias=biases["up_bias"], down_bias=biases["down_bias"])


def require_biases(out: Path, layer: Layer) -> None:
    """Require the rows of gate and up in the slices of their rows, all of down in the first slice, and zeros else."""
    output = open_output(out)
    stored = {
        slice_id: output.read(info).view(np.float32)
        for (slice_id, suffix), info in output.tensors.items()
        if suffix == "bias"
    }
    slices = 1 + max(slice_id.node for slice_id in stored)
    assert len(stored) == 3 * EXPERTS * slices
    for (_, expert, projection, _, node), bias in stored.items():
        whole = layer.biases[projection][expert]
        expected = whole * (node == 0) if projection == "down" else np.split(whole, slices)[node]
        np.testing.assert_array_equal(bias, expected)


@pytest.mark.parametrize("form", ["gpt-oss MXFP4", "Nemotron-H"])
def test_merge_and_resplit_keep_biases_and_matrices(form: str, tmp_path: Path) -> None:
    source, layer = write(form, tmp_path / "model")
    loose = convert(source, tmp_path / "loose", "int8", 5, "--no-merge-safetensor")
    merged, one, five = (tmp_path / name for name in ("merged", "one", "five"))
    run("merge", "-i", loose, "-o", merged, "--original-path", source)
    run("resplit", merged, one, "--threadpool-count", 1)
    run("resplit", one, five, "--threadpool-count", 5)
    for out in (loose, merged, one, five):
        run("verify", out, "--against", source)
        assert distance(layer, out) < BOUNDS["int8"]
        if layer.function.biases:
            require_biases(out, layer)
    exact = convert(source, tmp_path / "mxfp4", "mxfp4", 5)
    run("resplit", exact, tmp_path / "exact", "--threadpool-count", 1)
    assert distance(layer, tmp_path / "exact") < BOUNDS["mxfp4"]


def test_a_mix_of_methods_has_biases(tmp_path: Path) -> None:
    source, layer = write("gpt-oss MXFP4", tmp_path / "model")
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 2}
    (source / "config.json").write_text(json.dumps(config))

    def add_layer(tensors: Any) -> None:
        tensors |= {name.replace("layers.0.", "layers.1."): tensor for name, tensor in tensors.items()}

    edit_file(source / "model.safetensors", add_layer)
    out = convert(source, tmp_path / "out", "mxfp4", 1, "--method-map", "1=int8")
    assert distance(layer, out) < BOUNDS["mxfp4"]


REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("gpt-oss BF16", ("--quant-method", "int8", "--save-backward-weights"), "no matrices for fine-tuning experts"),
    ("gpt-oss BF16", ("--quant-method", "int4"), r"AMXINT4 cannot hold .* 192 is not a multiple of 128. .*int8"),
    ("gpt-oss BF16", ("--quant-method", "int8", "--equalize"), "which changes if up_proj is scaled"),
]


@pytest.mark.parametrize(("form", "options", "message"), REFUSED)
def test_formats_that_cannot_hold_the_experts_are_refused(
    form: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    source, _ = write(form, tmp_path / "model")
    arguments = ("cpu", "-i", source, "-o", tmp_path / "out", "--threadpool-count", 1, *options)
    error = conversion.run_in_process(*arguments).exception
    assert isinstance(error, UnsupportedError)
    with pytest.raises(UnsupportedError, match=message):
        raise error


BIAS = "model.layers.0.mlp.experts.down_proj_bias"


def drop(tensors: Any) -> None:
    del tensors[BIAS]


def shorten(tensors: Any) -> None:
    tensors[BIAS] = tensors[BIAS]._replace(shape=(EXPERTS, HIDDEN - 1), data=tensors[BIAS].data[: -2 * EXPERTS])


def retype(tensors: Any) -> None:
    tensors[BIAS] = tensors[BIAS]._replace(dtype="I16")


def spoil(tensors: Any) -> None:
    tensors[BIAS] = tensors[BIAS]._replace(data=tensors[BIAS].data[:-2] + b"\x80\x7f")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, f"{BIAS}' is missing, but the experts have biases"),
        (shorten, rf"{BIAS}' is BF16 of shape \[4, 191\], but a bias of .* of shape \[4, 192\]"),
        (retype, rf"{BIAS}' is I16 of shape"),
        (spoil, rf"{BIAS}' contains a value that is not finite, in the bias of expert 3"),
    ],
)
def test_damaged_biases_are_refused(damage: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    source, _ = write("gpt-oss BF16", tmp_path / "model")
    edit_file(source / "model.safetensors", damage)
    arguments = ("cpu", "-i", source, "-o", tmp_path / "out", "--quant-method", "int8", "--threadpool-count", 1)
    error = conversion.run_in_process(*arguments).exception
    assert isinstance(error, InputError) and str(source) in str(error)
    with pytest.raises(InputError, match=message):
        raise error
    with pytest.raises(InputError, match=message):
        KTExperts.load(source, 0)


def test_damaged_biases_of_outputs_are_found(tmp_path: Path) -> None:
    source, _ = write("gpt-oss BF16", tmp_path / "model")
    out = convert(source, tmp_path / "out", "int8")
    shard = next(out.glob("*.safetensors"))
    shard.chmod(0o644)
    name = "blk.0.ffn_up_exps.1.numa.0.bias"

    def damage(tensors: Any) -> None:
        tensors[name] = tensors[name]._replace(data=tensors[name].data[:-4] + np.float32(np.inf).tobytes())

    edit_file(shard, damage)
    with pytest.raises(InputError, match=r"expert 1, up_proj, NUMA slice 0, bias: the bias of row 319 is inf"):
        KTExperts.load(out, 0)

    def remove(tensors: Any) -> None:
        for key in [key for key in tensors if key.endswith(".bias")]:
            del tensors[key]

    edit_file(shard, remove)
    with pytest.raises(KTConvertError, match=r"lack biases, but must compute .* with biases"):
        KTExperts.load(out, 0)


# --- with transformers ----------------------------------------------------------------------------

SMALL = {"vocab_size": 320, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SMALL |= {"num_experts_per_tok": TOPK, "initializer_range": 0.09, "pad_token_id": 0, "bos_token_id": 1}
SMALL |= {"eos_token_id": None, "max_position_embeddings": 512, "intermediate_size": 128, "tie_word_embeddings": False}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_hidden_layers": 2, "num_local_experts": 8},
    "nemotron_h": {
        "num_hidden_layers": 3,
        "hybrid_override_pattern": "*EE",
        "n_routed_experts": 8,
        **MAMBA,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "moe_latent_size": 64,
    },
}
TOKENS = 64
TEXT = Path(__file__).resolve().parents[1] / "examples" / "heldout.txt"
CALIBRATION = ("--dataset", TEXT, "--num-calibration-samples", 16, "--sequence-length", 64, "--cpuinfer-threads", 1)


def load_model(folder: Path, **settings: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose experts decide the logits, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param) / "model"
    config = transformers.AutoConfig.for_model(request.param, **SMALL | {"vocab_size": 2048}, **FAMILIES[request.param])
    family_models.save_model(transformers.AutoModelForCausalLM, config, folder)
    decided.add_tokenizer(folder)
    return folder


def test_calibration_runs_compute_the_layers_of_transformers(family: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
    from ktconvert.layouts.files.direct_file import RowFile
    from ktconvert.pipeline.calibration.layer_runner import LayerRun, run_dense_layer, run_expert_layer
    from ktconvert.pipeline.calibration.layered_model import LayeredModel, tensor_to_bits

    source = open_checkpoint(family)
    model = recognize(source)
    others = find_non_expert_tensors(source, model.expert_tensor_names(), model.quantization).output_tensors()
    layered = LayeredModel(source, {t.key: t for t in others}, read_function=model.functions.get)
    ids = np.random.default_rng(0).integers(3, 2048, 40)
    rows = RowFile(tmp_path / "embedded", len(ids), layered.hidden, new=True)
    rows.write(0, tensor_to_bits(next(iter(layered.embed(iter([ids]))))))
    for layer in range(len(layered.layers)):
        layer_run = LayerRun(model, layered, layer, [len(ids)], 3)
        path, scratch = tmp_path / f"after-{layer}", tmp_path / f"scratch-{layer}"
        scratch.mkdir()
        if layer not in model.layers:
            rows = run_dense_layer(layer_run, rows, path)
            continue
        run_expert_layer(layer_run, [], rows, scratch, path)
        rows = RowFile(path, len(ids), layered.hidden, new=False)
    (_, actual), *_ = layer_run.sequences(rows)
    original, outputs = load_model(family, attn_implementation="eager"), list[Any]()
    last_layer = next(name for name, module in layered.hf_model.named_modules() if module is layered.layers[-1])
    original.get_submodule(last_layer).register_forward_hook(lambda _module, _inputs, out: outputs.append(out))
    with torch.no_grad():
        original(torch.from_numpy(ids)[None], use_cache=False)
    expected = (outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0])[0].float()
    assert float(((actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).median()) < 0.01


def logits_error(family: Path, out: Path) -> float:
    """Return the relative error of the logits with converted experts, as the runtime computes them."""
    import transformers

    from ktconvert.native_quant import KTConvertConfig

    tokenizer = transformers.AutoTokenizer.from_pretrained(family)
    ids = torch.tensor(tokenizer(TEXT.read_text())["input_ids"])[None, :300]
    ours = load_model(family, quantization_config=KTConvertConfig(threads=1, cpu_weights=str(out)))
    with torch.no_grad():
        actual, expected = (each(ids, use_cache=False).logits.float()[0] for each in (ours, load_model(family)))
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def test_gptq_reduces_the_error_of_families(family: Path, tmp_path: Path) -> None:
    """Also where the experts compute in a latent space, with the Fisher information of predictions about it."""
    for module in ("accelerate", "datasets", "llmcompressor"):
        pytest.importorskip(module, reason="needs the extra gpu")
    kinds: dict[str, tuple[object, ...]] = {
        "rounded": ("gpu", "--quant-method", "RTN", "--quant-type", "W4A16", "--group-size", 32),
        "gptq": ("gpu", "--quant-method", "GPTQ", "--quant-type", "W4A16", "--group-size", 32, *CALIBRATION),
        "full": ("cpu", "--quant-method", "rawint4", "--scale", "gptq", *CALIBRATION),
    }
    errors = {}
    for name, (command, *options) in kinds.items():
        out = tmp_path / name
        run(command, "-i", family, "-o", out, *options, "-q")
        run("verify", out, "--against", family)
        errors[name] = logits_error(family, out)
    assert errors["full"] < errors["gptq"] < 0.9 * errors["rounded"] < 0.3, errors


@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_that_of_transformers(family: str, tmp_path: Path) -> None:
    """Each of 64 greedy tokens is ours, too, unless two are equally likely; BF16 rounds in a different order."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from ktconvert.native_quant import KTConvertConfig, KTMoEWrapper

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SMALL, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("_proj_bias"):
            parameter.data.normal_(0, 0.5)
    model.save_pretrained(tmp_path / "model")
    out = convert(tmp_path / "model", tmp_path / "out", "bf16")
    prompt = torch.randint(3, 320, (1, 20), generator=torch.Generator().manual_seed(1))
    text = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    settings = ({"cpu_weights": str(out)}, {"cpu_weights": str(out), "num_gpu_experts": 3}, {})
    for setting in settings:
        ours = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", dtype=torch.bfloat16, quantization_config=KTConvertConfig(threads=1, **setting)
        )
        with torch.no_grad():
            logits, expected = (
                each(text[:, :-1], use_cache=False).logits.float()[0, -TOKENS:] for each in (ours, model)
            )
        chosen = logits.gather(1, text[0, -TOKENS:, None])[:, 0]
        assert (chosen == logits.max(-1).values).float().mean() > 0.8
        near = (logits.max(-1).values - chosen) / logits.std(-1)
        assert near.median() == 0 and (near < 0.5).float().mean() > 0.95
        assert ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.02
        module = next(m for m in ours.modules() if hasattr(m, "experts") and hasattr(m.experts, "experts")).experts
    loaded = module.experts
    options: dict[str, Any] = {"method": "BF16", "cpuinfer_threads": 1, "threadpool_count": 1, "weight_path": str(out)}
    sizes = loaded.num_experts, TOPK, loaded.hidden, loaded.intermediate
    wrapper = KTMoEWrapper(loaded.layer, *sizes, None, chunked_prefill_size=512, **options)
    wrapper.load_weights()
    hidden = torch.randn(5, loaded.hidden).to(torch.bfloat16)
    ids, weights = torch.arange(2 * 5).reshape(5, 2) % 8, torch.rand(5, 2)
    assert torch.equal(wrapper.forward(hidden, ids, weights), module(hidden, ids, weights))
