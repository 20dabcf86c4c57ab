"""`ktconvert fit`: exact sizes, memory of the runtime, caches by attention, what fits, and the commands for it."""

import json
import os
import shlex
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconvert.layouts.checkpoints.attention import AttentionBytes, LayerCache, find_attention_bytes, find_caches
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.pipeline.fit.estimate import (
    CPU_SHARE,
    KTCONVERT,
    MASK,
    PREFERENCES,
    READ_SHARE,
    SGLANG,
    Choice,
    ExpertForm,
    Machine,
    ModelShape,
    Predictor,
    RestForm,
    Use,
    list_choices,
    predict_cpu_rate,
)
from ktconvert.pipeline.fit.machines import GPUS, find_gpu
from ktconvert.pipeline.fit.model_shape import read_shape
from rig import conversion, gguf
from rig.absent import hide_package
from rig.hub_server import serve_hub
from rig.scripts import FOLDER, load_benchmark
from rig.served import start_server

EXAMPLE = FOLDER.parent / "examples" / "qwen3-moe-small"
GIB = 1 << 30
# A machine that every tiny model fits; no measurement of this one.
LARGE = ("--ram", "1TB", "--vram", "24GB", "--disk", "4TB", "--bandwidth", "100GB", "--numa", "2")
sys.path.insert(0, str(FOLDER))  # benchmarks import each other by name
shapes = load_benchmark("shapes")
models = load_benchmark("models")


