"""Tests of `ktconvert serve --adapter`: several adapters of a model, each with the answers of a model of its own."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.pipeline.models import adapter_loading, generating, loading
from rig import families
from rig.adapters import write_kt_adapter
from rig.conversion import run_in_process
from rig.served import PATIENCE, RunningServer, free_port, serve_in_process, start_server

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("fastapi")
serving = pytest.importorskip("ktconvert.pipeline.models.serving.server")

BASE = "small"
SAID = "import os"
ANSWER = 12  # tokens
# Adapters with several targets, ranks and scalings; the last one is trained on the original model.
SETTINGS: dict[str, dict[str, Any]] = {
    "both": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "experts"]},
    "experts": {"r": 8, "target_modules": ["experts"], "use_rslora": True},
    "attention": {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "o_proj"], "use_dora": True}
    | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 16}},
    "head": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "original": {"r": 2, "lora_alpha": 32, "target_modules": ["k_proj"]}
    | {"target_parameters": ["gate_up_proj", "down_proj"]},
}
NAMES = [BASE, *SETTINGS]


def chosen(example: Path, weights: Path, **more: Any) -> loading.ModelChoice:
    return loading.ModelChoice(str(example), cpu_weights=weights, threads=1, **more)


def saved(model: Any, folder: Path, **settings: Any) -> Path:
    """Save an adapter with random matrices, and return its folder."""
    torch.manual_seed(len(folder.name))
    defaults = {"lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    with_peft = peft.get_peft_model(model, peft.LoraConfig(**defaults | settings))
    for name, copied in with_peft.named_parameters():
        if ".modules_to_save." in name:
            copied.data += torch.randn_like(copied) * copied.std() / 2
    with_peft.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def int8(packed_example) -> Path:
    return packed_example("int8")


@pytest.fixture(scope="module")
def folders(example, int8, tmp_path_factory) -> dict[str, Path]:
    from transformers import AutoModelForCausalLM

    def model(name: str) -> Any:
        of_original = "target_parameters" in SETTINGS[name]
        return (
            AutoModelForCausalLM.from_pretrained(example)
            if of_original
            else loading.load_model_and_tokenizer(chosen(example, int8))[0]
        )

    root = tmp_path_factory.mktemp("adapters")
    return {name: saved(model(name), root / name, **SETTINGS[name]) for name in SETTINGS}


@pytest.fixture(scope="module")
def alone(example, int8, folders) -> dict[str, Any]:
    """Return the model and tokenizer with each adapter, each loaded separately."""
    return {name: loading.load_model_and_tokenizer(chosen(example, int8, adapter=folders.get(name))) for name in NAMES}


@pytest.fixture(scope="module")
def expected(alone) -> dict[str, str]:
    """Return the answers of `ktconvert run --chat` by name."""
    texts = {}
    for name, (model, tokenizer) in alone.items():
        inputs = generating.chat_inputs(tokenizer, [{"role": "user", "content": SAID}])
        texts[name], _ = generating.generate_text(
            model, tokenizer, inputs, max_new_tokens=ANSWER, temperature=0, emit=str
        )
    assert len(set(texts.values())) == len(NAMES), "the adapters say the same"
    return texts


@pytest.fixture(scope="module")
def server(example, int8, folders) -> Iterator[RunningServer]:
    with serve_in_process(example, chosen(example, int8), name=BASE, adapters=folders) as running:
        yield running


def client(of: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{of.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def chat(of: RunningServer, name: str) -> str:
    messages = [{"role": "user", "content": SAID}]
    answer = client(of).chat.completions.create(model=name, messages=messages, max_tokens=ANSWER, temperature=0)
    assert answer.model == name
    text: str = answer.choices[0].message.content
    return text


def test_models_lists_the_model_and_its_adapters(server):
    """The model comes first, and answers requests without a name."""
    ask = client(server)
    listed = ask.models.list().data
    names = [(each.id, getattr(each, "parent", None)) for each in listed]
    assert names == [(BASE, None), *((name, BASE) for name in SETTINGS)]
    assert [ask.models.retrieve(name) for name in NAMES] == listed
    with pytest.raises(openai.NotFoundError, match=f"answers only for {', '.join(NAMES)}"):
        chat(server, "another")
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": SAID, "max_output_tokens": 1}, timeout=PATIENCE)
    assert answer.json()["model"] == BASE
    ready = httpx.post(f"{server.url}/load_model", json={"model": "experts"}, timeout=PATIENCE).text
    assert json.loads(ready.removeprefix("data: ")) == {"status": "ready", "model": "experts", "cached": True}


def test_each_adapter_answers_like_a_separate_model(server, alone, expected):
    """At every endpoint, with and without streaming."""
    ask = client(server)
    for name in NAMES:
        assert chat(server, name) == expected[name]
        messages = [{"role": "user", "content": SAID}]
        of_chat = {"model": name, "messages": messages, "max_tokens": ANSWER, "temperature": 0}
        chunks = list(ask.chat.completions.create(**of_chat, stream=True))
        assert {chunk.model for chunk in chunks} == {name}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[name]
        response = {"model": name, "input": SAID, "max_output_tokens": ANSWER, "temperature": 0}
        assert ask.responses.create(**response).output_text == expected[name]
        (scored,) = ask.completions.create(model=name, prompt=SAID, max_tokens=0, echo=True, logprobs=0).choices
        model, tokenizer = alone[name]
        ids = tokenizer(SAID, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            own = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        assert scored.logprobs.token_logprobs[1:] == own.gather(-1, ids[0, 1:, None])[:, 0].tolist()


def test_concurrent_answers_do_not_mix_adapters(server, expected):
    """The adapters compute alternately, token by token."""
    asked = NAMES * 2
    server.passes.clear()
    waiting = server.waiting(0, lambda: server.scheduler.lock.has_waiters() or len(server.passes) > ANSWER)
    with waiting, ThreadPoolExecutor(len(asked)) as clients:
        answers = list(clients.map(lambda name: chat(server, name), asked))
    assert answers == [expected[name] for name in asked]
    turns = [first != second for (first, *_), (second, *_) in pairwise(server.passes)]
    assert sum(turns) > 2 * len(asked)  # one after the other, there would be fewer than len(asked)


def test_switching_adapters_gives_identical_bits(example, int8, folders, alone):
    """This also holds for many tokens at once. The model's weights are in memory once, and unchanged."""
    model, _ = loading.load_model_and_tokenizer(chosen(example, int8))
    weights = {id(parameter) for parameter in model.parameters()}
    adapters = adapter_loading.Adapters(model, folders, BASE)
    ids = torch.arange(2, 2 + 3 * 40).reshape(3, 40)
    order = [None, *SETTINGS, "both", None, *reversed(SETTINGS)]
    with torch.inference_mode():
        found = {name or BASE: logits for name in order for logits in [(adapters.switch(name), model(ids).logits)[1]]}
        for name, logits in found.items():
            assert torch.equal(logits, alone[name][0](ids).logits), name
    assert weights <= {id(parameter) for parameter in model.parameters()}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_serve_answers_like_run_with_an_adapter(example, int8, folders, tmp_path):
    """Under the name from the command line. SIGINT ends the server."""
    log, prompt = tmp_path / "log", "def f("
    options = ("--cpu-weights", str(int8), "--model-name", BASE, "--adapter", str(folders["both"]))
    with start_server(example, log, *options, "--adapter", f"tuned={folders['experts']}") as (process, url):
        ask = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        assert [model.id for model in ask.models.list()] == [BASE, "both", "tuned"]
        answer = ask.completions.create(model="tuned", prompt=prompt, max_tokens=ANSWER, temperature=0)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130 and "Traceback" not in log.read_text()
    asked = ("--prompt", prompt, "--max-new-tokens", ANSWER, "--threads", 1)
    result = run_in_process("run", example, "--cpu-weights", int8, "--adapter", folders["experts"], *asked)
    assert result.stdout == f"{prompt}{answer.choices[0].text}\n"


