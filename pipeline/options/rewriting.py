"""Options of the commands that rewrite or measure what there is: calibrate, dequantize, merge, resplit, resume."""

from __future__ import annotations

from pathlib import Path

from ktconvert.pipeline.options.declare import NONE, Effect, Options, files, option, recorded, tuning, weights
from ktconvert.pipeline.options.option_groups import (
    ArchFile,
    ConversionOptions,
    Execution,
    Hub,
    Leftovers,
    Machine,
    Reporting,
    Samples,
    Workers,
)
from ktconvert.pipeline.options.types import FilePath, Number, OutputPath, PathOrHubId, Size, Spelled

AGAIN = "On resume, make again what came from files that were modified since."


class CalibrateOptions(ConversionOptions):
    """arch_row: the text of --arch-file."""

    input: str = option(
        "The checkpoint: a directory, a .safetensors file, or a hub id (org/name).",
        PathOrHubId(absolute=True),
        argument="model",
        default=NONE,
    )
    output: Path = option(
        "The folder for the files.", OutputPath(absolute=True), flags=("-o", "--output"), default=NONE
    )
    second_moments: bool = weights(
        "Also keep the sums of x xT, H x H for a layer and I x I for each expert, which `cpu --scale mse` searches "
        "with; the plan tells their size.",
        default=False,
    )
    arch_row: str | None = recorded(Effect.FILES, "--arch-file")
    samples: Samples = Samples(num_calibration_samples=128)
    machine: Machine = Machine()
    hub: Hub = Hub()
    arch: ArchFile = ArchFile()


class DequantizeOptions(ConversionOptions):
    input: str = option(
        "The checkpoint: a directory, a .safetensors file, or a hub id (org/name).",
        PathOrHubId(absolute=True),
        flags=("-i", "--input-path", "--model-dir", "--input-fp8-hf-path"),
        argument="src",
        default=NONE,
    )
    output: Path = option(
        "Output directory.",
        OutputPath(absolute=True),
        flags=("-o", "--output", "--output-dir", "--output-bf16-hf-path"),
        argument="out",
        default=NONE,
    )
    config_path: str | None = option(ignored="SRC has the config")
    max_shard_size: int | None = files("Cut shards at this size.", Size(), unset="5GB")
    hub: Hub = Hub()


class MergeOptions(ConversionOptions):
    """Settings of `ktconvert merge`. with_companions: whether --original-path is given."""

    input: str = option(
        "The directory with the _layer_N folders of .kt files.",
        PathOrHubId(absolute=True),
        flags=("-i", "--input-path"),
        default=NONE,
    )
    output: Path = option("Output directory.", OutputPath(absolute=True), flags=("-o", "--output"), default=NONE)
    original_path: Path | None = tuning(
        "The original checkpoint: its config, tokenizer and other companion files are copied.",
        FilePath(absolute=True),
        flags=("-r", "--original-path"),
    )
    with_companions: bool = recorded(Effect.FILES, "--original-path", default=False)
    max_tensors: int = files("Tensors per shard.", Number(min=1), default=3000)
    layers: str = files("Merge only these layers, e.g. 3-60,62; others may be missing.", Spelled("all"), default="all")
    verify_inputs: bool = tuning(AGAIN, default=False)


class ResplitOptions(ConversionOptions):
    """Settings of `ktconvert resplit`. Recorded are those of the conversion of OUTPUT that hold for NEW, too."""

    input: str = option("The output that is read.", PathOrHubId(absolute=True), argument="output", default=NONE)
    output: Path = option("The output that is made.", OutputPath(absolute=True), argument="new", default=NONE)
    threadpool_count: int = weights(
        "NUMA parts of the new output: the number of NUMA nodes that the server may use.", Number(min=1), default=NONE
    )
    against: str | None = option(
        "The checkpoint that OUTPUT was made from: say whether converting it again is better.",
        PathOrHubId(absolute=True),
    )
    revision: str | None = option("Branch, tag or commit, where --against is a hub id.")
    max_shard_size: int | None = files("Cut shards between experts, e.g. 5GB.", Size(), unset="one shard per layer")
    verify_inputs: bool = tuning(AGAIN, default=False)
    no_merge_safetensor: bool | None = recorded(Effect.WEIGHTS)
    layers: str | None = recorded(Effect.FILES)
    arch_row: str | None = recorded(Effect.FILES, "--arch-file")


class AsBefore(Execution):
    """What the rest of the work may take of this machine."""

    cpuinfer_threads: int | None = option("Threads.", Number(min=1), unset="as before")
    max_memory: int | None = option("Use fewer threads to stay below this limit, e.g. 4GiB.", Size(), unset="as before")


class ResumeOptions(Options):
    output: Path = option("The output that was begun.", OutputPath(absolute=True), argument="output", default=NONE)
    dry_run: bool = option("Print which units are finished, which are left, and why; write nothing.", default=False)
    verify_inputs: bool = option("Convert again what came from input files that were modified since.", default=False)
    allow_machine_change: bool = option(
        "Go on with a calibration that was begun with other threads, or another CPU, GPU or library version.",
        default=False,
    )
    execution: AsBefore = AsBefore()
    workers: Workers = Workers()
    leftovers: Leftovers = Leftovers()
    reporting: Reporting = Reporting()
