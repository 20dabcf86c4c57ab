"""The options of commands that run a model on calibration data, and their values as settings of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ktconvert.pipeline.cli import options
from ktconvert.pipeline.ui.progress import Reporter

F = TypeVar("F", bound=Callable[..., Any])
DATA = ("num_calibration_samples", "max_sequence_length", "dataset", "dataset_split", "random_seed")
GPTQ = (*DATA, "dampening_frac", "calibrate", "min_expert_tokens")


def data(samples: int) -> Callable[[F], F]:
    """Which samples: --dataset, --dataset-split, --num-calibration-samples (by default `samples`),
    --max-sequence-length.
    """
    return options.in_order(
        click.option(
            "--dataset",
            type=options.PathOrHubId(),
            default="HuggingFaceH4/ultrachat_200k",
            show_default=True,
            help="Calibration texts: a file or folder (txt, jsonl, parquet), or a hub id.",
        ),
        click.option(
            "--dataset-split",
            type=options.Text(),
            default="train_sft",
            show_default=True,
            help="Split of a hub's data set.",
        ),
        click.option(
            "--num-calibration-samples",
            type=options.Number(min=1),
            default=samples,
            show_default=True,
            help="Samples: the first rows of the split.",
        ),
        click.option(
            "--max-sequence-length",
            type=options.Number(min=2),
            default=2048,
            show_default=True,
            help="Tokens at which a sample is cut.",
        ),
    )


def random_seed(command: F) -> F:
    """--random-seed."""
    return click.option(
        "--random-seed", type=options.Number(min=0), default=42, show_default=True, help="For the order of samples."
    )(command)


def of_gptq(calibrate: str) -> Callable[[F], F]:
    """How GPTQ uses samples: --dampening-frac, --calibrate (by default `calibrate`), --min-expert-tokens."""
    return options.in_order(
        click.option(
            "--dampening-frac",
            type=options.Real(min=0, max=1),
            default=0.1,
            show_default=True,
            help="Part of the mean of the Hessian's diagonal that is added to it.",
        ),
        click.option(
            "--calibrate",
            type=click.Choice(["all", "routed", "mixed"], case_sensitive=False),
            default=calibrate,
            show_default=True,
            help="Every expert sees all tokens, or those routed to it; mixed: gate and up all, down those.",
        ),
        click.option(
            "--min-expert-tokens",
            type=options.Number(min=1),
            default=128,
            show_default=True,
            help="Experts with fewer routed tokens are not compensated, and listed; not with --calibrate all.",
        ),
    )


def machine(command: F) -> F:
    """Where a model runs: --trust-remote-code, --force-cpu, --max-gpu-memory, --allow-machine-change."""
    return options.in_order(
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="To calibrate, let transformers run Python code that comes with the model.",
        ),
        click.option("--force-cpu", is_flag=True, help="Never calibrate on a GPU."),
        click.option("--max-gpu-memory", type=options.Size(), default=None, help="Of the GPU, at most; e.g. 40GiB."),
        click.option(
            "--allow-machine-change", is_flag=True, help="Go on with a calibration that was begun on another machine."
        ),
    )(command)


def save_statistics(command: F) -> F:
    """--save-statistics."""
    return click.option(
        "--save-statistics",
        type=options.FilePath(),
        default=None,
        help="GPTQ: also write what `calibrate` writes, to this folder.",
    )(command)


def statistics_settings(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What --save-statistics adds to the settings and the tuning of a request: nothing without it."""
    folder: Path | None = params["save_statistics"]
    if folder is None:
        return {}, {}
    return {"save_statistics": True}, {"save_statistics": str(folder.expanduser().absolute())}


def settings(
    params: Mapping[str, Any],
    names: tuple[str, ...],
    output: Path,
    reporter: Reporter,
    this_machine: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """The settings of a calibration, those of `names` and the machine. One that has begun keeps the machine that it was
    begun on, unless it starts over.
    """
    from ktconvert.pipeline.engine.existing import begun_with
    from ktconvert.pipeline.walk.calibration import local_files

    local_files(params["dataset"])  # reports one that is missing before anything else is done
    machine = this_machine()
    if params["max_gpu_memory"] is not None and machine["device_type"] == "cpu":
        reporter.note("--max-gpu-memory changes nothing here: no GPU is used")
    afresh = params["overwrite"] and not params["allow_machine_change"]
    begun = None if afresh else (begun_with(output) or {}).get("machine")
    chosen = {name: params[name] for name in (*names, "trust_remote_code")}
    return {**chosen, "dataset": options.stored_input(params["dataset"]), "machine": begun or machine}


def gptq_settings(
    params: Mapping[str, Any], names: tuple[str, ...], output: Path, threads: int, reporter: Reporter
) -> dict[str, Any]:
    """The settings of GPTQ: those of `names`, and the machine."""
    from ktconvert.pipeline.walk.environment import this_machine

    def machine() -> dict[str, Any]:
        return this_machine(threads, params["force_cpu"], params["max_gpu_memory"])

    return settings(params, names, output, reporter, machine)


def note_unused(reporter: Reporter, unused: Mapping[str, str]) -> None:
    """Note every option on the command line that the method does not use, with the reason."""
    context = click.get_current_context()
    for name, why in unused.items():
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            reporter.note(f"--{name.replace('_', '-')} {why}")
