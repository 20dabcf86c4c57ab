"""KTMoEWrapper under SGLang: the calls of sglang 0.5.23 and sglang-kt 0.7.2, against float64, and the function of experts.

engines.py drives the real modules of both; here, the same calls with the same arguments.
"""

import functools
import inspect
import json
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktconvert.layouts.checkpoints.expert_function import ExpertFunction
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import launch
from ktconvert.native_quant import KTMoEWrapper, kernels
from rig import conversion, engines, gguf, stored
from rig.engines import EXPERTS, HIDDEN, ON_GPU, TOPK, WIDTH, Weights, compute, draw, relative_error
from rig.floats import to_bits
from rig.safetensors import read_file, write_file
from rig.wrappers import clear_state  # noqa: F401

# Methods and the largest relative error of their weights and sums.
METHODS = {"BF16": 0.01, "AMXINT8": 0.02, "FP8": 0.05, "RAWINT4": 0.2, "MXFP4": 0.2, "GPTQ_INT4": 0.2, "AMXINT4": 0.25}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
BACKWARDS = torch.arange(EXPERTS).flip(0)


@pytest.fixture(scope="module")
def weights(example: Path) -> Weights:
    return engines.read_weights(example)


@pytest.fixture(scope="module")
def paths(
    example: Path, packed_example: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Return a function that returns the path of a method's weights of the bundled model."""

    @functools.cache
    def find(method: str) -> str:
        if method.startswith("AMX"):
            return str(packed_example(method.removeprefix("AMX").lower(), 1))
        return str(stored.model(example, tmp_path_factory.mktemp("stored") / method, method))

    return find


def make_upstream(path: str, method: str, layer: int = 0, deferred: int = 0, gpu: int = 3) -> KTMoEWrapper:
    """Make a wrapper with the arguments of sglang 0.5.23."""
    return KTMoEWrapper(
        layer_idx=layer,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_gpu_experts=gpu,
        cpuinfer_threads=2,
        threadpool_count=1,
        weight_path=path,
        chunked_prefill_size=512,
        method=method,
        max_deferred_experts_per_token=deferred,
    )


def make_sglang_kt(
    path: str, method: str, layer: int = 0, deferred: int = 0, on_gpu: Any = ON_GPU, **constants: float
) -> KTMoEWrapper:
    """Make a wrapper with the arguments of sglang-kt 0.7.2."""
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[list(on_gpu)] = True
    sizes = dict(zip(("hidden_size", "moe_intermediate_size"), (HIDDEN, WIDTH), strict=True))
    return KTMoEWrapper(
        layer_idx=layer,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        gpu_experts_mask=mask,
        cpuinfer_threads=2,
        threadpool_count=1,
        numa_nodes=None,
        weight_path=path,
        chunked_prefill_size=512,
        method=method,
        max_deferred_experts_per_token=deferred,
        **sizes | {"swiglu_limit": 0.0, "swiglu_alpha": 0.0} | constants,
    )


def run(
    wrapper: KTMoEWrapper, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, device: str = "cpu"
) -> torch.Tensor:
    """Submit and sync as SGLang does, which changes the ids in between; on a GPU, with the number of its stream."""
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    x, ids, scores = x.to(device), ids.to(device, copy=True), scores.to(device)
    wrapper.submit_forward(x, ids, scores, stream)
    ids[ids >= wrapper.num_gpu_experts] = -1
    return wrapper.sync_forward(x, stream).cpu()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("method", METHODS)
def test_calls_of_upstream_sglang_give_the_sum_of_the_cpu_experts(method, device, paths, weights):
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])
    wrapper = make_upstream(paths(method), method)
    wrapper.load_weights(BACKWARDS.repeat(2, 1)[0].contiguous())
    for tokens in (1, 4, 33):
        x, ids, scores = draw(tokens, tokens)
        logical = torch.tensor([*BACKWARDS.tolist(), -1])[ids.long().masked_fill(ids < 3, -1)]
        out = run(wrapper, x, ids, scores, device)
        assert relative_error(out, compute(weights[0], x, logical, scores)) < METHODS[method]
        assert out.dtype == x.dtype and out.shape == x.shape and (tokens == 1 or not out[-1].any())