def test_serve_rejects_invalid_names_of_adapters(example, int8, folders, tmp_path):
    """The message comes before anything is loaded."""
    both, twice = folders["both"], shutil.copytree(folders["both"], tmp_path / "both")
    cases: list[tuple[tuple[Any, ...], int, str]] = [
        ((both, twice), 2, f"--adapter {twice}: the adapter in {both} has the name both, too; give NAME="),
        ((f"a={both}", f"a={twice}"), 2, f"the adapter in {both} has the name a, too"),
        ((f"{BASE}={both}",), 2, f"--adapter {both}: the model has the name {BASE}, too"),
        ((f"a={tmp_path / 'nowhere'}",), 5, "nowhere: does not exist; check the path"),
        ((f"a={tmp_path}",), 5, f"{tmp_path}: has no adapter_config.json; give the directory of an adapter"),
        (("a=",), 2, "is empty; give a path"),
        ((f"={both}",), 2, "has no name; give NAME=PATH"),
        (("/",), 2, "has no name; give NAME=PATH"),
        (("a=~nobody-here/x",), 2, "in the home directory of an unknown user"),
    ]
    for given, code, why in cases:
        adapters = [word for each in given for word in ("--adapter", each)]
        result = run_in_process(
            "serve", example, "--cpu-weights", int8, "--model-name", BASE, "--port", free_port(), *adapters
        )
        said = str(result.exception) if result.exit_code == 1 else result.output
        assert getattr(result.exception, "exit_code", result.exit_code) == code and why in said.replace("\n", " "), said