def fit(model: object, *options: object) -> dict[str, Any]:
    """Return the JSON object of `ktconvert fit`."""
    done = conversion.ktconvert("fit", str(model), *map(str, options), "--json")
    assert done.returncode in (0, 4), done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def read_plan(*arguments: object) -> dict[str, Any]:
    """Return the plan of a dry run."""
    done = conversion.ktconvert(*map(str, arguments), "--dry-run", "--json", "-q")
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = next(e for e in conversion.parse_events(done.stdout) if e["event"] == "plan")
    return plan


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("fit") / "model")


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 2])
def test_size_of_each_form_is_the_size_of_the_real_output(tmp_path, tiny, slices):
    document = fit(tiny, *LARGE, "--numa", slices)
    forms = {choice["quant_method"]: choice for choice in document["choices"] if choice["rest"] == "published"}
    assert {"int4", "int8", "rawint4", "mxfp4", "fp8", "bf16", None} == forms.keys()
    for method, choice in forms.items():
        if method is None:
            assert choice["output"] == 0 and choice["loss"] == 0
            continue
        if choice["problem"]:  # FP8 needs 128 columns in each slice, INT4 too
            assert "slices" in choice["problem"] and slices == 2
            continue
        command = ("cpu", "-i", tiny, "-o", tmp_path / method, "--quant-method", method, "--threadpool-count", slices)
        assert read_plan(*command)["bytes_out"] == choice["output"]
        done = conversion.ktconvert(*map(str, command))
        assert done.returncode == 0, done.stderr
        index = json.loads((tmp_path / method / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == choice["output"], method


def test_size_of_a_whole_model_for_the_gpu_is_that_of_its_plan(tmp_path, tiny):
    document = fit(tiny, *LARGE)
    packed = next(choice for choice in document["choices"] if choice["rest"] == "W4A16")
    plan = read_plan("gpu", "-i", tiny, "-o", tmp_path / "out", "--quant-method", "RTN", "--quant-type", "W4A16")
    assert plan["bytes_out"] == packed["disk"] - packed["output"]


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_sizes_for_shapes_of_released_models_are_those_of_their_plans(tmp_path, name):
    shape = shapes.SHAPES[name]
    tensors, config = shapes.list_tensors(shape, layers=shape.dense + 1)
    models.write_model(tmp_path / "model", tensors, config, 3)
    document = fit(tmp_path / "model", *LARGE, "--ram", "2TB")
    fitting = {choice["quant_method"]: choice for choice in document["choices"] if not choice["problem"]}
    assert len(fitting) >= 2 and document["cache_known"]
    method = next(method for method in fitting if method)
    command = ("cpu", "-i", tmp_path / "model", "-o", tmp_path / "out", "--quant-method", method)
    assert read_plan(*command, "--threadpool-count", 2)["bytes_out"] == fitting[method]["output"]


# ---- memory ---------------------------------------------------------------------------------------------------------

GROWTH = """
import sys
from pathlib import Path
from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.experts import KTExperts, open_experts
open_experts(Path(sys.argv[1])).require_computable()
before = machine.rss()
experts = KTExperts.load(Path(sys.argv[1]), int(sys.argv[2]), memory="copy")
print(machine.rss() - before)
"""


@pytest.mark.parametrize(("name", "count"), [("Qwen3-30B-A3B", 40), ("DeepSeek-V3", 5)])
@pytest.mark.parametrize("method", [None, "int4"])
def test_memory_of_experts_is_that_of_the_runtime(tmp_path, name, count, method):
    shape = shapes.SHAPES[name]
    tensors, config = shapes.list_tensors(shape, layers=shape.dense + 1)
    key = next(key for key in ("num_experts", "n_routed_experts") if key in config)
    config |= {key: count, "num_experts_per_tok": 2}
    kept = [t for t in tensors if f".{shape.dense}.mlp.experts." in t.name and expert_of(t.name) < count]
    models.write_model(tmp_path / "model", kept, config, 1)
    shape_of_layer = read_shape(recognize(open_checkpoint(tmp_path / "model")), 1, SGLANG)
    form = next(form for form in shape_of_layer.forms if form.option == (method or ""))
    weights = tmp_path / "model"
    if method is not None:
        weights = tmp_path / "out"
        command = ("cpu", "-i", tmp_path / "model", "-o", weights, "--quant-method", method, "--threadpool-count", "1")
        assert conversion.ktconvert(*command).returncode == 0
    with KTExperts.load(weights, shape.dense, memory="copy") as experts:
        assert experts.nbytes == count * form.expert[0]
    arguments = [sys.executable, "-c", GROWTH, str(weights), str(shape.dense)]
    grown = int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    assert abs(grown / (count * form.expert[0]) - 1) < 0.05


def expert_of(name: str) -> int:
    """Return the number of an expert in the name of its tensor."""
    return int(name.partition("experts.")[2].partition(".")[0])


def test_memory_of_our_server_is_predicted_for_the_bundled_model(tmp_path):
    """Within a fifth, as other versions of torch need other amounts; docs/explanation/fit.md has measured figures."""
    torch = pytest.importorskip("torch")
    for package in ("transformers", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    if torch.version.cuda:
        pytest.skip("a torch with CUDA loads more libraries")
    document = fit(EXAMPLE, *LARGE, "--numa", 1, "--vram", 0, "--ram", "1GB")
    choice = next(choice for choice in document["choices"] if choice["quant_method"] is None)
    assert choice["fits"]
    with start_server(EXAMPLE, tmp_path / "log") as (process, url):
        body = json.dumps({"prompt": "def f(x):\n" * 80, "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=60).close()
        status = Path(f"/proc/{process.pid}/status").read_text()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    assert abs(choice["ram"] / peak - 1) < 0.2


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("Qwen3-30B-A3B", 1000, 48 * 1000 * 2 * 4 * 128 * 2),
        ("DeepSeek-V3", 1000, 61 * 1000 * (512 + 64) * 2),
        ("gpt-oss-120b", 1000, 18 * (1000 + 128) * 2 * 8 * 64 * 2),
        ("Llama-4-Scout-17B-16E", 10_000, (12 * 10_000 + 36 * 8192) * 2 * 8 * 128 * 2),
    ],
)
def test_cache_follows_the_attention_of_the_config(name, tokens, expected):
    config = shapes.SHAPES[name].config
    caches = find_caches(config, shapes.SHAPES[name].sizes["num_hidden_layers"])
    assert caches is not None and sum(cache.bytes_of(tokens) for cache in caches) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-30B-A3B", AttentionBytes(2 * 32 * 128, 2 * 32 * 128, repeated=2 * (32 // 4) * (128 + 128))),
        ("DeepSeek-V3", AttentionBytes(2 * 128 * 192, 2 * 128 * 128, 2 * 128 * (128 + 128 + 192))),
    ],
)
def test_latents_are_expanded_to_keys_and_values_of_all_heads(name, expected):
    assert find_attention_bytes(shapes.SHAPES[name].config) == expected


def test_latents_with_an_index_are_expanded_in_the_cache_of_transformers():
    config = {**shapes.SHAPES["DeepSeek-V3"].config, "index_head_dim": 128}
    assert find_caches(config, 1) == (LayerCache((512 + 64) * 2 + 128 + 4),)
    assert find_caches(config, 1, in_transformers=True) == (LayerCache((128 * (128 + 64 + 128) + 128) * 2),)
    assert find_attention_bytes(config).expanded == 0  # once, for the cache


def test_linear_attention_keeps_a_state_of_fixed_size():
    shape = shapes.SHAPES["Qwen3.5-397B-A17B"]
    caches = find_caches(shape.config, 60)
    assert caches is not None
    growing = [layer for layer, cache in enumerate(caches) if cache.token]
    assert growing == [*range(3, 60, 4)] and caches[3].token == 2 * 2 * 256 * 2
    assert caches[0].bytes_of(1) == caches[0].bytes_of(100_000) > 64 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        ({"sliding_window": 8, "use_sliding_window": False}, []),
        ({"sliding_window": None}, []),
        ({"sliding_window": 8}, [0, 1, 2, 3]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [0, 2]),
        ({"sliding_window": 8, "hybrid_layer_pattern": [0, 1, 1, 0]}, [1, 2]),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}, [1, 3]),
    ],
)
def test_windows_are_in_the_layers_that_the_config_names(config, windowed):
    caches = find_caches({"num_attention_heads": 4, "hidden_size": 64, **config}, 4)
    assert caches is not None
    assert [layer for layer, cache in enumerate(caches) if cache.most == 8] == windowed
    assert all(cache.token == 2 * 4 * 16 * 2 for cache in caches)