@pytest.mark.parametrize("method", METHODS)
def test_calls_of_sglang_kt_give_the_sum_of_the_cpu_experts(method, device, paths, weights):
    wrapper = make_sglang_kt(paths(method), method, layer=1)
    wrapper.load_weights(torch.arange(EXPERTS, dtype=torch.int64))
    x, ids, scores = draw(20, 1)
    out = run(wrapper, x, ids, scores, device)
    assert relative_error(out, compute(weights[1], x, ids, scores, ON_GPU)) < METHODS[method]
    address = wrapper.gpu_experts_mask.data_ptr()
    wrapper.gpu_experts_mask.copy_(torch.arange(EXPERTS) % 2 == 0)  # --kt-enable-dynamic-expert-update
    assert wrapper.gpu_experts_mask.data_ptr() == address and wrapper.num_gpu_experts == 4
    expected = compute(weights[1], x, ids, scores, range(0, EXPERTS, 2))
    assert relative_error(run(wrapper, x, ids, scores, device), expected) < METHODS[method]


@pytest.mark.parametrize("make", [make_upstream, make_sglang_kt])
def test_every_expert_counts_once_with_deferral(make, device, paths, weights):
    """A layer's output and the next one's together contain all experts of the CPU."""
    path, on_gpu = paths("BF16"), range(3) if make is make_upstream else ON_GPU
    layers = [make(path, "BF16", layer, 1 - layer) for layer in (0, 1)]
    for wrapper in layers:
        wrapper.load_weights(torch.arange(EXPERTS))
    for tokens in (1, 4, 33):
        x, ids, scores = draw(tokens, tokens)
        now, later = layers[0].select_deferred_experts(ids.long(), scores, TOPK - 1)
        first, second = (run(wrapper, x, ids, scores, device) for wrapper in layers)
        assert relative_error(first, compute(weights[0], x, now, scores, on_gpu)) < 0.01
        expected = compute(weights[1], x, ids, scores, on_gpu) + compute(weights[0], x, later, scores, on_gpu)
        assert relative_error(second, expected) < 0.01


def test_buffers_for_prefill_get_the_mapped_expert(paths, weights):
    wrapper = make_sglang_kt(paths("BF16"), "BF16")
    wrapper.load_weights(BACKWARDS)
    gate, up, down = (matrix.to(torch.bfloat16) for matrix in weights[0])
    half = WIDTH // 2
    for expert in (0, ON_GPU[0]):  # SGLang copies experts that the GPU has, too
        w13 = [torch.zeros(2 * half, HIDDEN, dtype=torch.bfloat16) for _ in range(2)]
        w2 = [torch.zeros(HIDDEN, half, dtype=torch.bfloat16) for _ in range(2)]
        pointers = [[tensor.data_ptr() for tensor in tensors] for tensors in (w13, w2)]
        wrapper.submit_write_weight_scale_to_buffer(2, expert, pointers[0], [0, 0], pointers[1], [0, 0])
        wrapper.sync_write_weight_scale_to_buffer()
        source = int(BACKWARDS[expert])
        for rank, rows in enumerate((slice(0, half), slice(half, WIDTH))):
            assert torch.equal(w13[rank], torch.cat([gate[source][rows], up[source][rows]]))
            assert torch.equal(w2[rank], down[source][:, rows])


def test_sizes_for_graphs_are_kept():
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 4]


def test_a_fork_may_ask_for_the_experts_of_the_cpu_only(paths):
    """Its kt-kernel otherwise keeps the GPU's experts, too; ours never loads them."""
    wrapper = make_sglang_kt(paths("BF16"), "BF16", cold_only_cpu_experts=True)
    wrapper.load_weights(torch.arange(EXPERTS))
    assert set(wrapper.moe._packed.missing) == set(ON_GPU)


