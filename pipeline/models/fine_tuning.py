"""Training a LoRA adapter with transformers' Trainer: samples, checkpoints that appear whole, the adapter at the end.

The work directory beside the output (engine/paths.py) has the settings in plan.json, what is being written in partial/,
and whole checkpoints in store/; the adapter is put together in out/ and appears in one step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.adapter import CONFIG
from ktconvert.layouts.errors import InputError, OutputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import documents, publish
from ktconvert.pipeline.engine.existing import saved_plan
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import CARD, FORMAT, SavedPlan, tool_version
from ktconvert.pipeline.engine.workdir import WorkDir, save_plan
from ktconvert.pipeline.models import loading
from ktconvert.pipeline.options.training_options import TrainOptions
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.ui.text import first_line, tokens

COMMAND = "train"
MOST = 1 << 40  # of samples, and of tokens of one: all
KEPT = 2  # checkpoints
CURVE = "losses.svg"
EXPERTS = "experts"

Rows = list[dict[str, Any]]  # what Trainer reads


def sequences(options: TrainOptions, tokenizer: Any, dataset: str, note: Callable[[str], None]) -> Rows:
    """The texts of a data set one after the other, with the end-of-text token between them, cut into sequences (int64
    [sequence_length]), each of which predicts itself, one token on; what is left over at the end is left out. Raises
    InputError for less than one.
    """
    import numpy as np
    import torch

    from ktconvert.pipeline.options.option_groups import Samples
    from ktconvert.pipeline.walk.calibration_data import samples

    seed, length = options.schedule_options.seed, options.schedule_options.sequence_length
    settings = Samples(
        dataset=dataset,
        dataset_split=options.dataset_split,
        num_calibration_samples=MOST,
        max_sequence_length=MOST,
        random_seed=seed,
    )
    found = samples(settings, tokenizer, note)
    end = [] if tokenizer.eos_token_id is None else [np.array([tokenizer.eos_token_id], np.int64)]
    ids = np.concatenate([part for text in found for part in (text, *end)])
    if len(ids) < length:
        raise InputError(
            f"{dataset}: has {len(ids)} tokens, less than one sequence of {length}; give more text, or a smaller "
            "--sequence-length"
        )
    count = len(ids) // length
    rows = torch.from_numpy(ids[: count * length].reshape(count, length))
    return [{"input_ids": row, "labels": row} for row in rows]


def target_modules(options: TrainOptions, model: Any) -> list[str]:
    """The names for PEFT: those that are given, or the linear layers of attention, and experts."""
    import torch

    if options.lora.target_modules is not None:
        return [name.strip() for name in options.lora.target_modules.split(",")]
    linears = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return [*dict.fromkeys(name.split(".")[-1] for name in linears if "attn" in name or "attention" in name), EXPERTS]


def adapted(options: TrainOptions, model: Any) -> Any:
    """The model with a new adapter. Raises UnsupportedError for modules that it does not have or PEFT cannot adapt."""
    import peft

    lora = options.lora
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=target_modules(options, model),
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise UnsupportedError(f"{options.model}: {first_line(error)}") from error


def arguments(options: TrainOptions, folder: Path, evaluates: bool) -> Any:
    import torch
    import transformers

    plan = options.schedule_options
    return transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=plan.epochs,
        max_steps=plan.max_steps or -1,
        per_device_train_batch_size=plan.batch_size,
        per_device_eval_batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation,
        learning_rate=plan.learning_rate,
        lr_scheduler_type=plan.schedule,
        warmup_steps=plan.warmup,  # below 1: a part of all steps
        weight_decay=plan.weight_decay,
        max_grad_norm=plan.max_grad_norm,
        seed=plan.seed,
        gradient_checkpointing=plan.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        save_steps=options.save_steps,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=options.save_steps if evaluates else None,
        eval_on_start=evaluates,
        prediction_loss_only=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def trainer(options: TrainOptions, model: Any, paths: Paths, rows: Rows, held_out: Rows | None, tell: Any) -> Any:
    """Trainer, whose checkpoints appear whole in store/, and which tells every loss: tell(state, losses)."""
    import transformers

    class WholeCheckpoints(transformers.Trainer):
        def _save_checkpoint(self, *model_and_trial: Any) -> None:
            super()._save_checkpoint(*model_and_trial)
            (made,) = paths.partial.iterdir()
            publish.sync_tree(made)
            publish.remove_tree(paths.store / made.name)
            publish.publish(made, paths.store / made.name)
            for old in checkpoints(paths)[:-KEPT]:
                publish.remove_tree(old)

    class Listener(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            tell(state, logs)

    made = WholeCheckpoints(
        model=model,
        args=arguments(options, paths.partial, held_out is not None),
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[Listener()],
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def checkpoints(paths: Paths) -> list[Path]:
    """The whole ones, the last one last."""
    return sorted(paths.store.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def require_free(options: TrainOptions) -> bool:
    """Whether there is anything to do. Raises OutputError where something else lies at the output, or it was begun with
    other settings.
    """
    paths, output = locate(options.output), options.output
    old = saved_plan(paths)
    if options.overwrite:
        if output.exists() and not (output / CONFIG).is_file():
            raise OutputError(f"{output}: is no adapter; move it away or choose another --output.")
        return True
    if old is None and output.exists():
        made = output / CONFIG
        if made.is_file() and settings_of(output) == documents.parse(json.dumps(options.settings).encode()):
            return False
        raise OutputError(f"{output}: lies there already; give --overwrite to replace it, or another --output.")
    if old is not None and old.command != COMMAND:
        raise OutputError(
            f"{output}: `ktconvert {old.command}` was begun there; finish it, or choose another --output."
        )
    if old is not None and (differing := sorted(n for n, v in options.settings.items() if old.settings.get(n) != v)):
        name = differing[0]
        was, now = old.settings.get(name), options.settings[name]
        raise OutputError(
            f"{output}: the training was begun with --{name.replace('_', '-')} {was}, and now it is {now}; "
            "give the old options, or --overwrite to begin anew."
        )
    return True


def settings_of(adapter: Path) -> Any:
    """The settings that an adapter of ours was trained with; None of another's."""
    try:
        return documents.parse((adapter / "ktconvert.json").read_bytes())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def work_directory(options: TrainOptions, steps: int) -> Iterator[Paths]:
    """The work directory, locked, with the settings in it; it goes at the end. OutputError: another process has it."""
    paths = locate(options.output)
    with WorkDir(paths) as work:
        if options.overwrite:
            work.drop()
        publish.remove_tree(paths.assembly)
        document = SavedPlan(
            version=FORMAT,
            tool_version=tool_version(),
            command=COMMAND,
            input=options.model,
            settings=options.settings,
            tuning=options.tuning,
            source=(),
            units=steps,
            overwrite=options.overwrite,
        )
        save_plan(paths, document)
        yield paths
        work.remove()


