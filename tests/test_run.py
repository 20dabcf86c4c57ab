"""Tests of `ktconvert run`: the text that a model generates, streamed, and its speed."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts import extras
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError, UsageError
from ktconvert.layouts.extras import install_command
from ktconvert.native_quant.runtime.hot_experts import mask_file
from ktconvert.pipeline.cli.run import run
from ktconvert.pipeline.models import generating, loading
from ktconvert.pipeline.report.terminal import shorten_paths
from rig import conversion, families, stored
from rig.absent import break_package, hide_package
from rig.calibrated import HELDOUT
from rig.served import copy_with_template

pytest.importorskip("transformers")

SPEED = re.compile(
    r"prefill (\d+) tokens in [\d.]+ s \([\d.]+ tokens/s\), decode (\d+) tokens in [\d.]+ s \([\d.]+ tokens/s\)"
)
TEMPLATE = "{% for m in messages %}{{ m.role }} says {{ m.content }} {% endfor %}assistant says"


@pytest.fixture(scope="module")
def weights(packed_example: Callable[..., Path]) -> Path:
    """Convert the bundled model to INT8."""
    return packed_example("int8")


def call(*arguments: object, stdin: str = "") -> Result:
    """Run the command in this process, which has already imported transformers."""
    return CliRunner().invoke(run, list(map(str, arguments)), input=stdin)


def count_tokens(example: Path, text: str) -> int:
    """Count the tokens of a text."""
    from tokenizers import Tokenizer

    return len(Tokenizer.from_file(str(example / "tokenizer.json")).encode(text).ids)


@pytest.mark.parametrize("has_cpu_weights", [False, True])
def test_shards_without_an_index_are_named(has_cpu_weights, example, weights, tmp_path):
    root = tmp_path / "model"
    shutil.copytree(example, root)
    (root / "model.safetensors").rename(root / "model-00001-of-00001.safetensors")
    options = ["--cpu-weights", weights] if has_cpu_weights else []
    error = call(root, "--prompt", "def ", *options).exception
    assert isinstance(error, InputError)
    assert str(error).startswith(f"{root}: model.safetensors.index.json is missing, by which transformers finds")


def test_run_continues_a_prompt(cli, example, weights):
    """The bundled model generates the same text with INT8 experts, in a separate process, as with its own experts.

    Its predictions are so certain that rounding on other processors changes none of them.
    """
    prompt = "import os"
    options = (example, "--prompt", prompt, "--max-new-tokens", 12)
    result = cli("run", *options, "--cpu-weights", weights, "--threads", 1)
    assert result.stdout.startswith(prompt) and result.stdout.endswith("\n") and len(result.stdout) > len(prompt) + 20
    speed = SPEED.fullmatch(result.stderr.strip())
    assert speed is not None, result.stderr
    assert (int(speed[1]), int(speed[2])) == (count_tokens(example, prompt), 11)
    with_own_experts = call(*options, "--threads", 1)
    assert (with_own_experts.exit_code, with_own_experts.stdout) == (0, result.stdout)


def test_without_a_network_the_cache_is_used_and_nothing_is_requested_twice(cli, example, weights, tmp_path):
    """Requests that are repeated print a line each."""
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path)}
    options = ("org/small", "--prompt", "import os", "--max-new-tokens", 4, "--cpu-weights", weights)
    refused = cli("run", *options, env=env, code=5)
    assert len(refused.stderr.splitlines()) == 1 and "org/small: does not exist here" in refused.stderr
    commit = "0" * 40
    shutil.copytree(example, tmp_path / "models--org--small" / "snapshots" / commit)
    (tmp_path / "models--org--small" / "refs").mkdir()
    (tmp_path / "models--org--small" / "refs" / "main").write_text(commit)
    result = cli("run", *options, env=env)
    assert result.stdout.startswith("import os") and SPEED.fullmatch(result.stderr.strip()), result.stderr


def test_layers_that_the_model_lacks_give_a_warning(cli, example, weights, tmp_path):
    shutil.copytree(example, tmp_path / "model")
    stored.configure(tmp_path / "model", num_hidden_layers=1)
    options = ("--cpu-weights", weights, "--prompt", "import os", "--max-new-tokens", 2)
    *warnings, speed = cli("run", tmp_path / "model", *options).stderr.splitlines()
    assert warnings[0].startswith(f"warning: {weights}: has experts of layer 1, which Qwen3MoeForCausalLM lacks")
    assert "config.json: num_hidden_layers is 1, so that layer 1 of the checkpoint is not computed" in warnings[1]
    assert SPEED.fullmatch(speed)


@pytest.mark.parametrize("group_size", [32, 128])
def test_the_runtime_computes_the_experts_of_a_gpu_output_if_it_can(group_size, example, tmp_path):
    pytest.importorskip("compressed_tensors")
    options = ("--quant-method", "RTN", "--quant-type", "W4A16", "--group-size", group_size)
    assert conversion.run_in_process("gpu", example, tmp_path / "packed", *options).exit_code == 0
    words = (tmp_path / "packed", "--prompt", "import os", "--max-new-tokens", 8)
    alone = call(*words)
    assert alone.exit_code == 0, alone.exception
    assert ("packed: transformers unpacks its experts to BF16, since" in alone.stderr) == (group_size == 128)
    if group_size == 32:
        assert alone.stdout == call(*words, "--cpu-weights", tmp_path / "packed").stdout


@pytest.mark.parametrize("fault", ["truncated", "is missing"])
def test_run_rejects_an_unreadable_shard(fault, example, weights, tmp_path):
    """Its layer must not be treated as one that was not converted."""
    shutil.copytree(weights, tmp_path / "out")
    shard = tmp_path / "out" / "model-00001-of-00002.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    if fault == "truncated":
        shard.write_bytes(data[:-4096])
    result = call(example, "--cpu-weights", tmp_path / "out", "--prompt", "a")
    assert isinstance(result.exception, InputError)
    message = rf"out: layer 0 cannot be read \({shard.name}:? {fault}.*\); convert it again"
    assert re.search(message, str(result.exception))


def test_the_option_memory_maps_converted_experts(example, weights):
    from ktconvert.native_quant.runtime.hf_modules import RoutedExperts

    choice = loading.ModelChoice(str(example), cpu_weights=weights, memory="map", threads=1)
    model, _ = loading.load_model_and_tokenizer(choice)
    modules = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    assert len(modules) == 2 and all(module.experts._packed.mapped for module in modules)
    options = ("--cpu-weights", weights, "--prompt", "import", "--max-new-tokens", 2, "--memory")
    mapped, copied = (call(example, *options, memory) for memory in ("map", "copy"))
    assert mapped.exit_code == copied.exit_code == 0 and mapped.stdout == copied.stdout
    assert call(example, *options, "disk").exit_code == 2


def test_linears_outside_the_experts_can_be_int8(example, weights):
    import torch

    from ktconvert.native_quant.runtime.few_tokens import Int8Linear

    choice = loading.ModelChoice(str(example), cpu_weights=weights, non_experts="int8", threads=1)
    models = [loading.load_model_and_tokenizer(c)[0] for c in (choice, replace(choice, non_experts="stored"))]
    names = {name.rsplit(".", 1)[-1] for name, m in models[0].named_modules() if isinstance(m, Int8Linear)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        by_token, stored = (torch.cat([m(ids[:, :n]).logits[:, -1] for n in (1, 2, 3, 20, 39)]) for m in models)
    assert 0 < float((by_token - stored).norm() / stored.norm()) < 0.03
    options = ("--prompt", "import", "--max-new-tokens", 3, "--threads", 1, "--non-experts", "int8")
    assert call(example, "--cpu-weights", weights, *options).exit_code == 0
    refused = call(example, "--torch-experts", *options)
    assert isinstance(refused.exception, UsageError) and "also give --cpu-weights" in str(refused.exception)


def test_chat_uses_the_template_or_plain_text(example, weights, tmp_path):
    """Without a template each message is a line. The model gets the whole conversation."""
    result = call(example, "--cpu-weights", weights, "--chat", "--max-new-tokens", 3, stdin="import os\n\nclass\n")
    assert result.exit_code == 0, result.exception
    first, second = SPEED.findall(result.stderr)
    assert int(first[0]) == count_tokens(example, "import os\n") and len(result.stdout.splitlines()) >= 2
    assert int(second[0]) > count_tokens(example, "import os\nclass\n")
    model = copy_with_template(example, tmp_path / "model", TEMPLATE)
    options = ("--chat", "--max-new-tokens", 2, "--temperature", 0.7, "--exact")
    result = call(model, "--cpu-weights", weights, *options, stdin="import os\n")
    assert result.exit_code == 0, result.exception
    assert int(SPEED.findall(result.stderr)[0][0]) == count_tokens(example, "user says import os assistant says")


CHAT = """/help
first \\
line
/system you
\"\"\"
/new
 second

