"""Training of a LoRA adapter as a plan: checkpoints, the adapter at the end, and its files.

The units of the plan (engine/plan.py) are the checkpoints and, at the end, the adapter. As in every conversion, the
engine guards an existing output, locks, keeps the journal, hashes the inputs that a resumed run reads, and publishes
the output. Checkpoints are no part of the output; the last KEPT_CHECKPOINTS of them stay in the store.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from ktconvert.layouts.checkpoints.adapter import CONFIG, WEIGHTS
from ktconvert.layouts.errors import InputError, VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs.opening import TRAIN
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.assemble import assemble_output
from ktconvert.pipeline.engine.execute import require_possible, resume_work
from ktconvert.pipeline.engine.existing import is_finished, require_writable_output
from ktconvert.pipeline.engine.loop import Interrupted, StopFlag, publish_unit, record_run, stop_at_once
from ktconvert.pipeline.engine.plan import Needs, Plan, UnitStats, require_unchanged, tool_version
from ktconvert.pipeline.engine.units import Context, FinishedUnit, Result, Stage, Unit, Written
from ktconvert.pipeline.engine.workdir import WorkDir, save_plan
from ktconvert.pipeline.models import loading, pretrained
from ktconvert.pipeline.models.text_datasets import name_option
from ktconvert.pipeline.models.trainer import (
    LORA_MEMORY,
    Rows,
    add_adapter,
    build_trainer,
    describe_trained_parameters,
    read_sequences,
)
from ktconvert.pipeline.options.declare import to_hashable
from ktconvert.pipeline.options.model_options import TrainOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import duration, plural, size, tokens

CHECKPOINT, ADAPTER = "checkpoint", "adapter"  # stages
DIVERGED = 1.0  # nats by which batches of text hardly differ
VERSION = 1  # raised when the bytes of checkpoints or adapters change
KEPT_CHECKPOINTS = 2
CPU_WEIGHTS = "cpu-weights/"  # prefix of the names of the converted experts' files in a plan
CURVE = "losses.svg"
STATE = "trainer_state.json"


# --- the plan -------------------------------------------------------------------------------------


def count_steps(options: TrainOptions, rows: int) -> int:
    """Return the number of training steps for this number of sequences."""
    schedule = options.schedule_options
    per_epoch = math.ceil(math.ceil(rows / schedule.batch_size) / schedule.gradient_accumulation)
    return schedule.max_steps or max(1, math.ceil((schedule.epochs or 1) * per_epoch))


def read_data(options: TrainOptions, choice: loading.ModelChoice, reporter: Reporter) -> list[Rows]:
    """Return the sequences of --dataset and, if it is given, of --eval-dataset.

    Raises InputError for unusable data, UsageError for sequences longer than the model can read.
    """
    config = loading.prepare_config(choice)  # before torch is imported
    loading.require_context(config, options.schedule_options.sequence_length)
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = loading.load_tokenizer(choice)
    rows = [read_sequences(options, tokenizer, options.dataset, reporter.announce)]
    if options.eval_dataset:
        with name_option("--eval-dataset"):
            rows.append(read_sequences(options, tokenizer, options.eval_dataset, reporter.announce))
    return rows


def with_stages(plan: Plan, options: TrainOptions, data: Sequence[Rows], memory: Mapping[str, int]) -> Plan:
    """Return the plan with a unit for each checkpoint, named after its step, and one for the adapter.

    data    sequences, whose token ids are part of every fingerprint, since a data set of the hub has no local files
    memory  result of estimate_memory
    """
    steps = count_steps(options, len(data[0]))
    adapter_bytes = memory[LORA_MEMORY] // 4  # float32; AdamW needs the gradients and two moments of the same size
    weights_prefix = CPU_WEIGHTS if options.cpu_weights else ""
    weights_bytes = sum(file.size for file in plan.source if file.name.startswith(weights_prefix))
    ids = hashlib.sha256()
    for row in (row for rows in data for row in rows):
        ids.update(row["input_ids"].numpy().tobytes())
    read = frozenset(file.name for file in plan.source)
    common: dict[str, Any] = {"versions": (VERSION,), "files": read, "folder": True}
    params = (
        *((name, to_hashable(value)) for name, value in sorted(options.settings.items())),
        ("ids", ids.hexdigest()),
    )
    first = Unit(CHECKPOINT, "1", bytes_out=0, work=1, params=params, in_output=False, **common)
    saved = {*range(options.save_steps, steps, options.save_steps), steps, *_find_made_steps(plan, first)}
    checkpoints = tuple(_make_checkpoint(first, step) for step in sorted(saved))
    adapter = Unit(ADAPTER, TRAIN, bytes_out=adapter_bytes, work=steps, params=params, final=".", **common)
    training = f"train {plural(steps, 'step')}"
    peak = pretrained.LIBRARIES + weights_bytes + memory["together"]
    return replace(
        plan,
        stages=(
            Stage(CHECKPOINT, training, checkpoints, _describe_files, chain=True, replaces=True),
            Stage(ADAPTER, "write the adapter", (adapter,), _describe_files),
        ),
        # A checkpoint contains float32 matrices and AdamW's two moments. A new one is complete before an old one is
        # removed.
        needs=Needs(scratch_bytes=3 * adapter_bytes * (KEPT_CHECKPOINTS + 1)),
        hooks=replace(plan.hooks, peak_memory=lambda _threads: peak),
    )


def _make_checkpoint(checkpoint: Unit[int], step: int) -> Unit[int]:
    """Return the checkpoint after a different number of steps of the same training."""
    return replace(checkpoint, key=str(step), work=step)


def _find_made_steps(plan: Plan, checkpoint: Unit[int]) -> list[int]:
    """Return the steps of this training's checkpoints in the journal and in the store.

    These include the steps after which it was stopped. Later checkpoints may have replaced the files of earlier ones.
    """
    paths = plan.locate()
    finished = journal.find_finished_units(journal.read_records(paths.journal))
    stored = {folder.name for folder in paths.store.glob(f"{CHECKPOINT}.*.*")}
    parts = [name.split(".") for name in (*stored, *(record.unit for record in finished.values()))]
    steps = {int(number) for kind, number, *_ in parts if kind == CHECKPOINT and number.isdecimal()}
    units = [_make_checkpoint(checkpoint, step) for step in sorted(steps)]
    return [unit.work for unit in units if unit.fingerprint in finished or unit.stored_name in stored]


def _describe_files(unit: Unit[int], folder: Path, _: Context | None = None) -> Result:
    """Sync the files of a folder to disk, and return their sizes and hashes."""
    publish.sync_tree(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return Result(
        tuple(
            Written(path.relative_to(folder).as_posix(), path.stat().st_size, publish.sha256_file(path))
            for path in files
        ),
        tensors=0,
    )


# --- training -------------------------------------------------------------------------------------


class Progress:
    """The progress of a training on the terminal: tokens/s, loss and ETA; with --json an event per step."""

    def __init__(self, reporter: Reporter, tokens_per_step: int, steps: int) -> None:
        self.reporter = reporter
        self.tokens_per_step = tokens_per_step
        self.steps = steps
        self.step = self.first_step = 0
        self.start_time = 0.0

    def begin(self, step: int) -> None:
        self.step = self.first_step = step
        self.start_time = time.monotonic()
        if not self.reporter.json_events:
            total = self.steps * self.tokens_per_step
            done = step * self.tokens_per_step
            self.reporter.begin(total, done, tokens, units=(step, self.steps))

    def report(self, state: Any, logs: Mapping[str, Any]) -> None:
        """Report the logs of Trainer. Raises VerificationError for a loss or gradient that is not finite."""
        for name, value in (("eval_loss", "loss of --eval-dataset"), ("loss", "loss"), ("grad_norm", "gradient")):
            if not math.isfinite(float(logs.get(name, 0.0))):
                last_before_update = 0 if name == "eval_loss" else 1
                remedy = "start over with a smaller --learning-rate and --overwrite"
                if state.global_step <= last_before_update:
                    remedy = pretrained.COMPARE_FILES
                raise VerificationError(f"the {value} is not finite at step {state.global_step}; {remedy}")
        if "eval_loss" in logs:
            self.reporter.say(f"step {state.global_step}: loss of --eval-dataset {logs['eval_loss']:.4f}")
            self.reporter.event("step", step=state.global_step, steps=self.steps, eval_loss=logs["eval_loss"])
        if "loss" not in logs:
            return
        seconds = max(time.monotonic() - self.start_time, 1e-9)
        rate = (state.global_step - self.first_step) * self.tokens_per_step / seconds
        self.reporter.event(
            "step",
            step=state.global_step,
            steps=self.steps,
            loss=logs["loss"],
            learning_rate=logs.get("learning_rate"),
            tokens_per_second=round(rate, 1),
            eta_seconds=round((self.steps - state.global_step) * self.tokens_per_step / rate),
        )
        if not self.reporter.json_events:
            self.reporter.set_current(f"loss {logs['loss']:.4f}")
            self.reporter.finish_unit()
            self.reporter.advance((state.global_step - self.step) * self.tokens_per_step)
        self.step = state.global_step


class Training(NamedTuple):
    """A training in progress.

    data  sequences to train on and, optionally, sequences to evaluate
    """

    workdir: WorkDir
    options: TrainOptions
    choice: loading.ModelChoice
    data: Sequence[Rows]
    reporter: Reporter


def train(
    plan: Plan, options: TrainOptions, choice: loading.ModelChoice, data: Sequence[Rows], reporter: Reporter
) -> bool:
    """Train from the last complete checkpoint, or from the beginning, and publish the adapter.

    plan  result of with_stages

    Returns False if another process finished it meanwhile. Raises KTConvertError.
    """
    overwrite = options.existing.overwrite
    require_possible([plan], overwrite)
    with WorkDir(plan.locate()) as workdir:
        require_writable_output(plan, overwrite)
        if is_finished(plan, overwrite):
            workdir.remove()
            return False
        resume_work(plan, workdir, reporter, overwrite=overwrite, trust_store=options.existing.trust_store)
        if {*workdir.finished} - {unit.fingerprint for unit in plan.units}:
            raise InputError(
                f"{options.dataset}: its token ids differ from those at the start of the training (the data set or "
                "the tokenizer changed); restore the old files, or start over with --overwrite."
            )
        with record_run(workdir), stop_at_once(options.output):
            _run(plan, Training(workdir, options, choice, data, reporter))
    return True


def _run(plan: Plan, training: Training) -> None:
    """Make the missing checkpoints and the adapter, publish the adapter, and report the result."""
    began = time.monotonic()
    workdir, checkpoints, (adapter,) = training.workdir, *(stage.units for stage in plan.stages)
    if workdir.why_finished(adapter) is None:
        last = _find_last_complete(checkpoints, workdir, training.reporter)
        if last is None or last.work < adapter.work:
            _train_from(last, plan, training)
        start_time = time.monotonic()
        workdir.journal.append(journal.Start(unit=adapter.name))
        folder = workdir.paths.partial / adapter.name
        stats = write_adapter(training.options, workdir.paths.store / checkpoints[-1].stored_name, folder)
        result = structs.replace(_describe_files(adapter, folder), stats=stats)
        finished = FinishedUnit(folder, result, time.monotonic() - start_time)
        publish_unit(plan, workdir, training.reporter, adapter, finished)
    result = workdir.finished[adapter.fingerprint].result
    workdir.journal.append(journal.Start(unit="assemble"))
    assemble_output(plan, workdir)
    _report_result(plan, result, time.monotonic() - began, training.reporter)


def _report_result(plan: Plan, result: Result, seconds: float, reporter: Reporter) -> None:
    """Report the end of a training: losses, size and duration."""
    output = plan.options.output
    nbytes = sum(file.nbytes for file in result.files)
    peak_rss = machine.peak_rss()
    losses = "; ".join(map(" ".join, describe_losses(result.stats)))
    reporter.say(f"{output}: {losses}; {size(nbytes)} in {duration(seconds)} (peak RSS {size(peak_rss)})")
    (_, first), (_, last) = result.stats["losses"]
    if last > first + DIVERGED:
        remedy = "train again with a smaller --learning-rate"
        reporter.warn(f"{output}: the loss rose from {first:.4f} to {last:.4f}; {remedy}")
    reporter.event("finished", output=str(output), bytes=nbytes, seconds=round(seconds, 3), peak_rss=peak_rss)


def _find_last_complete(checkpoints: Sequence[Unit[int]], workdir: WorkDir, reporter: Reporter) -> Unit[int] | None:
    """Return the last complete checkpoint, or None; warn if the last recorded one lacks files."""
    recorded = [unit for unit in checkpoints if unit.fingerprint in workdir.finished]
    complete = [unit for unit in recorded if workdir.why_finished(unit) is not None]
    if recorded and recorded[-1:] != complete[-1:]:
        reporter.warn(
            f"{workdir.paths.store / recorded[-1].stored_name}: files are missing; using an earlier checkpoint."
        )
    return complete[-1] if complete else None


def _train_from(last: Unit[int] | None, plan: Plan, training: Training) -> None:
    """Train from a checkpoint, or from the beginning, to the last step."""
    import transformers

    workdir = training.workdir
    options = training.options
    reporter = training.reporter
    data = training.data
    schedule = options.schedule_options
    checkpoints = plan.stages[0].units
    model, _ = loading.load_model_and_tokenizer(training.choice)
    if getattr(model.config.get_text_config(decoder=True), "attention_dropout", 0) and model.device.type == "cpu":
        model.set_attn_implementation("eager")  # torch's fused attention has no dropout on a CPU
    model.config.use_cache = False
    require_unchanged(plan)  # now that all of it is in memory
    transformers.set_seed(schedule.seed)
    model = add_adapter(options, model)
    reporter.note(describe_trained_parameters(model))
    tokens_per_step = schedule.sequence_length * schedule.batch_size * schedule.gradient_accumulation
    progress = Progress(reporter, tokens_per_step, checkpoints[-1].work)
    by_step = {unit.work: unit for unit in checkpoints}
    start_time = time.monotonic()

    def begin_next(step: int) -> None:
        nonlocal start_time
        start_time = time.monotonic()
        next_unit = next((unit for unit in checkpoints if unit.work > step), None)
        if next_unit is not None:
            workdir.journal.append(journal.Start(unit=next_unit.name))

    def publish_checkpoint(step: int, folder: Path) -> None:
        unit = by_step.get(step)
        if unit is None:  # after a signal
            unit = _make_checkpoint(checkpoints[0], step)
            planned = plan.document(workdir.may_replace)
            save_plan(workdir.paths, structs.replace(planned, units=planned.units + 1))
        finished = FinishedUnit(folder, _describe_files(unit, folder), time.monotonic() - start_time)
        publish_unit(plan, workdir, reporter, unit, finished)
        made = [each for each in checkpoints if each.work <= step]
        for old_unit in made[:-KEPT_CHECKPOINTS]:
            publish.remove_tree(workdir.paths.store / old_unit.stored_name)
        begin_next(step)

    eval_rows = data[1] if len(data) > 1 else None
    partial = workdir.paths.partial
    stop = StopFlag([options.output], "saving a checkpoint after this step")
    callbacks = publish_checkpoint, progress.report, lambda: bool(stop.number)
    trainer = build_trainer(options, model, partial, data[0], eval_rows, *callbacks)
    progress.begin(0 if last is None else last.work)
    begin_next(progress.step)
    if last is not None:
        reporter.say(f"resuming from step {progress.step}")
    try:
        with stop.handle_signals():
            trainer.train(resume_from_checkpoint=last and str(workdir.paths.store / last.stored_name))
    finally:
        reporter.end()
    if stop.number and trainer.state.global_step < checkpoints[-1].work:
        raise Interrupted(stop.number, [options.output])


# --- files of the adapter -------------------------------------------------------------------------


def write_adapter(options: TrainOptions, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Write the adapter of a checkpoint into a new folder, and return the losses for adapter_card."""
    publish.remove_tree(folder)
    folder.mkdir()
    publish.copy_file(checkpoint / WEIGHTS, folder / WEIGHTS)
    config = json.loads((checkpoint / CONFIG).read_bytes())
    config["target_modules"] = sorted(config["target_modules"])  # PEFT writes them in the order of a set
    config["lora_dropout"] = 0.0  # only needed for training; PEFT rejects it for stacked experts
    publish.write_file(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    history = json.loads((checkpoint / STATE).read_bytes())["log_history"]
    losses = [[row["step"], row["loss"]] for row in history if "loss" in row]
    eval_by_step = {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}
    eval_losses = [[step, loss] for step, loss in eval_by_step.items()]
    if options.plot:
        from ktconvert.pipeline.report.plots import plot_losses

        plot_losses(folder / CURVE, Path(options.input).name, losses, eval_losses)
    description = {"ktconvert": tool_version(), "model": options.input, "settings": options.settings}
    data = json.dumps({**description, "losses": losses, "eval_losses": eval_losses}, indent=1)
    publish.write_file(folder / "ktconvert.json", data.encode() + b"\n")
    publish.make_readable(folder)
    return {"losses": [losses[0], losses[-1]], "eval_losses": [eval_losses[0], eval_losses[-1]] if eval_losses else []}


def describe_losses(stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows (name, value) with the first and last losses, from the result of write_adapter."""
    (_, first), (_, last) = stats["losses"]
    rows = [("loss", f"{first:.4f} at the first step, {last:.4f} at the last")]
    if stats["eval_losses"]:
        (_, before), (_, after) = stats["eval_losses"]
        rows.append(("evaluation loss", f"{before:.4f} before, {after:.4f} after"))
    return rows


def adapter_card(options: TrainOptions, stats: UnitStats) -> bytes:
    """Return the adapter's README.md.

    stats  the figures of the units; the last ones are the result of write_adapter
    """
    schedule = options.schedule_options
    lora = options.lora
    model = options.input
    steps = stats[-1]["losses"][-1][0]
    words = [model, *(["--cpu-weights", str(options.cpu_weights)] if options.cpu_weights else [])]
    experts_text = options.cpu_weights.name if options.cpu_weights else "the model's own"
    tokens_per_step = schedule.sequence_length * schedule.batch_size * schedule.gradient_accumulation
    rows = [
        ("trained on", f"{Path(options.dataset).name}, {steps} steps of {tokens_per_step} tokens"),
        ("experts", experts_text),
        ("LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}"),
        ("learning rate", f"{schedule.learning_rate:g}, {schedule.schedule}"),
        *describe_losses(stats[-1]),
        ("made by", f"ktconvert {tool_version()}"),
    ]
    lines = [
        "---",
        *([] if Path(model).exists() else [f"base_model: {model}"]),  # hubs accept no path
        *("library_name: peft", "tags:", "- ktconvert", "- lora", "---", ""),
        f"# LoRA adapter of {Path(model).name}",
        *("", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)),
        *(["", f"![losses]({CURVE})"] if options.plot else []),
        *("", "## Use", "", "```bash", shlex.join(["ktconvert", "run", *words, "--adapter", "ADAPTER"]), "```", ""),
        "The matrices have PEFT's names, one for each expert and projection: PEFT loads them into the original model.",
    ]
    return ("\n".join(lines) + "\n").encode()