class Progress:
    """What the user sees of a training: a line or bar with tokens/s, loss and ETA; with --json an event per step."""

    def __init__(self, reporter: Reporter, tokens_per_step: int, steps: int) -> None:
        self.reporter, self.per_step, self.steps = reporter, tokens_per_step, steps
        self.step, self.began, self.first = 0, 0.0, 0

    def begin(self, step: int) -> None:
        self.step = self.first = step
        self.began = time.monotonic()
        if not self.reporter.json_events:
            total, done = self.steps * self.per_step, step * self.per_step
            self.reporter.begin(total, done, tokens, units=(step, self.steps))

    def tell(self, state: Any, logs: Mapping[str, Any]) -> None:
        """Called by Trainer. Raises VerificationError for a loss that is not finite."""
        for name, what in (("eval_loss", "loss of --eval-dataset"), ("loss", "loss"), ("grad_norm", "gradient")):
            if not math.isfinite(float(logs.get(name, 0.0))):
                remedy = "give a smaller --learning-rate, and --overwrite"
                raise VerificationError(f"the {what} is not finite at step {state.global_step}; {remedy}")
        if "eval_loss" in logs:
            self.reporter.say(f"step {state.global_step}: loss of --eval-dataset {logs['eval_loss']:.4f}")
            self.reporter.event("step", step=state.global_step, steps=self.steps, eval_loss=logs["eval_loss"])
        if "loss" not in logs:
            return
        rate = (state.global_step - self.first) * self.per_step / max(time.monotonic() - self.began, 1e-9)
        self.reporter.event(
            "step",
            step=state.global_step,
            steps=self.steps,
            loss=logs["loss"],
            learning_rate=logs.get("learning_rate"),
            tokens_per_second=round(rate, 1),
            eta_seconds=round((self.steps - state.global_step) * self.per_step / rate),
        )
        if not self.reporter.json_events:
            self.reporter.at(f"loss {logs['loss']:.4f}")
            self.reporter.unit_done()
            self.reporter.advance((state.global_step - self.step) * self.per_step)
        self.step = state.global_step


