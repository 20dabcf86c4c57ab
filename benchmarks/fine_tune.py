"""A real fine-tune: LoRA through converted experts, beside BF16 training in transformers and PEFT, from the same seed.

    python benchmarks/fine_tune.py TEXT... [--steps 200] [--output docs/figures/training.json]

The bundled model learns TEXT except every 16th sequence, whose loss is measured. In each run the adapter starts with
the same matrices and sees the same sequences. "transformers" is the unconverted model, whose stacked gate_up_proj PEFT
adapts as one matrix; the blocks of its B that would mix gate and up stay zero, so that all runs have the same
parameters. The other runs use the settings of `ktconvert train` with converted experts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "qwen3-moe-small"
METHODS = {"BF16": "bf16", "INT8": "int8", "INT4": "int4"}
SEQUENCE, BATCH, RANK, ALPHA, RATE, SEED = 128, 4, 16, 32, 1e-3, 42
HELD_OUT = 16  # every 16th sequence


def load(weights: Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    from ktconvert import KTConvertConfig

    if weights is None:
        return AutoModelForCausalLM.from_pretrained(MODEL)
    return AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=KTConvertConfig(cpu_weights=weights))


def save_initial_adapter(folder: Path, weights: Path) -> None:
    """Save the adapter with which all runs start."""
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    set_seed(SEED)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    get_peft_model(load(weights), config).save_pretrained(folder)


def keep_gate_and_up_apart(model: Any) -> None:
    """Zero the gradient of PEFT's B of gate_up_proj [2 I, 2 r E] where it would mix gate and up."""
    for name, parameter in model.named_parameters():
        if "experts.base_layer.lora_B" in name:
            rows, columns = parameter.shape
            # PEFT orders columns by rank, then expert.
            block = parameter.new_zeros(rows, 2, RANK, columns // (2 * RANK))
            block[: rows // 2, 0], block[rows // 2 :, 1] = 1, 1
            block = block.reshape(rows, columns)
            parameter.register_hook(lambda gradient, block=block: gradient * block)


def examples(rows: Any) -> list[dict[str, Any]]:
    """Return sequences of tokens [sequences, tokens] in the form of transformers' Trainer."""
    return [{"input_ids": row, "labels": row} for row in rows]


def run(name: str, weights: Path | None, adapter: Path, rows: Any, held_out: Any, steps: int) -> dict[str, Any]:
    """Train with these experts and return losses and seconds."""
    import torch
    from peft import PeftModel
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model = PeftModel.from_pretrained(load(weights), adapter, is_trainable=True)
    if weights is None:
        keep_gate_and_up_apart(model)

    class PrintLosses(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            print(f"{name}: step {state.global_step}, loss of other text {metrics['eval_loss']:.4f}", flush=True)

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        seed=SEED,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(1, steps // 4),
        eval_on_start=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        prediction_loss_only=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples(rows),
        eval_dataset=examples(held_out),
        callbacks=[PrintLosses()],
    )
    torch.manual_seed(SEED)
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    history = trainer.state.log_history
    return {
        "name": name,
        "losses": [row["loss"] for row in history if "loss" in row],
        "eval": [
            [step, loss] for step, loss in {r["step"]: r["eval_loss"] for r in history if "eval_loss" in r}.items()
        ],
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "training.json")
    options = parser.parse_args()
    from ktconvert.pipeline.models.loading import set_environment

    set_environment()
    import torch
    from transformers import AutoTokenizer

    ids = torch.tensor(
        AutoTokenizer.from_pretrained(MODEL)("".join(text.read_text() for text in options.text))["input_ids"]
    )
    sequences = list(ids[: len(ids) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE))
    held_out = sequences[::HELD_OUT]
    rows = [row for number, row in enumerate(sequences) if number % HELD_OUT]
    with tempfile.TemporaryDirectory() as folder:
        outputs = {}
        for name, method in METHODS.items():
            outputs[name] = Path(folder) / method
            subprocess.run(
                ["ktconvert", "cpu", "-i", MODEL, "-o", outputs[name], "--quant-method", method, "-q"], check=True
            )
        adapter = Path(folder) / "adapter"
        save_initial_adapter(adapter, outputs["BF16"])
        runs = [
            run(name, weights, adapter, rows, held_out, options.steps)
            for name, weights in {"transformers": None, **outputs}.items()
        ]
    settings = {
        "text": ", ".join(text.name for text in options.text),
        "tokens": len(rows) * SEQUENCE,
        "held_out": len(held_out) * SEQUENCE,
        "steps": options.steps,
        "tokens_per_step": BATCH * SEQUENCE,
        "rank": RANK,
        "learning_rate": RATE,
    }
    options.output.write_text(json.dumps({**settings, "runs": runs}, indent=1) + "\n")
    reference = runs[0]["eval"][-1][1]
    for one_run in runs:
        last = one_run["eval"][-1][1]
        first, difference = one_run["eval"][0][1], 100 * (last / reference - 1)
        print(f"{one_run['name']:<14} {first:.4f} -> {last:.4f}  {difference:+.2f} %  {one_run['seconds']} s")


if __name__ == "__main__":
    main()