def test_an_existing_folder_may_contain_an_equals_sign(folders, tmp_path):
    """Its path is not split into a name and a folder."""
    from ktconvert.pipeline.options.types import NamedPath

    folder = shutil.copytree(folders["both"], tmp_path / "lr=2e-4")
    assert NamedPath().convert(str(folder), None, None) == ("lr=2e-4", folder)
    assert NamedPath().convert(f"a={folder}", None, None) == ("a", folder)
    assert NamedPath().convert(f"{folder}/", None, None) == ("lr=2e-4", folder)


def compute_logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(9)[None]).logits


def test_an_adapter_of_kt_kernel_computes_like_that_of_peft(example, int8, folders, tmp_path):
    """kt-kernel saves the matrices of experts as stacks, in a file of their own that the settings do not name."""
    kt, stacks, others = tmp_path / "kt", dict[str, list[Any]](), {}
    for name, tensor in safetensors_torch.load_file(folders["both"] / "adapter_model.safetensors").items():
        if match := re.search(r"layers\.(\d+)\.mlp\.experts\.\d+\.(\w+)_proj\.lora_(.)", name):
            stacks.setdefault(f"layers.{match[1]}.experts.{match[2]}_lora_{match[3].lower()}", []).append(tensor)
        else:
            others[name] = tensor
    kt.mkdir()
    safetensors_torch.save_file(others, kt / "adapter_model.safetensors")
    fused = {name: torch.stack(stack) for name, stack in stacks.items()}
    safetensors_torch.save_file(fused, kt / "fused_expert_lora.safetensors")
    config = json.loads((folders["both"] / "adapter_config.json").read_text())
    (kt / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj", "v_proj"]}))
    for weights in (int8, None):
        first, second = (
            loading.load_model_and_tokenizer(chosen(example, weights, adapter=folder))[0]
            for folder in (folders["both"], kt)
        )
        assert torch.equal(compute_logits(first), compute_logits(second))
    first = {name: stack for name, stack in fused.items() if name.startswith("layers.0.")}
    safetensors_torch.save_file(first, kt / "fused_expert_lora.safetensors")
    with pytest.raises(
        InputError,
        match=f"{re.escape(str(kt))}/fused_expert_lora.safetensors: lacks layer 1; use an adapter of this model",
    ):
        serving.load_application(chosen(example, int8), adapters={"kt": kt})


def test_an_adapter_of_kt_kernel_fits_a_family_with_other_names(example, tmp_path):
    """The experts of Mixtral are called block_sparse_moe.experts.0.w1 in checkpoints, and mlp.experts in transformers."""
    model = families.make("mixtral", False, tmp_path / "mixtral")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / name, model)
    sizes = families.EXPERTS, families.HIDDEN, families.WIDTH
    kt = write_kt_adapter(tmp_path / "kt", dict.fromkeys(range(families.LAYERS), sizes))
    weights = tmp_path / "int8"
    for command in (
        ("cpu", "-i", model, "-o", weights, "--quant-method", "int8", "--threadpool-count", 1, "-q"),
        ("convert-adapter", kt, "--model", model, "-o", tmp_path / "peft"),
        ("merge-adapter", model, "--adapter", kt, "-o", tmp_path / "merged", "-q"),
    ):
        result = run_in_process(*command)
        assert result.exit_code == 0
        if command[0] == "convert-adapter":
            assert f"next: ktconvert run {model} --adapter {tmp_path}/peft --prompt Hello" in result.stderr
    none, first, second, original, merged = (
        compute_logits(loading.load_model_and_tokenizer(loading.ModelChoice(str(path), **options))[0])
        for path, options in (
            (model, {"cpu_weights": weights}),
            (model, {"cpu_weights": weights, "adapter": kt}),
            (model, {"cpu_weights": weights, "adapter": tmp_path / "peft"}),
            (model, {"adapter": kt}),
            (tmp_path / "merged", {}),
        )
    )
    assert torch.equal(first, second)
    for other, limit in ((original, 0.1), (merged, 0.1)):
        assert (other - first).norm() < limit * (none - first).norm()