def train(options: TrainOptions, choice: loading.ModelChoice, reporter: Reporter) -> None:
    """Train, from the last checkpoint where there is one, and let the adapter appear. Raises KtconvertError."""
    loading.prepare(choice)  # before torch is imported
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    plan = options.schedule_options
    tokenizer = loading.load_tokenizer(choice)
    rows = sequences(options, tokenizer, options.dataset, reporter.note)
    held_out = options.eval_dataset and sequences(options, tokenizer, options.eval_dataset, reporter.note)
    per_epoch = math.ceil(math.ceil(len(rows) / plan.batch_size) / plan.gradient_accumulation)
    steps = plan.max_steps or max(1, math.ceil(plan.epochs * per_epoch))
    model, _ = loading.load(choice)
    if (most := loading.longest(model.config)) is not None and plan.sequence_length > most:
        raise UnsupportedError(f"--sequence-length {plan.sequence_length}: the model reads at most {most} tokens.")
    model.config.use_cache = False
    transformers.set_seed(plan.seed)
    model = adapted(options, model)
    progress = Progress(reporter, plan.sequence_length * plan.batch_size * plan.gradient_accumulation, steps)
    with work_directory(options, steps) as paths:
        learner = trainer(options, model, paths, rows, held_out or None, progress.tell)
        whole = checkpoints(paths)
        progress.begin(int(whole[-1].name.rpartition("-")[2]) if whole else 0)
        if whole:
            reporter.note(f"goes on from step {progress.step}")
        try:
            learner.train(resume_from_checkpoint=str(whole[-1]) if whole else None)
        finally:
            reporter.end()
        finish(options, learner, paths)


def finish(options: TrainOptions, learner: Any, paths: Paths) -> None:
    """Put the adapter together, and let it appear in place of an older one."""
    learner.model.save_pretrained(paths.assembly)
    config = json.loads((paths.assembly / CONFIG).read_bytes())
    config["target_modules"] = sorted(config["target_modules"])  # PEFT has them in the order of a set
    config["lora_dropout"] = 0.0  # it is over; PEFT adapts no stacked experts with it
    publish.write_file(paths.assembly / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    history = learner.state.log_history
    losses = [(row["step"], row["loss"]) for row in history if "loss" in row]
    measured = [*{row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}.items()]
    if options.plot:
        from ktconvert.pipeline.ui.plots import plot_losses

        plot_losses(paths.assembly / CURVE, Path(options.model).name, losses, measured)
    about = {"ktconvert": tool_version(), "settings": options.settings, "losses": losses, "eval_losses": measured}
    publish.write_file(paths.assembly / "ktconvert.json", json.dumps(about, indent=1).encode() + b"\n")
    publish.write_file(paths.assembly / CARD, card(options, losses, measured))
    publish.make_readable(paths.assembly)
    publish.sync_tree(paths.assembly)
    if options.output.exists():
        publish.exchange(paths.assembly, options.output, aside=paths.old)
    else:
        publish.publish(paths.assembly, options.output)


def card(options: TrainOptions, losses: Sequence[Any], measured: Sequence[Any]) -> bytes:
    plan, lora, model = options.schedule_options, options.lora, options.model
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
