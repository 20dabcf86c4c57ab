"""The options of commands that run a model on calibration data, and their values as settings of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ktconvert.pipeline.cli import options
from ktconvert.pipeline.tell.report import Reporter

F = TypeVar("F", bound=Callable[..., Any])
DATA = ("num_calibration_samples", "max_sequence_length", "dataset", "dataset_split", "random_seed")


def data(samples: int) -> Callable[[F], F]:
    """Which samples: --dataset, --dataset-split, --num-calibration-samples (by default `samples`),
    --max-sequence-length.
    """

    def decorate(command: F) -> F:
        for option in (
            click.option(
                "--max-sequence-length",
                type=options.Number(min=2),
                default=2048,
                show_default=True,
                help="Tokens at which a sample is cut.",
            ),
            click.option(
                "--num-calibration-samples",
                type=options.Number(min=1),
                default=samples,
                show_default=True,
                help="Samples: the first rows of the split.",
            ),
            click.option("--dataset-split", default="train_sft", show_default=True, help="Split of a hub's data set."),
            click.option(
                "--dataset",
                type=options.PathOrHubId(),
                default="HuggingFaceH4/ultrachat_200k",
                show_default=True,
                help="Calibration texts: a file or folder (txt, jsonl, parquet), or a hub id.",
            ),
        ):
            command = option(command)
        return command

    return decorate


def random_seed(command: F) -> F:
    """--random-seed."""
    return click.option(
        "--random-seed", type=options.Number(min=0), default=42, show_default=True, help="For the order of samples."
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