def test_a_fork_finds_every_parameter():
    names = set(inspect.signature(KTMoEWrapper.__new__).parameters)
    upstream, kt = (set(inspect.signature(each).parameters) for each in (make_upstream, make_sglang_kt))
    assert {"layer_idx", "gpu_experts_mask", "numa_nodes", "swiglu_limit", "swiglu_alpha", "situ_beta"} <= names
    assert not {"arguments", "named"} & (names | upstream | kt)


# --- deferred experts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_deferred_are_the_least_experts_of_the_cpu(seed, paths):
    """Experts on the GPU are never deferred, and a token defers as many of the CPU's as it may."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(EXPERTS, generator=g) < 0.5
    wrapper = make_sglang_kt("", "BF16", on_gpu=torch.where(mask)[0].tolist())
    ids = torch.rand(1, EXPERTS, generator=g).argsort(1)[:, :5]
    scores = torch.rand(1, 5, generator=g)
    for protected in range(-1, 7):
        now, later = wrapper.select_deferred_experts(ids, scores, protected)
        deferrable = sorted((float(s), int(e)) for s, e in zip(scores[0], ids[0], strict=True) if not mask[e])
        expected = {e for _, e in deferrable[: 5 - min(max(protected, 0), 5)]}
        assert (set() if later is None else set(later[later >= 0].tolist())) == expected
        assert set(now[now >= 0].tolist()) == set(ids[0].tolist()) - expected


def test_an_expert_that_one_token_needs_now_is_deferred_for_none():
    wrapper = make_sglang_kt("", "BF16", on_gpu=())
    now, later = wrapper.select_deferred_experts(torch.tensor([[0, 1], [1, 2]]), torch.tensor([[1.0, 2], [1, 2]]), 1)
    assert now.tolist() == [[-1, 1], [1, 2]] and later is not None and later.tolist() == [[0, -1], [-1, -1]]


@pytest.mark.parametrize("way", ["forward", "submit"])
def test_an_assigned_selection_decides(way, paths, weights):
    first, second = (make_sglang_kt(paths("BF16"), "BF16", layer, 1 - layer) for layer in (0, 1))
    calls: list[int] = []

    def defer_all(ids: torch.Tensor, scores: torch.Tensor, protected: int) -> Any:
        calls.append(protected)
        return torch.full_like(ids, -1), ids.int().T.contiguous().T  # any dtype and strides

    first.select_deferred_experts = defer_all
    for wrapper in (first, second):
        wrapper.load_weights(torch.arange(EXPERTS))
    x, ids, scores = draw(7, 1)
    outs = [w.forward(x, ids, scores, 0) if way == "forward" else run(w, x, ids, scores) for w in (first, second)]
    assert calls == [TOPK - 1] and not outs[0].any()
    assert relative_error(outs[1], sum(compute(w, x, ids, scores, ON_GPU) for w in weights)) < 0.01
    first.select_deferred_experts = lambda ids, scores, protected: (ids[:1], None)
    with pytest.raises(ValueError, match=r"must return two tensors of the shape of expert_ids, \(7, 2\), not \(1, 2\)"):
        first.forward(x, ids, scores)


# --- the function of experts ---------------------------------------------------------------------------------------

V4 = {"model_type": "deepseek_v4", "swiglu_limit": 0.5}
STEP = {"model_type": "step3p5", "swiglu_limits": [0.0, 0.5]}
STEP_FUNCTION = ExpertFunction("swiglu_step", limit=0.5)
K3 = {"model_type": "kimi_k3", "hidden_act": "situ", "activation_situ_beta": 1.0, "activation_situ_linear_beta": 2.0}
SITU = ExpertFunction("softcap", alpha=1.0, beta=2.0)
OAI = ExpertFunction("swiglu_oai", limit=0.5, alpha=1.702)
M3 = {"model_type": "minimax_m3", "swiglu_limit": 0.5, "swiglu_alpha": 1.702}
QWEN = {"model_type": "qwen3_moe", "hidden_act": "silu"}
# Family: config.json, and the function of each of two layers.
FAMILIES: Mapping[str, tuple[dict[str, Any], tuple[ExpertFunction, ExpertFunction]]] = {
    "DeepSeek-V4": (V4, (ExpertFunction(limit=0.5),) * 2),
    "Step": (STEP, (ExpertFunction(), STEP_FUNCTION)),
    "MiniMax-M3": (M3, (OAI, OAI)),
    "Kimi-K3": (K3, (SITU, SITU)),
    "Qwen3": (QWEN, (ExpertFunction(),) * 2),
}
SIZE, FEW = 128, 4
CONSTANTS = ("swiglu_limit", "swiglu_alpha", "situ_beta", "situ_linear_beta")


def draw_experts() -> list[Any]:
    """Return gate, up and down of a layer, float64, with values of MXFP4, whose products limits cut."""
    rng = np.random.default_rng(1)
    values = np.array([0.5, 1, 1.5, 2, 3, 4, 6]) / 16
    return [rng.choice([*values, *-values], (FEW, SIZE, SIZE)) for _ in range(3)]


LINEARS = draw_experts()


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a BF16 checkpoint with the same experts in two layers."""
    folder.mkdir()
    tensors: dict[str, tuple[str, Any]] = {}
    for layer in range(2):
        base = f"model.layers.{layer}.mlp."
        tensors[f"{base}gate.weight"] = "BF16", np.zeros((FEW, SIZE), np.uint16)
        for name, matrices in zip(("gate", "up", "down"), LINEARS, strict=True):
            for expert, matrix in enumerate(matrices):
                tensors[f"{base}experts.{expert}.{name}_proj.weight"] = "BF16", to_bits(matrix)
    write_file(folder / "model.safetensors", tensors)
    sizes = {"hidden_size": SIZE, "moe_intermediate_size": SIZE, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    experts = {"num_experts": FEW, "n_routed_experts": FEW}
    (folder / "config.json").write_text(json.dumps(sizes | experts | config))
    return folder


def make_small(path: Path | str, method: str = "BF16", layer: int = 0, **constants: float) -> KTMoEWrapper:
    return KTMoEWrapper(layer, FEW, 2, SIZE, SIZE, None, 2, 1, str(path), 512, method=method, **constants)


def load_small(path: Path | str, method: str = "BF16", layer: int = 0, **constants: float) -> KTMoEWrapper:
    wrapper = make_small(path, method, layer, **constants)
    wrapper.load_weights(torch.arange(FEW))
    return wrapper


def error_to(function: ExpertFunction, wrapper: KTMoEWrapper) -> float:
    """Return the relative error of a forward, to experts that compute a function."""
    g = torch.Generator().manual_seed(1)
    x, ids = torch.randn(6, SIZE, generator=g).to(torch.bfloat16), torch.tensor([[0, 1], [2, 3]] * 3)
    scores = torch.rand(6, 2, generator=g)
    gate, up, down = LINEARS
    expected = np.zeros((6, SIZE))
    for t, j in np.ndindex(6, 2):
        e, token = int(ids[t, j]), x[t].double().numpy()
        expected[t] += float(scores[t, j]) * (down[e] @ function.compute(gate[e] @ token, up[e] @ token))
    return relative_error(wrapper.forward(x, ids, scores), torch.from_numpy(expected))


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cli: Any
) -> tuple[tuple[ExpertFunction, ...], dict[str, Path]]:
    """Return the functions of a family's layers, and form -> path of its weights."""
    config, functions = FAMILIES[request.param]
    root = tmp_path_factory.mktemp("family")
    forms = {"BF16": write_model(root / "model", config)}
    for method, options in {"AMXINT8": ("int8",), "MXFP4": ("mxfp4",), "FP8": ("fp8",)}.items():
        forms[method] = root / method
        cli("cpu", "-i", forms["BF16"], "-o", forms[method], "-q", "--threadpool-count", 1, "--quant-method", *options)
    return functions, forms