\"\"\"
third
/exitt
/foo bar
/usr/bin is no command
/exit
never
"""
UNFINISHED = '"""\nimport os\n'  # Ctrl-D within a message


def test_chat_has_commands_and_messages_of_several_lines(example, monkeypatch):
    """Only whole commands are commands. /system begins a new chat, and nothing is read after /exit."""
    chats: list[list[dict[str, str]]] = []
    chat_inputs = generating.chat_inputs
    monkeypatch.setattr(generating, "chat_inputs", lambda of, chat: chats.append([*chat]) or chat_inputs(of, chat))
    result = call(example, "--chat", "--system", "be", "--max-new-tokens", 2, stdin=CHAT)
    assert result.exit_code == 0, result.exception
    assert "/system TEXT" in result.stderr
    for command in ("/exitt", "/foo"):
        assert f"unknown command {command}; /help lists the commands\n" in result.stderr
    said = [
        [(message["role"], message["content"]) for message in chat if message["role"] != "assistant"] for chat in chats
    ]
    second = [("system", "you"), ("user", "/new\n second\n")]
    assert said[0] == [("system", "be"), ("user", "first \nline")]
    assert said[1] == second
    assert said[2] == [*second, ("user", "third")]
    assert said[3] == [*said[2], ("user", "/usr/bin is no command")]
    assert len(said) == 4