CHANGES = (
    "changes the model's own weights, which requests without this adapter use, too; save the adapter as plain LoRA"
)


@pytest.mark.filterwarnings("ignore:Unexpected keyword")  # IA3 gets arguments of LoRA
@pytest.mark.parametrize(
    ("settings", "config", "why"),
    [
        ({"target_modules": ["q_proj"], "bias": "all"}, {}, f"its bias {CHANGES}"),
        ({"target_modules": ["q_proj"]}, {"init_lora_weights": "pissa"}, f"its init_lora_weights {CHANGES}"),
        ({"target_modules": ["q_proj"]}, {"layer_replication": [[0, 2], [1, 2]]}, "which ktconvert does not compute"),
        ({"target_modules": ["q_proj"]}, {"peft_type": "IA3"}, "not a LoRA adapter"),
        ({"target_modules": ["experts"]}, {"r": 8}, "their rank in adapter_config.json is 8"),
        ({"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", "v_proj"]}, adapter_loading.LACKS_TENSORS),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            {"target_modules": ["q_proj"]},
            "which its settings or the model lack",
        ),
    ],
)
def test_serve_rejects_adapters_that_do_not_fit(settings, config, why, example, int8, folders, tmp_path):
    """Beside valid adapters. The message names the adapter and the problem."""
    folder = saved(loading.load_model_and_tokenizer(chosen(example, int8))[0], tmp_path / "wrong", r=4, **settings)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises((InputError, UnsupportedError), match=f"{re.escape(str(folder))}.*{re.escape(why)}"):
        serving.load_application(chosen(example, int8), adapters={"both": folders["both"], "wrong": folder})


def test_load_rejects_prompt_tuning(example, int8, tmp_path):
    """PEFT puts trained prompts before the input, not into the model."""
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(loading.load_model_and_tokenizer(chosen(example, int8))[0], tuning).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"adapter_config.json: not a LoRA adapter"):
        loading.load_model_and_tokenizer(chosen(example, int8, adapter=tmp_path))
