"""Tests of LoRA training through the experts: PEFT, transformers' Trainer, and the commands train and merge-adapter."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.errors import InputError, KTConvertError, OutputError, UnsupportedError
from ktconvert.pipeline.cli.describe import describe_path
from ktconvert.pipeline.cli.status import read_status
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.existing import read_plan
from ktconvert.pipeline.engine.loop import record_run
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.plans.commands import restore_options
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.terminal import shorten_paths
from rig import conversion, killpoint
from rig.conversion import tree
from rig.forks import Forks
from rig.model_server import model_server
from rig.safetensors import read_file

pytest.importorskip("peft")
torch = pytest.importorskip("torch")

MATRIX = re.compile(
    r"base_model\.model\.model\.layers\.\d\.(self_attn\.[qv]_proj|mlp\.experts\.\d\.(gate|up|down)_proj)\.lora_[AB]\.weight"
)
TARGETS = ["q_proj", "v_proj", "experts"]


@pytest.fixture(scope="module")
def ids() -> Any:
    torch.manual_seed(3)
    return torch.randint(0, 2048, (2, 33))


@pytest.fixture(scope="module")
def int8(packed_example) -> Path:
    return packed_example("int8")


def model(example: Path, weights: Path | None = None) -> Any:
    """Return the bundled model with these experts, or its own."""
    from transformers import AutoModelForCausalLM

    from ktconvert import KTConvertConfig

    return AutoModelForCausalLM.from_pretrained(example, quantization_config=KTConvertConfig(cpu_weights=weights))


def adapted(model: Any, **settings: Any) -> Any:
    """Return the model with a new adapter of random matrices."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM"} | defaults | settings))