def test_chat_drops_an_unfinished_message(example):
    result = call(example, "--chat", "--max-new-tokens", 2, stdin=UNFINISHED)
    assert result.exit_code == 0 and result.stdout == "" and not SPEED.search(result.stderr), result.exception


def test_chat_continues_after_a_message_that_does_not_fit(example):
    long = "import os " * 600
    result = call(example, "--chat", "--max-new-tokens", 2, stdin=f"{long}\nimport os\n")
    assert result.exit_code == 0, result.exception
    assert "answer included; shorten it; the model forgets this message (/new begins a new chat)\n" in result.stderr
    (speed,) = SPEED.findall(result.stderr)
    assert int(speed[0]) == count_tokens(example, "import os\n")
    error = call(example, "--prompt", long).exception
    assert isinstance(error, UsageError) and error.remedy == "shorten it"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
def test_chat_remembers_lines_of_earlier_chats(example, tmp_path):
    """In a file that other users cannot read. The arrow key recalls the last line."""
    pytest.importorskip("readline")
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "run", str(example), "--chat", "--max-new-tokens", "1"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    for typed in (b"import os\n/exit\n", b"\x1b[A\x1b[A\n/exit\n"):
        ours, theirs = os.openpty()
        os.write(ours, typed)
        subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, check=True, timeout=300)
        os.close(theirs)
        os.close(ours)
    file = tmp_path / "ktconvert" / "chat_history"
    assert file.stat().st_mode & 0o777 == 0o600
    lines = file.read_text().splitlines()
    assert lines == ["import os", "/exit", "import os", "/exit"]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