def test_experts_compute_what_the_directory_records(family):
    """Without arguments, as upstream calls, and with zeros, as sglang-kt does for most methods."""
    functions, forms = family
    for method, path in forms.items():
        bound = {"AMXINT8": 0.04, "FP8": 0.06}.get(method, 0.01)
        for layer, function in enumerate(functions):
            assert error_to(function, load_small(path, method, layer)) < bound, method
            zeros = load_small(path, method, layer, swiglu_limit=0.0, swiglu_alpha=0.0)
            assert error_to(function, zeros) < bound, method


def test_outputs_without_records_use_config_json(family):
    """kt-kernel's own outputs have no manifest and no metadata; their config.json decides."""
    functions, forms = family
    path = forms["AMXINT8"]
    bare = path.with_name("bare")
    bare.mkdir()
    for shard in path.glob("*.safetensors"):
        (bare / shard.name).write_bytes(strip_metadata(shard.read_bytes()))
    (bare / "config.json").write_bytes((forms["BF16"] / "config.json").read_bytes())
    for layer, function in enumerate(functions):
        assert error_to(function, load_small(bare, "AMXINT8", layer)) < 0.04


def strip_metadata(file: bytes) -> bytes:
    """Return a safetensors file without its metadata."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    header.pop("__metadata__", None)
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + file[8 + length :]


def test_equal_arguments_are_accepted_and_others_are_errors(family):
    functions, forms = family
    for layer, function in enumerate(functions):
        names = CONSTANTS[2:] if function.activation == "softcap" else CONSTANTS[:2]
        values = (
            (function.alpha, function.beta) if function.activation == "softcap" else (function.limit, function.alpha)
        )
        equal = dict(zip(names, values, strict=True))
        for method in ("BF16", "AMXINT8"):
            assert load_small(forms[method], method, layer, **equal).moe._function == function
            for name in CONSTANTS[:3]:
                if function == ExpertFunction() and not any("swiglu" in key for key in config_of(forms["BF16"])):
                    continue  # nothing is recorded
                with pytest.raises(UnsupportedError, match=rf"layer {layer} compute .*, not .*; use this model's dir"):
                    load_small(forms[method], method, layer, **{name: 0.25})


def config_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "config.json").read_text())
    return document


def test_an_argument_decides_where_nothing_is_recorded(tmp_path):
    path = write_model(tmp_path / "in", QWEN)
    assert error_to(ExpertFunction(limit=0.5), load_small(path, swiglu_limit=0.5)) < 0.01
    assert error_to(OAI, load_small(path, swiglu_limit=0.5, swiglu_alpha=1.702)) < 0.01
    assert error_to(SITU, load_small(path, situ_beta=1.0, situ_linear_beta=2.0)) < 0.01


def test_tensors_use_config_json_of_the_directory(tmp_path):
    tensors = [torch.from_numpy(matrix).to(torch.bfloat16) for matrix in LINEARS]
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "config.json").write_text(json.dumps(STEP))
    cases: list[tuple[str, int, dict[str, float], ExpertFunction]] = [
        ("step", 0, {}, ExpertFunction()),
        ("step", 1, {}, STEP_FUNCTION),
        ("step", 1, {"swiglu_limit": 0.5}, STEP_FUNCTION),
        ("missing", 0, {}, ExpertFunction()),
        ("missing", 0, {"swiglu_limit": 0.5}, ExpertFunction(limit=0.5)),
    ]
    for name, layer, constants, function in cases:
        wrapper = make_small(tmp_path / name, layer=layer, **constants)
        wrapper.load_weights_from_tensors(*tensors, torch.arange(FEW))
        assert error_to(function, wrapper) < 0.01
    with pytest.raises(UnsupportedError, match=r"step: the experts of layer 1 compute .* 0.5, not .* 0.25; use"):
        make_small(tmp_path / "step", layer=1, swiglu_limit=0.25).load_weights_from_tensors(*tensors)


def test_gguf_metadata_tells_the_function(tmp_path):
    """LLAMAFILE reads no config.json; without a limit in the metadata, the argument decides."""
    for limit in (0.5, 0.0):
        sizes = {"embedding_length": SIZE, "expert_count": FEW, "expert_feed_forward_length": SIZE}
        keys = {**sizes, **({"swiglu_clamp_exp": [limit] * 2} if limit else {})}
        tensors: dict[str, tuple[str, Any]] = {}
        for layer in range(2):
            for name, matrices in zip(("gate", "up", "down"), LINEARS, strict=True):
                tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = "BF16", to_bits(matrices).view(np.uint8)
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = "F32", np.ones((FEW, SIZE), np.float32)
        path = tmp_path / str(limit) / "model.gguf"
        arch = "step35" if limit else "qwen3moe"
        gguf.write(path, tensors, gguf.model_metadata(2, arch, **keys), arch)
        for place in (path, path.parent):
            given = {} if limit else {"swiglu_limit": 0.5}
            function = STEP_FUNCTION if limit else ExpertFunction(limit=0.5)
            assert error_to(function, load_small(place, "LLAMAFILE", 1, **given)) < 0.01


# --- the engines themselves ----------------------------------------------------------------------------------------

ENGINES = ("sglang==0.5.23", "sglang-kt==0.7.2")
MODULE = "sglang/srt/layers/moe/kt_ep_wrapper.py"


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return a requirement, and a directory with the Python files of its wheel. Skips if pip cannot download it."""
    folder = tmp_path_factory.mktemp("engine")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), request.param]
    done = subprocess.run(download, capture_output=True, text=True, timeout=900)
    wheel = next(iter(folder.glob("*.whl")), None)
    if done.returncode or wheel is None:
        pytest.skip(f"pip cannot download {request.param} here: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
    return request.param, folder


@pytest.mark.long
def test_the_engines_have_the_options_of_our_commands(engine, tmp_path, example):
    """Upstream makes options of the names of fields, sglang-kt writes them in one file."""
    package = engine[1] / "sglang" / "srt"
    files = [package / "server_args.py", *(package / "arg_groups").rglob("*.py")]
    texts = [path.read_text() for path in files]
    known = {option for text in texts for option in re.findall(r'"(--[a-z0-9-]+)"', text)}
    known |= {
        f"--{name.replace('_', '-')}" for text in texts for name in re.findall(r"^    (\w+): ", text, re.MULTILINE)
    }
    machine = ("--ram", "64GB", "--vram", "24GB,24GB", "--numa", 2, "--disk", "1TB", "--bandwidth", "20GB")
    done = conversion.ktconvert("fit", example, *map(str, machine), "--runtime", "sglang", "--json")
    assert done.returncode == 0, done.stderr
    (launched,) = (step["command"] for step in json.loads(done.stdout)["commands"] if step["step"] == "launch")
    counts = launch.place_experts(Path("counts.pt"), launch.PER_LAYER, by_counts=engine[0].startswith("sglang-kt"))
    options = {word for word in (*shlex.split(launched), *" ".join(counts).split()) if word.startswith("--")}
    assert {"--kt-weight-path", "--tp-size", "--init-expert-location"} <= options
    assert options <= known


@pytest.mark.long
def test_the_engines_own_code_computes(engine, tmp_path, example, paths):
    """Their kt_ep_wrapper.py, from the wheels, with stubs for CUDA and the rest of SGLang (engines.py)."""
    requirement, folder = engine
    bounds = {name: METHODS[name] for name in ("BF16", "AMXINT8", "AMXINT4", "RAWINT4", "FP8", "MXFP4")}
    job = tmp_path / "job.json"
    adapter = engines.write_adapter(tmp_path / "adapter")
    files = {"module": str(folder / MODULE), "model": str(example), "adapter": str(adapter)}
    job.write_text(json.dumps(files | {"weights": {name: paths(name) for name in bounds}}))
    for name in ("RAWINT4", "FP8", "MXFP4"):  # for these, sglang-kt requires an index
        shards = {
            tensor: shard.name for shard in Path(paths(name)).glob("*.safetensors") for tensor in read_file(shard)
        }
        (Path(paths(name)) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    result = subprocess.run(
        [sys.executable, "-P", engines.__file__, str(job)], capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr[-3000:]
    errors = json.loads(result.stdout.splitlines()[-1])
    print(requirement, kernels.isa(), errors)
    assert {name.split(",")[0] for name in errors} == set(bounds)
    for name, error in errors.items():
        assert error < bounds[name.split(",")[0]], name
