"""Options of the commands that rewrite or measure what there is: calibrate, dequantize, merge, resplit, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ktconvert.pipeline.options.declare import Effect, Option, Options, Recorded
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


class CalibrateOptions(ConversionOptions, frozen=True, kw_only=True):
    """Settings of `ktconvert calibrate`. arch_row: the text of --arch-file."""

    input: Annotated[
        str,
        Option(
            "The checkpoint: a directory, a .safetensors file, or a hub id (org/name).",
            PathOrHubId(absolute=True),
            argument="model",
        ),
    ]
    output: Annotated[Path, Option("The folder for the files.", OutputPath(absolute=True), flags=("-o", "--output"))]
    second_moments: Annotated[
        bool,
        Option(
            "Also keep the sums of x xT, H x H for a layer and I x I for each expert, which `cpu --scale mse` searches "
            "with; the plan tells their size.",
            effect=Effect.WEIGHTS,
        ),
    ] = False
    arch_row: Annotated[str | None, Recorded(Effect.FILES, "--arch-file")] = None
    samples: Samples = Samples(num_calibration_samples=128)
    machine: Machine = Machine()
    hub: Hub = Hub()
    arch: ArchFile = ArchFile()


class DequantizeOptions(ConversionOptions, frozen=True, kw_only=True):
    """Settings of `ktconvert dequantize`."""

    input: Annotated[
        str,
        Option(
            "The checkpoint: a directory, a .safetensors file, or a hub id (org/name).",
            PathOrHubId(absolute=True),
            flags=("-i", "--input-path", "--model-dir", "--input-fp8-hf-path"),
            argument="src",
        ),
    ]
    output: Annotated[
        Path,
        Option(
            "Output directory.",
            OutputPath(absolute=True),
            flags=("-o", "--output", "--output-dir", "--output-bf16-hf-path"),
            argument="out",
        ),
    ]
    config_path: Annotated[str | None, Option(ignored="SRC has the config")] = None
    max_shard_size: Annotated[
        int | None, Option("Cut shards at this size.", Size(), effect=Effect.FILES, unset="5GB")
    ] = None
    hub: Hub = Hub()


class MergeOptions(ConversionOptions, frozen=True, kw_only=True):
    """Settings of `ktconvert merge`. with_companions: whether --original-path is given."""

    input: Annotated[
        str,
        Option(
            "The directory with the _layer_N folders of .kt files.",
            PathOrHubId(absolute=True),
            flags=("-i", "--input-path"),
        ),
    ]
    output: Annotated[Path, Option("Output directory.", OutputPath(absolute=True), flags=("-o", "--output"))]
    original_path: Annotated[
        Path | None,
        Option(
            "The original checkpoint: its config, tokenizer and other companion files are copied.",
            FilePath(absolute=True),
            flags=("-r", "--original-path"),
            effect=Effect.TUNING,
        ),
    ] = None
    with_companions: Annotated[bool, Recorded(Effect.FILES, "--original-path")] = False
    max_tensors: Annotated[int, Option("Tensors per shard.", Number(min=1), effect=Effect.FILES)] = 3000
    layers: Annotated[
        str,
        Option("Merge only these layers, e.g. 3-60,62; others may be missing.", Spelled("all"), effect=Effect.FILES),
    ] = "all"
    verify_inputs: Annotated[bool, Option(AGAIN, effect=Effect.TUNING)] = False


class ResplitOptions(ConversionOptions, frozen=True, kw_only=True):
    """Settings of `ktconvert resplit`. Recorded are those of the conversion of OUTPUT that hold for NEW, too."""

    input: Annotated[str, Option("The output that is read.", PathOrHubId(absolute=True), argument="output")]
    output: Annotated[Path, Option("The output that is made.", OutputPath(absolute=True), argument="new")]
    threadpool_count: Annotated[
        int,
        Option(
            "NUMA parts of the new output: the number of NUMA nodes that the server may use.",
            Number(min=1),
            effect=Effect.WEIGHTS,
        ),
    ]
    against: Annotated[
        str | None,
        Option(
            "The checkpoint that OUTPUT was made from: say whether converting it again is better.",
            PathOrHubId(absolute=True),
        ),
    ] = None
    revision: Annotated[str | None, Option("Branch, tag or commit, where --against is a hub id.")] = None
    max_shard_size: Annotated[
        int | None,
        Option("Cut shards between experts, e.g. 5GB.", Size(), effect=Effect.FILES, unset="one shard per layer"),
    ] = None
    verify_inputs: Annotated[bool, Option(AGAIN, effect=Effect.TUNING)] = False
    no_merge_safetensor: Annotated[bool | None, Recorded(Effect.WEIGHTS)] = None
    layers: Annotated[str | None, Recorded(Effect.FILES)] = None
    arch_row: Annotated[str | None, Recorded(Effect.FILES, "--arch-file")] = None


class AsBefore(Execution, frozen=True, kw_only=True):
    """What the rest of the work may take of this machine."""

    cpuinfer_threads: Annotated[int | None, Option("Threads.", Number(min=1), unset="as before")] = None
    max_memory: Annotated[
        int | None, Option("Use fewer threads to stay below this limit, e.g. 4GiB.", Size(), unset="as before")
    ] = None


class ResumeOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert resume`."""

    output: Annotated[Path, Option("The output that was begun.", OutputPath(absolute=True), argument="output")]
    dry_run: Annotated[bool, Option("Print which units are finished, which are left, and why; write nothing.")] = False
    verify_inputs: Annotated[bool, Option("Convert again what came from input files that were modified since.")] = False
    allow_machine_change: Annotated[
        bool,
        Option("Go on with a calibration that was begun with other threads, or another CPU, GPU or library version."),
    ] = False
    execution: AsBefore = AsBefore()
    workers: Workers = Workers()
    leftovers: Leftovers = Leftovers()
    reporting: Reporting = Reporting()