def test_ctrl_c_stops_an_answer_but_not_the_chat(example, tmp_path):
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "run", str(example), "--chat", "--max-new-tokens", "900"]
    ours, theirs = os.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 1024)
        seen = seen.partition(text)[2]

    wait_for(b"> ")
    os.write(ours, b"import os\n")
    wait_for(b"import os\r\n")
    wait_for(b"\n")  # a line of the answer
    process.send_signal(signal.SIGINT)
    wait_for(b"stopped; the model forgets this message")
    wait_for(b"> ")
    os.write(ours, b"half a line")
    wait_for(b"half a line")
    process.send_signal(signal.SIGINT)
    while not select.select([ours], [], [], 1)[0]:  # readline only notices a signal while it waits
        process.send_signal(signal.SIGINT)
    wait_for(b"(/exit or Ctrl-D ends)")
    wait_for(b"> ")
    os.write(ours, b"/exit\n")
    assert process.wait(timeout=60) == 0
    os.close(theirs)
    os.close(ours)


def test_tiny_temperature_and_too_many_threads_are_clamped(example):
    """Logits divided by this temperature would overflow; `serve` clamps it as well."""
    options = ("--max-new-tokens", 2, "--temperature", 1e-38, "--threads", 4 * 10**18)
    result = call(example, "--prompt", "import os", *options)
    assert result.exit_code == 0, result.exception
    assert "note: --threads 4000000000000000000 is capped at " in result.stderr


@pytest.mark.parametrize("template", ["{{ messages }", "{{ raise_exception('not you') }}", "{# nothing #}"])
def test_rejection_by_the_chat_template_is_an_input_error(example, tmp_path, template):
    error = call(copy_with_template(example, tmp_path / "model", template), "--chat", stdin="import os\n").exception
    is_broken = template == "{{ messages }"
    message = (
        "/tokenizer_config.json: the chat template has a syntax error in line 1 (" if is_broken else ": its chat t"
    )
    assert isinstance(error, InputError) and f"{tmp_path / 'model'}{message}" in str(error)
    refused = call(tmp_path / "model", "--chat", "--system", "x", stdin="import os\n").exception
    assert ("; leave out --system, or continue" in str(refused)) == ("not you" in template)
    result = CliRunner().invoke(run, [str(example), "--chat"], input=b"import os\nimport \xff\n")
    assert isinstance(result.exception, InputError) and "is not UTF-8 text" in str(result.exception)


def test_run_loads_a_model_without_a_text_only_class(tmp_path):
    """transformers has only an image-and-text class for Qwen3-VL-MoE."""
    torch = pytest.importorskip("torch")
    import transformers

    text = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"vocab_size": 2048, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    text |= {"head_dim": 32, "output_router_logits": True}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0]}
    config = transformers.AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parents[1] / "examples" / "qwen3-moe-small" / name, tmp_path)
    model, tokenizer = loading.load_model_and_tokenizer(loading.ModelChoice(str(tmp_path)))
    inputs = generating.prompt_inputs(tokenizer, "def add(")
    notes: list[str] = []
    generated, speed = generating.generate_text(
        model, tokenizer, inputs, max_new_tokens=3, temperature=0, emit=notes.append
    )
    assert "".join(notes) == generated and (speed.prompt, speed.new) == (3, 3)
    assert model.config.text_config.output_router_logits is False  # a setting for training