def test_a_config_without_attention_has_no_cache():
    assert find_caches({"hidden_size": 64}, 2) is None


# ---- predictions ----------------------------------------------------------------------------------------------------


def make_shape(layers: int, experts: int, hidden: int, token: int) -> ModelShape:
    """Return a model whose experts take the same bytes in every layer."""
    nbytes = hidden * hidden
    forms = tuple(
        ExpertForm(
            option, option, "absmax", (nbytes // share,) * layers, nbytes // share * experts * layers, loss, 1e10
        )
        for option, share, loss in (("int4", 2, 0.004), ("int8", 1, 0.0004))
    )
    rest = RestForm("published", nbytes * layers, nbytes * layers, (2 * nbytes,) * layers)
    caches = (LayerCache(token, heads=4),) * layers
    topk = min(8, experts), "config.json: num_experts_per_tok"
    return ModelShape((experts,) * layers, *topk, layers, hidden, 1000, forms, (rest,), caches, nbytes)


SIZES = st.integers(0, 1 << 36)
SHAPES = st.builds(make_shape, st.integers(1, 4), st.integers(1, 64), st.integers(256, 8192), st.integers(1, 4096))
MACHINES = st.builds(
    Machine, SIZES, st.lists(SIZES, max_size=3).map(tuple), st.just(1), SIZES, st.just(1e11), st.just(1e12)
)
USES = st.builds(
    Use,
    st.integers(1, 1 << 17),
    st.integers(1, 8),
    st.sampled_from([SGLANG, KTCONVERT]),
    st.sampled_from(PREFERENCES),
)


def predict(shape: ModelShape, target: Machine, use: Use) -> list[Choice]:
    predictor = Predictor(shape, target, use)
    return [predictor.predict(form, shape.rests[0]) for form in shape.forms]


@given(SHAPES, MACHINES, USES, SIZES)
def test_more_gpu_memory_never_means_fewer_experts_on_the_gpu(shape, target, use, more):
    larger = Machine(**vars(target) | {"vram": tuple(size + more for size in target.vram)})
    for less, much in zip(predict(shape, target, use), predict(shape, larger, use), strict=True):
        assert less.gpu_experts <= much.gpu_experts and less.ram["experts"] >= much.ram["experts"]
        assert less.problem or not much.problem


@given(SHAPES, MACHINES, USES, st.integers(1, 1 << 17))
def test_a_longer_context_never_means_more_experts_on_the_gpu(shape, target, use, more):
    longer = Use(use.context + more, use.sequences, use.runtime, use.prefer)
    for short, long in zip(predict(shape, target, use), predict(shape, target, longer), strict=True):
        assert short.gpu_experts >= long.gpu_experts
        assert short.ram["experts"] <= long.ram["experts"] and (short.problem == "" or long.problem != "")


@given(SHAPES, MACHINES, USES)
def test_choices_that_fit_stay_within_the_machine_and_come_first(shape, target, use):
    choices = list_choices(shape, target, use)
    assert [bool(c.problem) for c in choices] == sorted(bool(c.problem) for c in choices)
    for choice in choices:
        assert choice.tokens_per_second > 0
        if not choice.problem:
            assert choice.ram_bytes <= target.ram and choice.disk <= target.disk
            assert not choice.vram or choice.vram_bytes <= max(target.vram)


@given(SHAPES, MACHINES, USES)
def test_one_more_expert_per_layer_would_exceed_the_gpu(shape, target, use):
    predictor = Predictor(shape, target, use)
    for choice in predict(shape, target, use):
        if choice.vram and not choice.problem and choice.gpu_experts < max(shape.experts):
            more = choice.vram["experts"] + predictor.cards * 2 * shape.hidden**2 * shape.layers
            assert choice.vram_bytes - choice.vram["experts"] + more > predictor.card


def test_memory_of_our_server_grows_with_the_cache_and_the_expanded_latents():
    shape = replace(make_shape(4, 8, 1024, 600), attention=AttentionBytes(8192, 8192, 20_000, 1000), width=512)
    target = Machine(64 * GIB, (), 1, 1 << 40, 1e11, 1e12)
    sizes = [predict(shape, target, Use(tokens, runtime=KTCONVERT))[0].ram_bytes for tokens in (4000, 8000, 12_000)]
    mask = 512 * MASK  # of the last tokens that are read together
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 4000 * ((4 + 1) * 600 + 20_000 + 1000 + mask)


def test_the_cores_limit_the_speed_only_if_the_bandwidth_was_measured():
    form = make_shape(1, 8, 1024, 64).forms[0]  # a core computes 10 GB/s
    assert predict_cpu_rate(form, 1e11, 4) == 4e10
    assert predict_cpu_rate(form, 1e11, 64) == READ_SHARE * 1e11
    assert predict_cpu_rate(form, 1e11, None) == CPU_SHARE * 1e11


@pytest.mark.parametrize(("ratio", "best"), [(1.1, ""), (1.5, "int8")])
def test_a_conversion_without_less_loss_must_be_much_faster(ratio, best):
    shape = make_shape(4, 64, 1 << 20, 64)
    int8 = shape.forms[1]
    as_it_is = replace(int8, option="", disk=0, expert=tuple(int(nbytes * ratio) for nbytes in int8.expert))
    shape = replace(shape, forms=(int8, as_it_is))
    target = Machine(64 * GIB, (), 1, 1 << 40, 1e9, 1e12)
    assert list_choices(shape, target, Use(runtime=KTCONVERT))[0].form.option == best
    assert list_choices(shape, target, Use(runtime=KTCONVERT, prefer="speed"))[0].form.option == "int8"


def test_preference_decides_which_choice_comes_first():
    shape = make_shape(4, 64, 4096, 64)
    target = Machine(64 * GIB, (), 1, 1 << 40, 1e11, 1e12)
    best = {prefer: list_choices(shape, target, Use(prefer=prefer, runtime=KTCONVERT))[0] for prefer in PREFERENCES}
    assert {prefer: choice.form.option for prefer, choice in best.items()} == {
        "quality": "int8",
        "speed": "int4",
        "memory": "int4",
    }


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("4090", "rtx4090"),
        ("RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("voodoo", None),
    ],
)
def test_names_of_gpus_are_recognized(name, known):
    assert find_gpu(name) == (None if known is None else GPUS[known])