def logits(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model.eval()(ids).logits.float()


def usual_error(got: Any, expected: Any) -> float:
    """Return the median error over tokens, since a few tokens go to other experts that are nearly as good."""
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.fixture(scope="module")
def trained(example, int8, tmp_path_factory, ids) -> tuple[Path, Any]:
    """Return an adapter of the INT8 experts, and the logits with it."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    ours = adapted(model(example, int8))
    ours.save_pretrained(folder)
    return folder, logits(ours, ids)


def test_an_adapter_loads_into_the_converted_and_the_original_model(example, int8, trained, ids):
    """Its file has PEFT's names, with a matrix per expert and projection."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, expected = trained
    stored = read_file(folder / "adapter_model.safetensors")
    assert len(stored) == 2 * 2 * (2 + 8 * 3)
    assert all(map(MATRIX.fullmatch, stored))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert {"q_proj", "experts.gate_proj", "experts.down_proj"} < set(config["target_modules"])
    again = PeftModel.from_pretrained(model(example, int8), folder)
    assert torch.equal(logits(again, ids), expected)
    own = logits(PeftModel.from_pretrained(model(example), folder), ids)
    plain = AutoModelForCausalLM.from_pretrained(example)
    before = logits(plain, ids)
    there = logits(PeftModel.from_pretrained(plain, folder), ids)
    assert usual_error(before, there) > 0.1
    assert usual_error(own, there) < 0.01
    assert usual_error(expected, there) < 0.02
    assert not torch.equal(logits(again.base_model.model, ids), before)
    with again.disable_adapter():
        assert torch.equal(logits(again, ids), logits(model(example, int8), ids))


def test_an_adapter_of_the_original_model_loads_into_the_converted_one(example, ids, tmp_path):
    """PEFT's own tensors for transformers' stacked parameters; gate and up share their A."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    plain = AutoModelForCausalLM.from_pretrained(example)
    plain = adapted(plain, target_modules=["q_proj"], target_parameters=parameters)
    plain.save_pretrained(tmp_path)
    ours = PeftModel.from_pretrained(model(example), tmp_path)
    assert usual_error(logits(ours, ids), logits(plain, ids)) < 0.01
    ours.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(PeftModel.from_pretrained(model(example), tmp_path / "again"), ids), logits(ours, ids))


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj"}),
        (r".*layers\.1\.(self_attn\.q_proj|mlp\.experts)", {"q_proj", "gate_proj", "up_proj", "down_proj"}),
        (["gate_proj", "up_proj", "down_proj"], {"gate_proj", "up_proj", "down_proj"}),
        (["q_proj"], {"q_proj"}),
    ],
)
def test_target_modules_select_experts(named, found, example):
    """`experts`, their projections, all-linear and regular expressions. Base weights are frozen."""
    ours = adapted(model(example), target_modules=named)
    trained = {name.split(".lora_")[0].split(".")[-1] for name, p in ours.named_parameters() if p.requires_grad}
    assert trained == found


def test_two_adapters_compute_together_and_separately(example, ids):
    ours = adapted(model(example))
    first = logits(ours, ids)
    ours.add_adapter("other", ours.peft_config["default"])
    assert torch.equal(logits(ours, ids), first)
    ours.set_adapter("other")
    second = logits(ours, ids)
    assert not torch.equal(second, first)
    ours.base_model.set_adapter(["default", "other"])
    both = logits(ours, ids)
    assert min(usual_error(both, first), usual_error(both, second)) > 0.05
    ours.set_adapter("default")
    assert torch.equal(logits(ours, ids), first)


def test_adapters_of_different_modules_and_ranks_compute_as_in_peft(example, ids):
    """For attention, for experts, and for all: each alone, both at once, and none."""
    from peft import LoraConfig

    targets: dict[str, Any] = {"attention": ["q_proj"], "experts": ["experts"], "all": "all-linear"}
    ours, plain = None, logits(model(example), ids)
    alone = {}
    for number, (name, named) in enumerate(targets.items()):
        settings = {"r": 2 + number, "lora_alpha": 8, "use_rslora": bool(number), "init_lora_weights": False}
        settings |= {"target_modules": named, "task_type": "CAUSAL_LM"}
        torch.manual_seed(number)
        single = adapted(model(example), **settings)
        alone[name] = logits(single, ids)
        if ours is None:
            ours = adapted(model(example), **settings)
            ours.add_adapter(name, ours.peft_config["default"])
        else:
            ours.add_adapter(name, LoraConfig(**settings))
        state = {n.replace(".default", f".{name}"): t for n, t in single.state_dict().items() if ".lora_" in n}
        loaded = ours.load_state_dict(state, strict=False)
        assert not loaded.unexpected_keys and state, name
    for name in (*targets, *reversed(targets)):
        ours.set_adapter(name)
        assert ours.active_adapter == name
        assert torch.equal(logits(ours, ids), alone[name])
        with ours.disable_adapter():
            assert torch.equal(logits(ours, ids), plain)
    ours.base_model.set_adapter(["attention", "experts"])
    both = logits(ours, ids)
    assert min(usual_error(both, alone[name]) for name in ("attention", "experts")) > 0.05


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"r": 300}, r"r = 300 is not within 1 to 256"),
        ({"init_lora_weights": "pissa"}, "require the unpacked weights of experts"),
        ({"use_dora": True}, "Invalid or unsupported variant"),
        ({"modules_to_save": ["experts"]}, "move experts from modules_to_save"),
    ],
)
def test_settings_that_experts_do_not_support_are_rejected(settings, why, example):
    with pytest.raises((UnsupportedError, ValueError), match=why):
        adapted(model(example), **settings)


def test_unsupported_adapters_and_uses_are_rejected(example, trained, ids, tmp_path):
    """A different rank, a missing expert, experts of several ranks, merging, and training without an adapter."""
    from peft import PeftModel
    from safetensors.torch import load_file, save_file
    from transformers import Trainer

    folder, _ = trained
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(
        InputError, match=r"of (this model|the adapter) is .*; load it into the model with which it was trained"
    ):
        PeftModel.from_pretrained(model(example), other)
    (other / "adapter_config.json").write_text(json.dumps(config))
    stored = load_file(other / "adapter_model.safetensors")
    save_file({n: t for n, t in stored.items() if ".experts.7." not in n}, other / "adapter_model.safetensors")
    with pytest.raises(
        InputError, match=r"of (this model|the adapter) is .*; load it into the model with which it was trained"
    ):
        PeftModel.from_pretrained(model(example), other)
    with pytest.raises(UnsupportedError, match=r"its rank_pattern differs between the experts of model\.layers\.0"):
        adapted(model(example), rank_pattern={r"experts\.3\.gate_proj": 2})
    with pytest.raises(UnsupportedError, match="merge-adapter"):
        PeftModel.from_pretrained(model(example), folder).merge_and_unload()
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(model=model(example))


# --- Trainer --------------------------------------------------------------------------------------


def rows(count: int = 24) -> list[dict[str, Any]]:
    random = np.random.default_rng(0).integers(0, 2048, (count, 24))
    return [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)} for row in random]


def trainer(model: Any, folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    steps = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 0.5}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": True}
    arguments = TrainingArguments(output_dir=str(folder), **steps, **batches, **quiet)
    return Trainer(model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(2))


def losses(trainer: Any) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def test_trainer_resumes_with_the_same_losses(example, int8, tmp_path):
    """With accumulated and clipped gradients, and with dropout, which evaluation does not use; in BF16 autocast."""
    settings = {"lora_dropout": 0.3, "init_lora_weights": True}
    whole = trainer(adapted(model(example, int8), **settings), tmp_path)
    whole.train()
    resumed = trainer(adapted(model(example, int8), **settings), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 4
    pairs = zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert whole.evaluate()["eval_loss"] == resumed.evaluate()["eval_loss"]


def gradients(model: Any, ids: Any) -> dict[str, Any]:
    model.train()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, example, int8, ids):
    """Bit for bit, for every matrix, also with dropout."""
    torch.manual_seed(7)
    kept = gradients(adapted(model(example, int8), lora_dropout=0.2), ids)
    ours = adapted(model(example, int8), lora_dropout=0.2)
    ours.enable_input_require_grads()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients(ours, ids)
    assert all(torch.equal(again[name], kept[name]) and kept[name].abs().sum() > 0 for name in kept)


def test_gradients_pass_through_experts_without_an_adapter(example, int8, ids):
    found = gradients(adapted(model(example, int8), target_modules=["q_proj"]), ids)
    assert len(found) == 4
    assert all(gradient.abs().sum() > 0 for gradient in found.values())


def test_trl_trains_the_experts(example, int8, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from peft import LoraConfig, PeftModel
    from transformers import AutoTokenizer

    texts = datasets.Dataset.from_dict({"text": ["import os\nimport sys\n" * 4] * 8})
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    config = trl.SFTConfig(output_dir=str(tmp_path), max_steps=2, logging_steps=1, bf16=False, **quiet)
    learner = trl.SFTTrainer(
        model(example, int8),
        args=config,
        train_dataset=texts,
        processing_class=AutoTokenizer.from_pretrained(example),
        peft_config=LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )
    learner.train()
    learner.save_model(str(tmp_path / "adapter"))
    PeftModel.from_pretrained(model(example), tmp_path / "adapter")
    assert learner.state.log_history[0]["loss"] > 0


# --- commands -------------------------------------------------------------------------------------

SHORT = ("--sequence-length", 64, "--batch-size", 2, "--max-steps", 6, "--save-steps", 2, "--rank", 4, "--dropout", 0.1)


@pytest.fixture(scope="module")
def servers() -> Forks:
    return model_server()


@pytest.fixture(scope="module")
def text(example, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((example.parent / "heldout.txt").read_text()[:6000])
    return path


def test_train_eval_and_merge_adapter_work_together(cli, example, int8, text, tmp_path):
    """From a text to an adapter, and on to a merged model that is converted again."""
    from safetensors.torch import load_file

    adapter, options = tmp_path / "adapter", ("--cpu-weights", int8, "--dataset", text, "--eval-dataset", text)
    order = ("train", example, *options, *SHORT, "--learning-rate", 0.005, "-o", adapter)
    dry = cli(*order, "--dry-run", "--json")
    planned = {event["event"]: event for event in map(json.loads, dry.stdout.splitlines())}
    memory = planned["memory"]["bytes"]
    units = [unit["unit"] for unit in planned["plan"]["units"]]
    assert units == ["checkpoint.2", "checkpoint.4", "checkpoint.6", "adapter.train"]
    stored = 2 * 8 * 4 * 3 * (256 + 256) + 2 * 4 * (256 + 256 + 256 + 128 + 256 + 128 + 256 + 256)
    assert memory["LoRA with gradients and AdamW"] == 16 * stored
    assert not adapter.exists()
    alone = cli(*order, "--json", env={"TQDM_DELAY": "1000000000"})  # a new process, not a fork
    events = [json.loads(line) for line in alone.stdout.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps if "loss" in event] == [1, 2, 3, 4, 5, 6]
    measured = [event["eval_loss"] for event in steps if "eval_loss" in event]
    assert measured[-1] < measured[0] - 0.02
    assert events[-1]["event"] == "finished" and events[-1]["bytes"] >= 4 * stored
    of_experts = 2 * 8 * 4 * 3 * (256 + 256)
    trained = f"trained parameters: {of_experts} of routed experts, {stored - of_experts} of other modules"
    assert trained in [event.get("text") for event in events]
    assert sum(tensor.numel() for tensor in load_file(adapter / "adapter_model.safetensors").values()) == stored
    card = (adapter / "README.md").read_text()
    assert "evaluation loss" in card and f"\nktconvert run {example} --cpu-weights {int8} --adapter ADAPTER\n" in card
    assert "base_model" not in card  # a path
    assert events[0]["bytes"] == memory
    finished = f"{adapter} is finished: nothing to do"
    assert finished in cli("resume", adapter).stderr
    found = "made with these options, from files with the names, sizes and headers of this input"
    following = f"next: ktconvert run {example} --cpu-weights {int8} --adapter {adapter} --prompt Hello"
    assert cli(*order).stderr.endswith(f"{shorten_paths(f'{finished} ({found}); {following}')}\n")
    tuned = tree(adapter)
    evaluate = ("--text", text, "--sequence-length", 64, "--json")
    found = json.loads(cli("eval", example, "--cpu-weights", int8, "--adapter", adapter, *evaluate).stdout)
    assert abs(np.log(found["perplexity"]["converted"]) - measured[-1]) < 0.1
    assert found["perplexity"]["converted"] / found["perplexity"]["original"] == pytest.approx(1, abs=0.01)
    cli("merge-adapter", example, "--adapter", adapter, "-o", tmp_path / "merged")
    verified = cli("verify", tmp_path / "merged", "--against", example)
    assert "(the adapter added to 56 weights again, same values; 13 others equal)" in verified.stdout
    assert verified.stdout.endswith("\nverified\n")
    cli("cpu", "-i", tmp_path / "merged", "-o", tmp_path / "int8", "--quant-method", "int8", "-q")
    merged = json.loads(cli("eval", tmp_path / "merged", "--cpu-weights", tmp_path / "int8", *evaluate).stdout)
    assert merged["perplexity"]["converted"] == pytest.approx(found["perplexity"]["converted"], rel=0.01)
    assert tree(adapter) == tuned


def save_small_model(folder: Path, example: Path, family: str, **settings: Any) -> None:
    """Save a model of a family with random weights and the tokenizer of the example."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"num_experts_per_tok": 2, "vocab_size": 2048, "initializer_range": 0.1}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes | settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in example.glob("tokenizer*"):
        shutil.copy(file, folder)


def run_all(*commands: tuple[Any, ...]) -> None:
    for command in commands:
        result = conversion.run_in_process(*command, "-q")
        assert result.exit_code == 0, result.exception or result.output


def test_experts_without_a_gate_train_and_merge(example, text, tmp_path):
    """Tiny Nemotron-H: `train` adapts up and down; `run`, `serve` and the merged weights compute the same.

    So does an adapter that PEFT made for transformers' parameters.
    """
    from transformers import AutoModelForCausalLM

    from ktconvert.pipeline.models.adapter_loading import Adapters, load_adapter

    folder, adapter, merged, int8 = (tmp_path / name for name in ("model", "adapter", "merged", "int8"))
    experts = {"n_routed_experts": 4, "moe_latent_size": 64, "moe_intermediate_size": 128}
    blocks = {"moe_shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1, "n_groups": 1}
    blocks |= {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "hybrid_override_pattern": "*EE"}
    save_small_model(folder, example, "nemotron_h", num_hidden_layers=3, **experts, **blocks)
    run_all(
        ("cpu", "-i", folder, "-o", int8, "--quant-method", "int8"),
        ("train", folder, "--cpu-weights", int8, "--dataset", text, *SHORT, "--learning-rate", 0.05, "-o", adapter),
        ("merge-adapter", folder, "--adapter", adapter, "-o", merged),
    )
    names = {name.split(".lora_")[0].split(".")[-1] for name in read_file(adapter / "adapter_model.safetensors")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    ids = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(3))
    for weights, bound in ((None, 0.02), (int8, 0.05)):
        before = logits(model(folder, weights), ids)
        ours = logits(load_adapter(model(folder, weights), adapter, "model"), ids)
        assert usual_error(ours, logits(AutoModelForCausalLM.from_pretrained(merged), ids)) < bound
        assert usual_error(before, ours) > 0.3
        served = model(folder, weights)
        adapters = Adapters(served, {"tuned": adapter}, "model")
        assert torch.equal(logits(served, ids), before)
        adapters.switch("tuned")
        assert torch.equal(logits(served, ids), ours)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    plain = adapted(plain, target_modules=["q_proj"], target_parameters=["experts.up_proj", "experts.down_proj"])
    plain.save_pretrained(tmp_path / "plain")
    assert usual_error(logits(load_adapter(model(folder), tmp_path / "plain", "model"), ids), logits(plain, ids)) < 0.02
    shutil.rmtree(merged)
    run_all(("merge-adapter", folder, "--adapter", tmp_path / "plain", "-o", merged))
    assert usual_error(logits(AutoModelForCausalLM.from_pretrained(merged), ids), logits(plain, ids)) < 0.02


def test_experts_with_biases_train(example, text, tmp_path):
    """Tiny gpt-oss, whose stacked experts are transposed, with gate and up in alternate columns."""
    from transformers import AutoModelForCausalLM

    from ktconvert.pipeline.models.adapter_loading import load_adapter

    folder, adapter, out, merged = (tmp_path / name for name in ("model", "adapter", "out", "merged"))
    save_small_model(folder, example, "gpt_oss", num_hidden_layers=2, num_local_experts=4, intermediate_size=128)
    train = ("train", folder, "--cpu-weights", out, "--dataset", text, "--eval-dataset", text, *SHORT)
    run_all(
        ("cpu", "-i", folder, "-o", out, "--quant-method", "int8"),
        (*train, "--learning-rate", 0.01, "-o", adapter),
    )
    (_, first), *_, (_, last) = json.loads((adapter / "ktconvert.json").read_text())["eval_losses"]
    assert last < first - 0.1
    ids = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(3))
    before = logits(model(folder, out), ids)
    ours = logits(load_adapter(model(folder, out), adapter, "model"), ids)
    assert usual_error(ours, before) > 0.1
    run_all(("merge-adapter", folder, "--adapter", adapter, "-o", merged))
    assert usual_error(ours, logits(AutoModelForCausalLM.from_pretrained(merged), ids)) < 0.05
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    plain = adapted(AutoModelForCausalLM.from_pretrained(folder), target_modules=[], target_parameters=parameters)
    plain.save_pretrained(tmp_path / "plain")
    shutil.rmtree(merged)
    run_all(("merge-adapter", folder, "--adapter", tmp_path / "plain", "-o", merged))
    assert usual_error(logits(AutoModelForCausalLM.from_pretrained(merged), ids), logits(plain, ids)) < 0.02


def test_merged_weights_equal_those_of_peft(cli, example, trained, tmp_path):
    """B A in float32, and the sum rounded once: within one rounding of what PEFT adds in BF16."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, _ = trained
    cli("merge-adapter", example, "--adapter", folder, "-o", tmp_path / "merged")
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(example), folder).merge_and_unload()
    plain = dict(AutoModelForCausalLM.from_pretrained(example).named_parameters())
    changed = 0
    for name, parameter in theirs.named_parameters():
        if torch.equal(parameter, plain[name]):
            assert torch.equal(merged[name], parameter), name
            continue
        changed += 1
        assert (merged[name] - parameter).float().norm() < 0.004 * parameter.float().norm(), name
    assert changed == 2 * 4
    other = shutil.copytree(folder, tmp_path / "pissa")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    result = cli("merge-adapter", example, "--adapter", other, "-o", tmp_path / "refused", code=3)
    assert "its init_lora_weights is 'pissa', which merge-adapter does not fold into weights" in result.stderr


def test_a_killed_training_resumes_to_the_same_adapter(servers, example, int8, text, tmp_path):
    """Killed before some of its changes to the disk. There is a complete adapter, or none."""
    options = ("--cpu-weights", int8, "--dataset", text, *SHORT, "--max-steps", 4, "-q")

    def convert(output: Path) -> tuple[Any, ...]:
        return ("train", example, *options, "-o", output)

    def resume(killed: Path) -> None:
        assert not killed.exists() or tree(killed).keys() == tree(tmp_path / "whole").keys()
        words = ("resume", killed, "-q") if locate(killed).plan.exists() else convert(killed)
        assert servers.run(words, tmp_path / "resumed").returncode == 0

    killpoint.check_resume(convert, resume, tmp_path, 0.45, 0.97, servers=servers)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_training_continues_from_its_last_step(servers, example, int8, text, tmp_path, number, code):
    """It is stopped twice; the second time, the files of the first checkpoint have been removed."""
    output, whole = tmp_path / "out", tmp_path / "whole"
    words = ("train", example, "--cpu-weights", int8, "--dataset", text, *SHORT, "--max-steps", 60, "--save-steps", 10)

    def stop_at(step: int, *command: Any) -> int:
        """Stop a training at a step or soon after it, and return the step of its last checkpoint."""
        words = [*conversion.KTCONVERT, *map(str, command), "--json"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert any(f'"step": {step},' in line for line in process.stdout)
            process.send_signal(number)
            _, stderr = process.communicate(timeout=conversion.TIMEOUT)
        assert process.returncode == code
        assert f"ktconvert: stopped by {number.name}; run `ktconvert resume {output}` to continue" in stderr
        assert str(journal.read_records(locate(output).journal)[-1].why).startswith("stopped by")
        return max(int(folder.name.split(".")[1]) for folder in locate(output).store.iterdir())

    first = stop_at(3, *words, "-o", output)
    assert read_status(output)["units"] == 6 + 2  # with the checkpoint of the stop, and the adapter
    second = stop_at(33, "resume", output)
    assert read_status(output)["units"] == 6 + 3
    assert 3 <= first < 33 <= second < 60
    assert not [*locate(output).store.glob(f"checkpoint.{first}.*")]
    result = servers.run(["resume", output], tmp_path / "said")
    assert result.returncode == 0 and f"resuming from step {second}" in result.stderr, result.stderr
    assert servers.run([*words, "-q", "-o", whole], tmp_path / "said").returncode == 0
    assert conversion.find_differences(tree(output), tree(whole)) == []


@pytest.fixture(scope="module")
def begun(servers, example, int8, text, tmp_path_factory) -> tuple[Path, Path, Path]:
    """Return a training that was killed with a checkpoint, one killed without, and their data set."""
    folder = tmp_path_factory.mktemp("begun")
    data = Path(shutil.copy(text, folder))
    words = ("train", example, "--cpu-weights", int8, "--dataset", data, *SHORT, "--max-steps", 4, "-q", "-o")
    assert servers.run([*words, folder / "whole"], folder / "said").returncode == 0
    env = killpoint.shim_settings(Path(f"{folder / 'killed'}.work/store/checkpoint.4"), 2)  # 1: a sync of store/
    assert servers.run([*words, folder / "killed"], folder / "said", env).returncode == killpoint.KILLED
    return folder / "killed", folder / "whole", data


def copy_of(killed: Path, folder: Path) -> tuple[Path, Path]:
    """Return the output of a copy of a killed training, and its checkpoint."""
    output = folder / "out"
    shutil.copytree(f"{killed}.work", f"{output}.work")
    (checkpoint,) = locate(output).store.glob("checkpoint.2.*")
    return output, checkpoint


@pytest.mark.parametrize("how", ["a flipped bit", "no optimizer"])
def test_resume_does_not_use_a_damaged_checkpoint(how, servers, begun, tmp_path):
    killed, whole, _ = begun
    output, checkpoint = copy_of(killed, tmp_path)
    if how == "no optimizer":
        (checkpoint / "optimizer.pt").unlink()
    else:
        data = bytearray((checkpoint / "adapter_model.safetensors").read_bytes())
        data[-5] ^= 64
        (checkpoint / "adapter_model.safetensors").write_bytes(data)
    result = servers.run(["resume", output, "-q"], tmp_path / "said")
    assert result.returncode == 0 and re.search("has changed|files are missing", result.stderr), result.stderr
    assert conversion.find_differences(tree(output), tree(whole)) == []


@pytest.mark.parametrize("call", [1, 4, 12])
def test_a_full_disk_is_reported_in_one_sentence(call, servers, begun, tmp_path):
    """The disk is full from some call of a checkpoint on, in safetensors, torch or Python. Resuming gives the same adapter."""
    killed, whole, _ = begun
    output, _ = copy_of(killed, tmp_path)
    env = {"FULL_ROOT": f"{output}.work/partial/", "FULL_N": str(call)}
    result = servers.run(["resume", output, "-q"], tmp_path / "said", env)
    assert result.returncode == 4 and "No space left on device" in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1
    assert not output.exists()
    if call == 4:
        assert servers.run(["resume", output, "-q"], tmp_path / "said").returncode == 0
        assert conversion.find_differences(tree(output), tree(whole)) == []


def test_sequences_longer_than_the_context_are_refused(cli, example, int8, text, tmp_path):
    words = ("train", example, "--cpu-weights", int8, "--dataset", text, "-o", tmp_path / "out")
    for options in (("--dry-run",), ()):
        refused = cli(*words, "--sequence-length", 1025, *options, code=2).stderr
        assert refused.startswith("ktconvert: --sequence-length 1025: the context of the model is 1024 tokens")


def test_status_tells_a_killed_training_from_a_running_one(begun, tmp_path):
    output, _ = copy_of(begun[0], tmp_path)
    stopped = read_status(output)
    assert (stopped["state"], stopped["done"], stopped["units"]) == ("stopped", 1, 3)
    # The journal says that it runs
    assert journal.find_killed_run(journal.read_records(locate(output).journal)) is not None
    with pytest.raises(OutputError, match="contains an unfinished training; see `ktconvert status`"):
        restore_options(output, read_plan(locate(output)))  # as `inspect` does
    described = describe_path(str(output), Reporter())
    assert (described["running"], described["units_done"], described["units"]) == (False, 1, 3)
    with WorkDir(locate(output)) as work, record_run(work):
        assert read_status(output)["state"] == "running"
        described = describe_path(str(output), Reporter())
        assert (described["running"], described["died_in"]) == (True, [])


def test_status_and_resume_count_checkpoints_that_later_ones_replaced(cli, servers, example, int8, text, tmp_path):
    """The dry run lists them as finished, too."""
    output = tmp_path / "out"
    words = ("train", example, "--cpu-weights", int8, "--dataset", text, *SHORT, "--save-steps", 1, "-o", output)
    env = killpoint.shim_settings(Path(f"{output}.work/store/checkpoint.4"), 4)  # 1 to 3: syncs of store/
    assert servers.run(words, tmp_path / "said", env).returncode == killpoint.KILLED
    assert len([*locate(output).store.iterdir()]) < read_status(output)["done"] == 3
    planned = cli("resume", output, "--dry-run").stdout
    assert "train 6 steps; 6 units, 3 to run" in planned and "(replaced by a later one)" in planned
    assert "3 of 7 units finished" in servers.run(["resume", output], tmp_path / "said").stderr


def test_resume_rejects_changed_data_and_other_commands(servers, example, begun, tmp_path):
    killed, _, data = begun
    output, checkpoint = copy_of(killed, tmp_path)
    convert = ("cpu", "-i", example, "-o", output, "--quant-method", "int8", "-q")
    assert servers.run(convert, tmp_path / "said").returncode == OutputError.exit_code
    assert checkpoint.exists()
    before = data.read_text()
    try:
        data.write_text(before.upper())
        result = servers.run(["resume", output, "-q"], tmp_path / "said")
    finally:
        data.write_text(before)
    assert result.returncode == InputError.exit_code
    assert f"the content of dataset/{data.name} was" in result.stderr
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    result = servers.run(["resume", output, "-q"], tmp_path / "said")
    assert result.returncode == OutputError.exit_code
    assert tree(output).keys() == {"thesis.txt"}
    assert checkpoint.exists()


def test_an_infinite_loss_ends_a_training_and_overwrite_restarts_it(cli, example, int8, text, tmp_path):
    adapter = tmp_path / "adapter"
    words = ("train", example, "--cpu-weights", int8, "--dataset", text, *SHORT, "-o", adapter)
    failed = cli(*words, "--learning-rate", 1e30, code=6)
    assert re.search("is not finite at step .*; start over with a smaller --learning-rate", failed.stderr)
    assert not adapter.exists()
    old = locate(adapter).store / "checkpoint.5"
    old.mkdir()
    risen = cli(*words, "--learning-rate", 1e9, "--schedule", "constant", "--warmup", 0, "--overwrite")
    assert re.search(
        r"warning: .*adapter: the loss rose from .* to .*; train again with a smaller --learn", risen.stderr
    )
    ended = cli(*words, "--max-steps", 3, "--eval-dataset", text, "--overwrite")
    result, advice = ended.stderr.splitlines()[-2:]
    assert re.search(
        r"adapter: loss \d.* at the first step, .* at the last; evaluation loss .* before, .* after;", result
    )
    assert advice == shorten_paths(
        f"next: ktconvert run {example} --cpu-weights {int8} --adapter {adapter} --prompt Hello"
    )
    assert (adapter / "adapter_model.safetensors").exists()
    assert not old.exists()


@pytest.mark.parametrize(
    ("targets", "of_experts"), [("q_proj", 0), ("gate_proj,up_proj,down_proj", 49152), ("all-linear", 49152)]
)
def test_target_modules_have_the_names_of_peft(targets, of_experts, example, int8, text, tmp_path):
    """The default has 3 projections of 8 experts in 2 layers; rank 2 adds 2 * (256 + 256) numbers to each."""
    words = ("train", example, "--cpu-weights", int8, "--dataset", text, *SHORT, "--max-steps", 1, "--rank", 2)
    result = conversion.run_in_process(*words, "--target-modules", targets, "-o", tmp_path / "adapter", "-v")
    assert result.exit_code == 0, result.exception
    assert f"trained parameters: {of_experts} of routed experts" in result.stderr


def test_train_refuses_experts_that_transformers_computes(example, text, tmp_path):
    pytest.importorskip("compressed_tensors")
    packed = tmp_path / "packed"
    done = conversion.run_in_process("gpu", example, packed, "--quant-method", "RTN", "--quant-type", "W4A16")
    assert done.exit_code == 0, done.output
    error = conversion.run_in_process("train", packed, *SHORT, "--dataset", text, "-o", tmp_path / "adapter").exception
    assert isinstance(error, UnsupportedError), error
    assert str(error).startswith(f"{packed}: PEFT cannot adapt its Qwen3MoeExperts; give converted experts as --cpu-")


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (("--dataset", "empty.txt"), 5, "empty.txt: has no tokens"),
        (("--dataset", "short.txt"), 5, "less than one sequence of 64"),
        (("--dataset", "text.txt", "--rank", 1000), 3, "r = 1000 is not within 1 to 256"),
        (
            ("--dataset", "text.txt", "--target-modules", "nothing"),
            3,
            "nothing: .* has no such module; choose from down_proj, experts, gate_proj, .*q_proj.*up_proj",
        ),
        (("--dataset", "text.txt", "--target-modules", "q_proj,down"), 3, "down: .* has no such module"),
        (
            ("--dataset", "text.txt", "--eval-dataset", "none.txt"),
            5,
            "none.txt: does not exist; set --eval-dataset to a",
        ),
        (("--dataset", "text.txt", "--target-modules", " ,"), 2, "names no module; give names, or all-linear"),
    ],
)
def test_train_rejects_invalid_options_and_data(options, code, why, example, int8, text, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("import os\n")
    shutil.copy(text, tmp_path)
    given = [tmp_path / option if str(option).endswith(".txt") else option for option in options]
    result = conversion.run_in_process(
        "train", example, "--cpu-weights", int8, *SHORT, *given, "-o", tmp_path / "adapter"
    )
    assert isinstance(result.exception, KTConvertError), result.output
    assert result.exception.exit_code == code and re.search(why, str(result.exception))
    assert not (tmp_path / "adapter").exists()