def test_sampling_follows_seed_and_top_p(example):
    """The least top-p leaves only the likeliest token."""

    def generate(*options: object) -> str:
        words = ("run", example, "--prompt", "import", "--max-new-tokens", 20)
        return conversion.run_in_process(*words, *options).stdout

    sampled = [generate("--temperature", 2, "--seed", seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert generate("--temperature", 2, "--top-p", 1e-9) == generate() != sampled[0]


def test_a_model_of_fetch_has_the_hot_experts(example, packed_example, tmp_path):
    """Without them, and for commands that compute all experts, the message says what to give."""
    int8, mask, rest = packed_example("int8"), tmp_path / "mask.safetensors", tmp_path / "rest"
    marked = np.zeros((2, 8), np.bool_)
    marked[0, [1, 6]] = True
    mask.write_bytes(mask_file(marked))
    for options in ((), ("--gpu-experts-mask", mask)):
        assert conversion.run_in_process("fetch", example, "-o", rest, "--overwrite", *options).exit_code == 0
        words = ("--cpu-weights", int8, "--gpu-experts-mask", mask, "--prompt", "import", "--max-new-tokens", 8)
        result = conversion.run_in_process("run", rest, *words)
        if options:
            assert result.stdout == conversion.run_in_process("run", example, *words).stdout != ""
            continue
        assert "has no experts for the GPU; give the complete model, or one from" in str(result.exception)
        error = conversion.run_in_process("eval", rest, "--cpu-weights", int8, "--text", HELDOUT).exception
        assert str(error).endswith("; eval also computes the original experts: give the complete model.")
        error = conversion.run_in_process(
            "train", rest, "-o", tmp_path / "adapter", "--dataset", HELDOUT, "--max-steps", 1
        ).exception
        assert str(error).endswith(
            "has none: give the complete model; `run` and `serve` take converted experts, too, as --cpu-weights."
        )
    error = conversion.run_in_process(
        "run", rest, "--cpu-weights", int8, "--num-gpu-experts", 2, "--prompt", "import"
    ).exception
    assert "lacks expert 0 of layer 0, which is in the mask; give the complete model, or fetch it with" in str(error)


REFUSED: list[tuple[tuple[object, ...], type[KTConvertError], str]] = [
    ((), UsageError, "--prompt TEXT or --chat is missing; add it"),
    (("--chat", "--prompt", "x"), UsageError, "--prompt TEXT and --chat exclude each other"),
    (("--prompt", "x", "--system", "y"), UsageError, "--system needs --chat"),
    (("--prompt", "x", "--seed", 0), UsageError, "--seed is only for sampling; add --temperature"),
    (("--prompt", ""), UsageError, "--prompt: has no tokens"),
    (("--prompt", "x", "--cpu-weights", "nowhere"), InputError, "nowhere: does not exist"),
]


@pytest.mark.parametrize(
    ("options", "kind", "message"), REFUSED, ids=["neither", "both", "system", "seed", "empty", "nowhere"]
)
def test_run_rejects_invalid_options(example, options, kind, message):
    error = call(example, *options).exception
    assert type(error) is kind and message in str(error)


def test_run_rejects_incomplete_models(tmp_path, example, weights):
    """No weight is filled with random values, and no different model is loaded."""

    def check_refusal(model: Path, message: str, *options: str) -> None:
        error = call(model, "--prompt", "x", *options).exception
        assert isinstance(error, InputError | UnsupportedError) and str(error).startswith(f"{model}: {message}"), error

    nothing = tmp_path / "nothing"
    check_refusal(nothing, "does not exist; check the path, or give a hub id such as org/name")
    check_refusal(weights, "contains converted experts, not a model; give the original model")
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    check_refusal(adapter, "is a LoRA adapter, not a model; give it as --adapter")
    error = call(weights.parent, "--prompt", "x", "--cpu-weights", adapter).exception
    assert isinstance(error, InputError) and "is a LoRA adapter, not experts; give it as --adapter" in str(error)
    shutil.copy(example / "config.json", adapter)  # a merged model may keep the file
    check_refusal(adapter, "has no .safetensors file; give the directory of a downloaded checkpoint")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    error = call(tmp_path / "m.gguf", "--prompt", "x").exception
    assert isinstance(error, InputError) and "and this file as --cpu-weights" in str(error)
    nothing.mkdir()
    check_refusal(nothing, "has no .safetensors file; give the directory of a downloaded checkpoint")
    check_refusal(nothing, "has no config.json; copy the model's file into the directory", "--torch-experts")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(example / name, nothing)
    check_refusal(nothing, "has no tokenizer; put its files (tokenizer.json) beside config.json")
    shutil.copy(example / "tokenizer_config.json", nothing)
    check_refusal(nothing, "has no tokenizer; put its files (tokenizer.json) beside config.json")
    stored.configure(nothing, quantization_config={"quant_method": "gptq", "rotation": "hadamard"})
    for options in ((), ("--torch-experts",)):
        error = call(nothing, "--prompt", "x", *options).exception
        assert (
            isinstance(error, UnsupportedError) and f"{nothing}" in str(error) and "by its rotation, inp" in str(error)
        )
    stored.configure(nothing, num_hidden_layers=3, quantization_config=None)
    check_refusal(nothing, "layer 2 is missing ('model.layers.2.mlp.experts.0.gate_proj.weight'")


TRAINING_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("generation_config.json", {"temperature": 0, "do_sample": True}),
    ("generation_config.json", {"temperature": 2, "top_p": 1, "top_k": -1}),
    ("config.json", {"output_router_logits": True}),
    ("config.json", {"output_hidden_states": True, "output_attentions": True, "return_dict": False}),
    ("generation_config.json", {"use_cache": False}),
    ("generation_config.json", {"num_beams": 3, "num_return_sequences": 2}),
    ("generation_config.json", {"stop_strings": ["nowhere"]}),
]


@pytest.mark.parametrize(
    ("file", "settings"), TRAINING_SETTINGS, ids=[str(settings) for _, settings in TRAINING_SETTINGS]
)
def test_training_settings_in_a_config_do_not_change_the_text(file, settings, example, tmp_path, monkeypatch):
    """The prompt is read in chunks. Padded batches and beam search work as well."""
    monkeypatch.setattr(generating, "PREFILL_CHUNK", 16)
    options = ("--prompt", "import os\n" * 20, "--max-new-tokens", 4)
    model = tmp_path / "model"
    shutil.copytree(example, model)
    (model / file).write_text(json.dumps({**json.loads((model / file).read_text()), **settings}))
    result = call(model, *options)
    assert result.exit_code == 0, result.exception
    assert result.stdout == call(example, *options).stdout
    loaded, tokenizer = loading.load_model_and_tokenizer(loading.ModelChoice(str(model), cpu_weights=model, threads=1))
    loaded.generation_config.stop_strings = None
    ids = tokenizer(["import os", "def main(argv):"], return_tensors="pt", padding=True)
    assert loaded.generate(**ids, num_beams=2, max_new_tokens=2).shape[0] == 2


# DeepSeek-V4 compresses earlier keys and values, so chunk_prefill leaves it whole.
IN_CHUNKS = [*(name for name in families.FAMILIES if name != "deepseek_v4"), *families.SPARSE_FAMILIES]


@pytest.mark.parametrize(("family", "window"), [*((name, None) for name in IN_CHUNKS), ("mixtral", 24)])
def test_chunked_prefill_does_not_change_the_logits(family, window, monkeypatch):
    """Models keep keys and values (also of a window, or those of an indexer) or a recurrent state of earlier chunks."""
    import torch
    import transformers

    monkeypatch.setattr(generating, "PREFILL_CHUNK", 16)
    torch.manual_seed(0)
    config = families.make_config(family, **({} if window is None else {"sliding_window": window}))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    ids = torch.randint(3, families.VOCABULARY, (1, 75))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def logits(parts: bool) -> torch.Tensor:
        settings = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
        if parts:
            generating.chunk_prefill(model, settings, inputs)
            assert settings.prefill_chunk_size == 16
        options = {"generation_config": settings, "return_dict_in_generate": True, "output_logits": True}
        return torch.stack(model.generate(**inputs, **options).logits)

    torch.testing.assert_close(logits(parts=True), logits(parts=False), rtol=1e-4, atol=1e-4)


EVAL = ("eval", "{model}", "--text", "{text}")
MISSING: list[tuple[tuple[str, ...], str, str, str]] = [
    # arguments, the missing package, the feature that needs it, the extra
    (("run", "{model}", "--prompt", "x"), "transformers", "`ktconvert run`", "run"),
    (("serve", "{model}"), "uvicorn", "`ktconvert serve`", "serve"),
    ((*EVAL, "--cpu-weights", "{model}"), "transformers", "`ktconvert eval`", "run"),
    ((*EVAL, "--gpu-weights", "{model}"), "compressed_tensors", "`ktconvert eval`", "gpu"),
    (("gpu", "-i", "{model}", "-o", "{out}"), "llmcompressor", "--quant-method GPTQ", "gpu"),
    (("cpu", "-i", "{model}", "-o", "{out}", "--scale", "gptq"), "torch", "--scale gptq", "gpu"),
    (("calibrate", "{model}", "--output", "{out}"), "datasets", "`ktconvert calibrate`", "gpu"),
]


@pytest.mark.parametrize(("arguments", "package", "feature", "extra"), MISSING, ids=lambda value: str(value)[:20])
def test_a_missing_package_is_reported(arguments, package, feature, extra, cli, example, tmp_path, monkeypatch):
    if "gptq" in arguments:
        pytest.importorskip("llmcompressor")  # the message would name it, too
    paths = {"model": example, "text": example.parent / "heldout.txt", "out": tmp_path / "out"}
    result = cli(*(argument.format(**paths) for argument in arguments), code=1, env=hide_package(package, tmp_path))
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else True)
    message = f"ktconvert: {feature} needs {package}, not installed here: `{shorten_paths(install_command(extra))}`."
    assert result.stderr.splitlines()[-1] == message and not (tmp_path / "out").exists()


