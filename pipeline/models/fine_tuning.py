"""Training a LoRA adapter with transformers' Trainer: samples, checkpoints that appear whole, the adapter at the end.

A training is a plan (engine/plan.py) whose units are its checkpoints and, at the end, the adapter. It shares with every
conversion the guard of what exists, lock, journal, the hashes of what a resumed run reads, and the way in which an
output appears. Checkpoints do not become a part of the output; the last KEPT of them stay in the store.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError, VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs.opening import TRAIN
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.assemble import assemble
from ktconvert.pipeline.engine.execute import require_possible, take_up
from ktconvert.pipeline.engine.existing import already_finished
from ktconvert.pipeline.engine.loop import publish_unit, recorded
from ktconvert.pipeline.engine.plan import Plan, require_unchanged
from ktconvert.pipeline.engine.units import Context, Made, Result, Stage, Unit, Written
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.models import loading
from ktconvert.pipeline.models.adapter_files import write_adapter
from ktconvert.pipeline.models.failed_writes import explain_writes
from ktconvert.pipeline.options.declare import hashable
from ktconvert.pipeline.options.training_options import TrainOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import first_line, tokens

CHECKPOINT, ADAPTER = "checkpoint", "adapter"  # stages
VERSION = 1  # raised when the bytes of checkpoints or adapters change
MOST = 1 << 40  # of samples, and of tokens of one: all
KEPT = 2  # checkpoints
EXPERTS = "experts"

Rows = list[dict[str, Any]]  # what Trainer reads


def sequences(options: TrainOptions, tokenizer: Any, dataset: str, note: Callable[[str], None]) -> Rows:
    """The texts of a data set one after the other, with the end-of-text token between them, cut into sequences (int64
    [sequence_length]), each of which predicts itself, one token on; what is left over at the end is left out. Raises
    InputError for less than one.
    """
    import numpy as np
    import torch

    from ktconvert.pipeline.models.samples import samples
    from ktconvert.pipeline.options.option_groups import Samples

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
        raise UnsupportedError(f"{options.input}: {first_line(error)}") from error


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


def trainer(
    options: TrainOptions, model: Any, work: WorkDir, rows: Rows, held_out: Rows | None, keep: Any, tell: Any
) -> Any:
    """Return a Trainer that hands over every checkpoint, keep(step, folder), and every loss, tell(state, losses)."""
    import transformers

    partial = work.paths.partial

    class WholeCheckpoints(transformers.Trainer):
        def _save_checkpoint(self, *model_and_trial: Any) -> None:
            with explain_writes(partial):
                super()._save_checkpoint(*model_and_trial)
            keep(self.state.global_step, partial / f"checkpoint-{self.state.global_step}")

    class Listener(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            tell(state, logs)

    made = WholeCheckpoints(
        model=model,
        args=arguments(options, partial, held_out is not None),
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[Listener()],
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


# --- checkpoints and the adapter as units of a plan -----------------------------------------------


def with_stages(plan: Plan, options: TrainOptions, data: Sequence[Rows], steps: int, adapter_bytes: int) -> Plan:
    """Return the plan with a unit for each checkpoint, named by its step, and one for the adapter. data: the samples,
    whose token ids are part of every fingerprint, since a hub's data set has no files of ours to identify.
    """
    ids = hashlib.sha256()
    for row in (row for rows in data for row in rows):
        ids.update(row["input_ids"].numpy().tobytes())
    read = frozenset(file.name for file in plan.source)
    common: dict[str, Any] = {"versions": (VERSION,), "files": read, "folder": True}
    params = (*((name, hashable(value)) for name, value in sorted(options.settings.items())), ("ids", ids.hexdigest()))
    saved = [*range(options.save_steps, steps, options.save_steps), steps]
    checkpoints = tuple(
        Unit(CHECKPOINT, str(step), bytes_out=0, work=step, params=params, kept=False, **common) for step in saved
    )
    adapter = Unit(ADAPTER, TRAIN, bytes_out=adapter_bytes, work=steps, params=params, final=".", **common)
    return replace(
        plan,
        stages=(
            Stage(CHECKPOINT, "checkpoints", checkpoints, _describe_files, chain=True),
            Stage(ADAPTER, "adapter", (adapter,), _describe_files),
        ),
        # Each holds the matrices and AdamW's two moments in float32; the new one is complete before an old one goes.
        scratch_bytes=3 * adapter_bytes * (KEPT + 1),
    )


def _describe_files(unit: Unit[int], folder: Path, _: Context | None = None) -> Result:
    """Return the durable files of a folder, hashed."""
    publish.sync_tree(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return Result(
        tuple(
            Written(path.relative_to(folder).as_posix(), path.stat().st_size, publish.sha256_file(path))
            for path in files
        ),
        tensors=0,
    )


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


class Training(NamedTuple):
    """A training at work. data: sequences to train on and, if there are any, those whose loss is measured."""

    work: WorkDir
    options: TrainOptions
    choice: loading.ModelChoice
    data: Sequence[Rows]
    steps: int
    reporter: Reporter


def train(
    plan: Plan, options: TrainOptions, choice: loading.ModelChoice, reporter: Reporter, adapter_bytes: int
) -> bool:
    """Train from the last whole checkpoint, or from the beginning, and let the adapter appear. Return False if another
    process finished it meanwhile. Raises KtconvertError.
    """
    loading.prepare(choice)  # before torch is imported
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer, overwrite = loading.load_tokenizer(choice), options.existing.overwrite
    named = [options.dataset, *([options.eval_dataset] if options.eval_dataset else [])]
    data = [sequences(options, tokenizer, dataset, reporter.note) for dataset in named]
    steps = steps_of(options, len(data[0]))
    plan = with_stages(plan, options, data, steps, adapter_bytes)
    require_possible([plan], overwrite)
    with WorkDir(plan.locate()) as work:
        if already_finished(plan, overwrite):
            work.remove()
            return False
        begun = work.paths.plan.exists()
        take_up(plan, work, reporter, overwrite=overwrite, trust_store=options.existing.trust_store)
        if {*work.finished} - {unit.fingerprint for unit in plan.units}:
            raise InputError(
                f"{options.dataset}: its token ids are not those that the training was begun with (the data set or the "
                "tokenizer changed); put the old files back, or start over with --overwrite."
            )
        try:
            with recorded(work):
                _train(plan, Training(work, options, choice, data, steps, reporter))
        except KtconvertError:
            if not begun and not work.finished:  # a model or options that are refused leave nothing behind
                work.remove()
            raise
    return True


def steps_of(options: TrainOptions, rows: int) -> int:
    """Return the number of steps for this many sequences."""
    schedule = options.schedule_options
    per_epoch = math.ceil(math.ceil(rows / schedule.batch_size) / schedule.gradient_accumulation)
    return schedule.max_steps or max(1, math.ceil(schedule.epochs * per_epoch))


def _train(plan: Plan, training: Training) -> None:
    """Make the checkpoints and the adapter that are missing, and let the adapter appear."""
    work, checkpoints, (adapter,) = training.work, *(stage.units for stage in plan.stages)
    if work.done_reason(adapter) is None:
        last = _last_whole(checkpoints, work, training.reporter)
        if last is None or last.work < training.steps:
            plan = _make_checkpoints(plan, training, last)
        began = time.monotonic()
        work.journal.append(journal.Start(unit=adapter.name))
        folder = work.paths.partial / adapter.name
        stats = write_adapter(training.options, work.paths.store / checkpoints[-1].stored_name, folder)
        made = structs.replace(_describe_files(adapter, folder), stats=stats)
        publish_unit(plan, work, training.reporter, adapter, Made(folder, made, time.monotonic() - began))
    work.journal.append(journal.Start(unit="assemble"))
    assemble(replace(plan, read_once=True), work)


def _last_whole(checkpoints: Sequence[Unit[int]], work: WorkDir, reporter: Reporter) -> Unit[int] | None:
    """Return the last checkpoint that is whole, or None; warn where the last one that was recorded is not."""
    recorded = [unit for unit in checkpoints if unit.fingerprint in work.finished]
    whole = [unit for unit in recorded if work.done_reason(unit) is not None]
    if recorded and recorded[-1:] != whole[-1:]:
        reporter.warn(f"{work.paths.store / recorded[-1].stored_name}: lacks files; an earlier checkpoint is used.")
    return whole[-1] if whole else None


def _make_checkpoints(plan: Plan, training: Training, last: Unit[int] | None) -> Plan:
    """Train from a checkpoint, or from the beginning, to the last one. Return the plan, whose input was read."""
    import transformers

    work, options, reporter, data = training.work, training.options, training.reporter, training.data
    schedule, checkpoints = options.schedule_options, plan.stages[0].units
    model, _ = loading.load(training.choice)
    if (most := loading.longest(model.config)) is not None and schedule.sequence_length > most:
        raise UnsupportedError(f"--sequence-length {schedule.sequence_length}: the model reads at most {most} tokens.")
    model.config.use_cache = False
    require_unchanged(plan)
    plan = replace(plan, read_once=True)
    transformers.set_seed(schedule.seed)
    model = adapted(options, model)
    tokens_per_step = schedule.sequence_length * schedule.batch_size * schedule.gradient_accumulation
    progress = Progress(reporter, tokens_per_step, training.steps)
    by_step, began = {unit.work: unit for unit in checkpoints}, time.monotonic()

    def start(step: int) -> None:
        nonlocal began
        began = time.monotonic()
        following = next((unit for unit in checkpoints if unit.work > step), None)
        if following is not None:
            work.journal.append(journal.Start(unit=following.name))

    def keep(step: int, folder: Path) -> None:
        unit = by_step[step]
        made = Made(folder, _describe_files(unit, folder), time.monotonic() - began)
        publish_unit(plan, work, reporter, unit, made)
        for old in checkpoints[: max(0, checkpoints.index(unit) + 1 - KEPT)]:
            publish.remove_tree(work.paths.store / old.stored_name)
        start(step)

    held_out = data[1] if len(data) > 1 else None
    learner = trainer(options, model, work, data[0], held_out, keep, progress.tell)
    progress.begin(0 if last is None else last.work)
    start(progress.step)
    if last is not None:
        reporter.note(f"goes on from step {progress.step}")
    try:
        learner.train(resume_from_checkpoint=last and str(work.paths.store / last.stored_name))
    finally:
        reporter.end()
    return plan
