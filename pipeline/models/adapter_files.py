"""The files of a trained adapter: PEFT's matrices and settings, the losses, a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.adapter import CONFIG, WEIGHTS
from ktconvert.layouts.files import publish
from ktconvert.pipeline.engine.plan import Stats, tool_version
from ktconvert.pipeline.options.training_options import TrainOptions

CURVE = "losses.svg"
STATE = "trainer_state.json"


def write_adapter(options: TrainOptions, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Write the adapter of a checkpoint into a new folder. Return the losses that its card shows."""
    publish.remove_tree(folder)
    folder.mkdir()
    publish.copy_file(checkpoint / WEIGHTS, folder / WEIGHTS)
    config = json.loads((checkpoint / CONFIG).read_bytes())
    config["target_modules"] = sorted(config["target_modules"])  # PEFT has them in the order of a set
    config["lora_dropout"] = 0.0  # it is over; PEFT adapts no stacked experts with it
    publish.write_file(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    history = json.loads((checkpoint / STATE).read_bytes())["log_history"]
    losses = [[row["step"], row["loss"]] for row in history if "loss" in row]
    measured = [[*each] for each in {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}.items()]
    if options.plot:
        from ktconvert.pipeline.report.plots import plot_losses

        plot_losses(folder / CURVE, Path(options.input).name, losses, measured)
    about = {"ktconvert": tool_version(), "model": options.input, "settings": options.settings}
    data = json.dumps({**about, "losses": losses, "eval_losses": measured}, indent=1)
    publish.write_file(folder / "ktconvert.json", data.encode() + b"\n")
    publish.make_readable(folder)
    return {"losses": [losses[0], losses[-1]], "eval_losses": [measured[0], measured[-1]] if measured else []}


def card(options: TrainOptions, stats: Stats) -> bytes:
    """Return README.md of the adapter; stats: what write_adapter returned."""
    plan, lora, model = options.schedule_options, options.lora, options.input
    losses, measured = stats[-1]["losses"], stats[-1]["eval_losses"]
    weights = options.cpu_weights.name if options.cpu_weights else "the model's own"
    per_step = plan.sequence_length * plan.batch_size * plan.gradient_accumulation
    rows = [
        ("trained on", f"{Path(options.dataset).name}, {losses[-1][0]} steps of {per_step} tokens"),
        ("experts", weights),
        ("LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}"),
        ("learning rate", f"{plan.learning_rate:g}, {plan.schedule}"),
        ("loss", f"{losses[0][1]:.4f} at the first step, {losses[-1][1]:.4f} at the last"),
        *([("loss of other texts", f"{measured[0][1]:.4f} before, {measured[-1][1]:.4f} after")] if measured else []),
        ("made by", f"ktconvert {tool_version()}"),
    ]
    lines = [
        *("---", f"base_model: {model}", "library_name: peft", "tags:", "- ktconvert", "- lora", "---", ""),
        f"# A LoRA adapter of {Path(model).name}",
        *("", "| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)),
        *(["", f"![losses]({CURVE})"] if options.plot else []),
        *("", "## Use", "", "```bash", f"ktconvert run {model} --adapter THIS --prompt ...", "```", ""),
        "Its matrices have PEFT's names, one for each expert and projection: PEFT loads it into the unconverted model.",
    ]
    return ("\n".join(lines) + "\n").encode()