LIBRARY = "libcudart.so.12: cannot open shared object file"
BROKEN: list[tuple[tuple[str, ...], str, str, str]] = [
    # arguments, the broken package, its code, what the message quotes
    (("run", "{model}", "--prompt", "x"), "torch", f"raise ImportError('{LIBRARY}')", f"ImportError: {LIBRARY}"),
    (("run", "{model}", "--prompt", "x"), "torch", "", "AttributeError: module 'torch' has no attribute "),
    (("serve", "{model}"), "uvicorn", "raise RuntimeError('line\\nother')", "RuntimeError: line"),
    (("serve", "{model}"), "transformers", f"raise OSError('{LIBRARY}')", f"OSError: {LIBRARY}"),
    (("calibrate", "{model}", "{out}"), "torch", "import ctypes\nctypes.CDLL('absent.so')", "OSError: absent.so: "),
    (("cpu", "org/none", "{out}"), "huggingface_hub", "import os\nos.none", "AttributeError: module 'os' has no"),
    (("fit", "org/none"), "huggingface_hub", "", "ImportError: cannot import name 'HfApi'"),
    (("fit", "org/none"), "huggingface_hub", "import absent_package", "ModuleNotFoundError: No module named 'absent_"),
]


@pytest.mark.parametrize(("arguments", "package", "code", "quote"), BROKEN, ids=lambda value: str(value)[:20])
def test_a_broken_package_is_reported(arguments, package, code, quote, cli, example, tmp_path):
    words = [argument.format(model=example, out=tmp_path / "out") for argument in arguments]
    result = cli(*words, code=1, env=break_package(package, tmp_path, code) | {"XDG_CACHE_HOME": str(tmp_path)})
    name = "absent_package" if "absent_package" in code else package
    message = result.stderr.splitlines()[-1]
    assert message.startswith(f"ktconvert: {name} cannot be imported ({quote}") and "Traceback" not in result.stderr
    assert re.search(rf"; reinstall it: `.*pip uninstall -y {name} && .*pip install \S*{name}\b.*`\.$", message)
    assert not (tmp_path / "out").exists()