# ---- the command ----------------------------------------------------------------------------------------------------


def test_printed_commands_convert_and_verify(tmp_path):
    document = fit(EXAMPLE, *LARGE, "--vram", "0", "--numa", "1", "--prefer", "memory")
    steps = {row["step"]: shlex.split(row["command"]) for row in document["commands"]}
    assert [*steps] == ["convert", "verify", "launch"]
    for step in ("convert", "verify"):
        done = conversion.ktconvert(*steps[step][1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert steps["launch"] == ["ktconvert", "serve", str(EXAMPLE), "--cpu-weights", steps["convert"][5]]
    assert (tmp_path / steps["convert"][5] / "manifest.json").exists()


def test_hot_experts_are_chosen_if_the_gpu_has_room_for_some(tmp_path):
    shape = shapes.SHAPES["Qwen3-30B-A3B"]
    models.write_model(tmp_path / "model", *shapes.list_tensors(shape, layers=4), 2)
    document = fit(tmp_path / "model", *LARGE, "--vram", "3600MB", "--prefer", "memory")
    assert 0 < document["choices"][0]["gpu_experts"] < 128
    steps = {row["step"]: row["command"] for row in document["commands"]}
    assert [*steps][-3:] == ["count tokens", "choose hot experts", "launch"]
    launch = steps["launch"]
    for part in (
        "sglang.launch_server",
        "--kt-method AMXINT4",
        "--init-expert-location hot.json",
        "--kt-threadpool-count 2",
    ):
        assert part in launch
    assert f"--kt-num-gpu-experts {document['choices'][0]['gpu_experts']}" in launch


def test_a_gguf_fits_as_it_is_with_the_cache_of_its_metadata(tmp_path):
    attention = {"attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 64}
    metadata = gguf.model_metadata(2, **attention)
    path = gguf.write(tmp_path / "model.gguf", gguf.model([("Q4_K", "Q4_K", "Q6_K")] * 2), metadata)
    document = fit(path, *LARGE, "--vram", "0", "--context", 1000)
    stored = next(choice for choice in document["choices"] if choice["quant_method"] is None)
    assert stored["method"] == "LLAMAFILE" and stored["fits"] and stored["disk"] == 0
    assert stored["ram_parts"]["cache"] == 2 * 1000 * 2 * 2 * 64 * 2
    with KTExperts.load(path, 0, memory="copy") as experts:
        assert stored["ram_parts"]["experts"] == 2 * experts.nbytes


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_commands_for_a_gguf_name_the_model_that_provides_the_rest(tmp_path, prefer):
    """That model also provides the experts for the GPU. Without it, all are on the CPU, and a note asks for it."""
    path = gguf.write(tmp_path / "model.gguf", *gguf.quantize_example(EXAMPLE))
    document = fit(path, "--config", EXAMPLE, *LARGE, "--numa", 1, "--prefer", prefer)
    steps = {row["step"]: shlex.split(row["command"]) for row in document["commands"]}
    assert document["choices"][0]["gpu_experts"] > 0
    launch = steps["launch"]
    loaded = launch[launch.index("--model") + 1]
    if "convert for the GPU" in steps:
        assert steps["convert for the GPU"][2:6] == ["-i", str(EXAMPLE), "-o", loaded]
    else:
        assert loaded == str(EXAMPLE)
    if "convert" in steps:
        assert steps["convert"][-2:] == ["--config", str(EXAMPLE)]
    else:
        assert launch[launch.index("--kt-weight-path") + 1] == str(path)
    done = conversion.ktconvert("fit", str(path), *LARGE, "--explain")
    assert "a GGUF has only the experts in usable form" in done.stderr and "; --config MODEL names" in done.stderr
    assert "all experts are on the CPU: a GPU cannot compute those of a GGUF" in done.stdout


def test_missing_packages_of_the_server_are_noted(tmp_path):
    """They are those of this machine, and not of one that options describe."""
    environment = {**os.environ, **hide_package("uvicorn", tmp_path)}
    options = ("--runtime", "ktconvert", "--bandwidth", "100GB")
    done = conversion.ktconvert("fit", EXAMPLE, *options, env=environment)
    assert "note: `ktconvert serve` needs uvicorn, not installed here: `" in done.stderr
    assert done.stdout == conversion.ktconvert("fit", EXAMPLE, *options).stdout
    assert conversion.ktconvert("fit", EXAMPLE, *options, "--ram", "64GB", env=environment).stderr == ""


def test_a_gguf_downloads_all_of_the_original_only_if_its_experts_must_be_on_the_gpu(tmp_path, monkeypatch):
    """That is the case if the main memory is too small for them."""
    pytest.importorskip("huggingface_hub")
    path = gguf.write(tmp_path / "model.gguf", *gguf.quantize_example(EXAMPLE))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with serve_hub({"org/small": EXAMPLE}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        large = fit(path, "--config", "org/small", *LARGE, "--numa", 1)
        ram = large["choices"][0]["ram"] - 1
        small = fit(path, "--config", "org/small", *LARGE, "--numa", 1, "--prefer", "memory", "--ram", ram)
    assert large["choices"][0]["rest"] == "no experts" and large["choices"][0]["gpu_experts"] == 0
    assert any(choice["gpu_experts"] for choice in large["choices"])
    assert large["commands"][0]["command"] == "ktconvert fetch org/small -o small-rest"
    assert small["choices"][0]["fits"]


def test_the_original_of_a_gguf_must_have_its_experts(tmp_path, tiny):
    path = gguf.write(tmp_path / "model.gguf", *gguf.quantize_example(EXAMPLE))
    done = conversion.ktconvert("fit", str(path), "--config", str(tiny), *LARGE)
    conversion.check_refusal(done, 5, "config")


def test_nothing_that_fits_is_an_error_that_says_what_the_smallest_needs(tiny):
    done = conversion.ktconvert("fit", str(tiny), *LARGE, "--ram", "100MB", "--vram", "0")
    conversion.check_refusal(
        done,
        4,
        "nothing fits; the smallest form, int4 with",
        "of RAM, and the machine has 95.4 MiB; use a larger machine, a shorter --context, or a smaller model",
    )
    several = conversion.ktconvert("fit", str(tiny), *LARGE, "--ram", "100MB", "--vram", "0", "--sequences", "2")
    conversion.check_refusal(several, 4, "a shorter --context, fewer --sequences, or a smaller model")
    assert "does not fit" in done.stdout
    document = fit(tiny, *LARGE, "--ram", "100MB", "--vram", "0")
    assert document["commands"] == [] and not any(choice["fits"] for choice in document["choices"])


def test_context_is_at_most_the_positions_of_the_model(tmp_path):
    """The example has 1024 positions; the metadata of a GGUF states them, too."""
    assert fit(EXAMPLE, *LARGE)["context"] == 1024
    done = conversion.ktconvert("fit", str(EXAMPLE), *LARGE, "--context", "1025")
    conversion.check_refusal(done, 2, "--context 1025: the model computes at most 1024 tokens", "give 1024 or less")
    metadata = gguf.model_metadata(1, context_length=512)
    path = gguf.write(tmp_path / "model.gguf", gguf.model([("Q4_K", "Q4_K", "Q6_K")]), metadata)
    assert fit(path, *LARGE, "--vram", "0")["context"] == 512


ARCH = """
name = "New"
[[stored]]
style = "separate"
gate = "{prefix}layers.{layer}.mlp.experts.{expert}.gate_proj.weight"
up = "{prefix}layers.{layer}.mlp.experts.{expert}.up_proj.weight"
down = "{prefix}layers.{layer}.mlp.experts.{expert}.down_proj.weight"
"""


def test_commands_name_the_file_of_an_architecture(tmp_path, tiny):
    arch_file = tmp_path / "arch.toml"
    arch_file.write_text(ARCH)
    steps = {
        row["step"]: row["command"]
        for row in fit(tiny, *LARGE, "--prefer", "memory", "--vram", "0", "--arch-file", arch_file)["commands"]
    }
    assert all(f"--arch-file {arch_file}" in steps[step] for step in ("convert", "verify"))


def test_explain_prints_a_map_if_the_next_better_method_does_not_fit(tmp_path):
    """Its budget is the memory that the other parts leave."""
    models.write_model(tmp_path / "model", *shapes.list_tensors(shapes.SHAPES["Qwen3-30B-A3B"], layers=4), 2)
    options = (*LARGE, "--vram", "0", "--ram", "4500MB")
    document = fit(tmp_path / "model", *options)
    best = document["choices"][0]
    assert best["loss"] > 0.001
    budget = 4_500_000_000 - best["ram"] + best["ram_parts"]["experts"]
    assert document["map_command"].endswith(f"--method-map auto --ram {budget} --numa 2")
    assert document["map_command"] in conversion.ktconvert("fit", tmp_path / "model", *options, "--explain").stdout
    done = conversion.ktconvert(*shlex.split(document["map_command"])[1:], "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert fit(tmp_path / "model", *LARGE, "--vram", "0")["map_command"] is None


def test_explain_prints_the_parts_of_memory_and_the_limits(tiny):
    done = conversion.ktconvert("fit", str(tiny), *LARGE, "--explain")
    assert done.returncode == 0, done.stderr
    for part in (
        "rest 17.8 KiB",
        "context 1.0 GiB",
        "process 4.0 GiB",
        "process: an estimate",
        "all experts are on the GPU",
        "# launch",
    ):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--ram", "much"), 2, "is not a size"),
        (("--vram", "24GB,x"), 2, "is not a size"),
        (("--vram", ""), 2, "is not a size"),
        (("--disk", "0"), 2, "must be greater than 0"),
        (("--bandwidth", "fast"), 2, "is not a size"),
        (("--gpu-bandwidth", "-1"), 2, "is not a size"),
        (("--numa", "0"), 2, "numa"),
        (("--context", "0"), 2, "context"),
        (("--sequences", "0"), 2, "sequences"),
        (("--runtime", "vllm"), 2, "runtime"),
        (("--prefer", "luck"), 2, "prefer"),
        (("--gpu", "voodoo"), 2, "--gpu voodoo: unknown"),
        (("--gpu", "0x4090"), 2, "unknown"),
        (("--gpu", ""), 2, "unknown"),
        (("--gpu", "4090", "--vram", "24GB"), 2, "exclude each other"),
        (("--vram", "0", "--runtime", "sglang"), 2, "needs a GPU"),
        (("--revision", "main"), 2, "is a local path"),
    ],
)
def test_bad_options_are_explained_in_one_sentence(tiny, options, code, text):
    base = () if "--vram" in options or "--gpu" in options else ("--vram", "0")
    done = conversion.ktconvert("fit", str(tiny), *base, *(() if "--bandwidth" in options else LARGE[-4:]), *options)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert text in done.stderr and len(done.stderr.strip().splitlines()) <= 4, done.stderr  # usage, and one sentence


@pytest.mark.parametrize("name", ["absent", "a/b/c"])
def test_a_model_that_does_not_exist_is_explained(name):
    conversion.check_refusal(conversion.ktconvert("fit", name, *LARGE), 5, f"{name}: does not exist; check the path")


def test_urls_of_unknown_protocols_are_named_as_they_were_given():
    for url in ("hf://org/name", "file:///models/name"):
        conversion.check_refusal(conversion.ktconvert("inspect", url), 5, f"{url.replace('///', '//')}: is a URL that")


def test_one_file_of_a_checkpoint_is_refused():
    """No printed command could serve it."""
    done = conversion.ktconvert("fit", str(EXAMPLE / "model.safetensors"), *LARGE, "--vram", "0")
    conversion.check_refusal(done, 5, "is a file, not a model; give the directory ")


def test_defaults_are_those_of_this_machine(tiny):
    document = fit(tiny, "--vram", "0")
    assert document["machine"]["numa"] == machine.pool_count()
    assert document["machine"]["bandwidth"] > 1e8 and document["runtime"] == "ktconvert"
