"""Options of the commands that convert no weights of models, and run no model: bench, doctor, experts and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.outputs import FORMATS
from ktconvert.native_quant import machine
from ktconvert.pipeline.options.declare import REQUIRED, Effect, Group, Option, Options, declare, option, record
from ktconvert.pipeline.options.option_groups import (
    ACTIVATIONS,
    AS_JSON,
    AUTO,
    CHECKPOINT,
    PLOT,
    PORT,
    THREADS,
    THREADS_ALIASES,
    ArchFile,
    Hub,
    ImportanceFile,
    Reporting,
    Workers,
    output_option,
)
from ktconvert.pipeline.options.types import (
    FilePath,
    Integer,
    OutputPath,
    PathOrHubId,
    Size,
    SizeList,
    Text,
    TokenCountList,
    WordChoice,
)

CONFIG = Option("Model that provides everything but the experts (for a GGUF).", PathOrHubId(absolute=True))
RUNTIMES = ("sglang", "ktconvert")
PREFERENCES = ("quality", "speed", "memory")
# Values of --quant-method of verify (options and names of formats) -> name of the format
FORMAT_BY_WORD = {word.lower(): fmt.name for fmt in reversed(FORMATS.values()) for word in (fmt.option, fmt.name)}


class BenchOptions(Options):
    output: Path = option("Output, or checkpoint.", OutputPath(absolute=True), argument="output", default=REQUIRED)
    layer: int | None = option("Layer to compute.", Integer(min=0), unset="the first")
    tokens: Any = option(
        "Numbers of tokens per forward, separated by commas.", TokenCountList(), default="1,4,16,64,256,1024"
    )
    threads: int | None = option(
        THREADS, Integer(min=1), unset="physical cores", group=Group.RESOURCES, aliases=THREADS_ALIASES
    )
    activations: str = declare(ACTIVATIONS, default=AUTO)
    as_json: bool = declare(AS_JSON, default=False)
    plot: Path | None = declare(PLOT)


class ConvertAdapterOptions(Options):
    adapter: Path = option("Adapter of kt-kernel.", FilePath(absolute=True), argument="adapter", default=REQUIRED)
    model: str = option(CHECKPOINT, PathOrHubId(absolute=True), default=REQUIRED)
    output: Path = output_option("out", help="Output directory; it must not exist.")
    hub: Hub = Hub()
    as_json: bool = declare(AS_JSON, default=False)


class DoctorOptions(Options):
    disk: Path = option(
        "Directory whose disk speed is measured with a temporary file of at most 256 MiB.",
        FilePath(directory=True),
        default=Path(),
    )
    as_json: bool = declare(AS_JSON, default=False)


class ExpertsOptions(Options):
    counts: Path = option(
        "Folder of `calibrate`, output with expert_counts.json, or recording of SGLang (.pt).",
        FilePath(),
        argument="counts",
        default=REQUIRED,
    )
    output: Path = option(
        "File to write.",
        OutputPath(),
        flags=("-o", "--output"),
        argument="out",
        default=REQUIRED,
        group=Group.OUTPUT,
    )
    format: str = option(
        "Form of the file: mask (.safetensors, for run and serve), sglang (.json), or sglang-kt (.pt).",
        click.Choice(["mask", "sglang", "sglang-kt"]),
        default="mask",
    )
    num_gpu_experts: int | None = option("Number of hot experts per layer (or use --total).", Integer(min=0))
    total: int | None = option(
        "Number of hot experts of all layers together, chosen as kt-kernel does.", Integer(min=0)
    )
    model: str | None = option(
        "Checkpoint (directory or hub id) for the printed command; it must have these experts.", PathOrHubId()
    )
    cpu_weights: Path | None = option(
        "Output of `cpu` for the printed command; it must have these experts.", FilePath(), unset="COUNTS"
    )
    as_json: bool = declare(AS_JSON, default=False)
    plot: Path | None = declare(PLOT)


class Target(Options):
    """The machine and the use that a prediction is for."""

    ram: int | None = option("Main memory of the server.", Size(), unset="this machine's")
    vram: Any = option("Memory of each GPU, such as 24GB,24GB; 0 for none.", SizeList(), unset="this machine's GPUs")
    gpu: str | None = option("Name of the GPU, instead of --vram, such as 4090 or 2x4090.", Text(), excludes="vram")
    numa: int | None = option("Number of NUMA nodes.", Integer(min=1), unset="this machine's")
    disk: int | None = option("Free disk space.", Size(), unset="free space where outputs go")
    context: int | None = option(
        "Number of tokens of a sequence, prompt and answer.", Integer(min=1), unset="32768, or the model's limit"
    )
    sequences: int = option("Number of sequences at a time.", Integer(min=1), default=1)
    bandwidth: int | None = option(
        "Bytes per second that all cores together read from memory, such as 400GB.", Size(), unset="measured here"
    )
    gpu_bandwidth: int | None = option(
        "Bytes per second that a GPU reads from its memory.", Size(), unset="that of a known GPU, else 800GB"
    )
    runtime: str | None = option(
        "Server: sglang, with ktconvert's runtime, or ktconvert.",
        click.Choice(RUNTIMES),
        unset="sglang with a GPU, else ktconvert",
    )
    prefer: str = option(
        "What to prefer among choices that fit: quality, speed, or memory.",
        click.Choice(PREFERENCES),
        default=PREFERENCES[0],
    )


class FitOptions(Options):
    model: str = option(
        "Checkpoint or GGUF, or a hub id or URL, of which only headers and config are read.",
        PathOrHubId(),
        argument="model",
        default=REQUIRED,
    )
    config: str | None = declare(CONFIG)
    target: Target = Target()
    explain: bool = option("Also print the parts of each choice's memory, and the limits.", default=False)
    hub: Hub = Hub()
    arch: ArchFile = ArchFile()
    as_json: bool = declare(AS_JSON, default=False)


class InspectOptions(Options):
    path: str = option(
        "Checkpoint (path, hub id or URL), output, or output of an unfinished conversion.",
        PathOrHubId(),
        argument="path",
        default=REQUIRED,
    )
    columns: bool = option("Also measure whether --equalize would help, on 8 experts per layer.", default=False)
    hub: Hub = Hub()
    arch: ArchFile = ArchFile()
    as_json: bool = declare(AS_JSON, default=False)


class ModelsOptions(Options):
    folders: tuple[Path, ...] = option(
        "Folders whose checkpoints, outputs and unfinished conversions are listed.",
        FilePath(directory=True),
        argument="folders",
        default=(),
        unset="the current directory",
    )
    check: str | None = option(
        "Checkpoint to compare with the hub: a hub id in the local cache, or a directory.", PathOrHubId()
    )
    against: str | None = option("Hub id to compare with, if --check names a directory.", Text())
    hub: Hub = Hub()
    repair: bool = option("With --check, download different and missing files again.", default=False)
    as_json: bool = declare(AS_JSON, default=False)


class StatusOptions(Options):
    output: Path = option(
        "Output of an unfinished conversion.", OutputPath(absolute=True), argument="output", default=REQUIRED
    )
    watch: bool = option("Refresh every two seconds until no process works on the output.", default=False)
    as_json: bool = option("Print one JSON object; with --watch, one per line.", flags=("--json",), default=False)


class UpOptions(Options):
    model: str = option(
        "Checkpoint or GGUF: directory, file, hub id or URL.",
        PathOrHubId(absolute=True),
        argument="model",
        default=REQUIRED,
    )
    config: str | None = declare(CONFIG)
    output: Path | None = option(
        "Directory for all files of the server.",
        OutputPath(absolute=True),
        flags=("-o", "--output"),
        unset="NAME-server in the current directory",
    )
    yes: bool = option("Start without asking.", flags=("-y", "--yes"), default=False)
    dry_run: bool = option("Print the plan; write nothing.", default=False)
    port: int = declare(PORT, default=8000)
    target: Target = Target()
    hub: Hub = Hub()
    arch: ArchFile = ArchFile()


class VerifyOptions(Options, command="verify"):
    """Options of `ktconvert verify`.

    arch_row  the text of --arch-file, for outputs whose manifest has none; workers need not see the file
    """

    output: Path = option(
        "Output of ktconvert or kt-kernel.",
        OutputPath(absolute=True),
        argument="output",
        default=REQUIRED,
        group=Group.INPUT,
    )
    against: str | None = option(
        "Source checkpoint (directory, file or hub id) or other output to compare with.",
        PathOrHubId(absolute=True),
        group=Group.CHECKS,
    )
    revision: str | None = option("Branch, tag or commit, if --against is a hub id.", group=Group.ADVANCED)
    numa: int | None = option("Required number of NUMA slices.", Integer(min=1), group=Group.CHECKS)
    quant_method: str | None = option(
        "Required format; kt-kernel does not notice a wrong one.", WordChoice(FORMAT_BY_WORD), group=Group.CHECKS
    )
    arch: ArchFile = ArchFile()
    full: bool = option(
        "Measure the error of every expert, not only of 8 per layer.", default=False, group=Group.CHECKS
    )
    load: bool = option(
        "Also load a GPU output with transformers; with --against SOURCE, compare predictions.",
        flags=("--load/--no-load",),
        default=True,
        group=Group.ADVANCED,
    )
    text: Path | None = option(
        "UTF-8 text file for comparing predictions.",
        FilePath(),
        unset="a built-in text of a few lines",
        group=Group.ADVANCED,
    )
    importance: ImportanceFile = ImportanceFile()
    adapter: Path | None = option(
        "Adapter that `merge-adapter` has added, if it was moved.", FilePath(absolute=True), group=Group.ADVANCED
    )
    report: Path | None = option("Also write the report as one HTML page.", OutputPath(), group=Group.REPORTING)
    run: bool = option(
        "Also compute a few random tokens through one layer, and compare with float.", default=False, group=Group.CHECKS
    )
    workers: Workers = Workers()
    threads: int | None = option(
        THREADS, Integer(min=1), unset="all usable CPUs", group=Group.RESOURCES, aliases=THREADS_ALIASES
    )
    reporting: Reporting = Reporting()
    arch_row: str | None = record(Effect.CALL, "--arch-file")

    @property
    def method(self) -> str | None:
        """The name of the required format."""
        return None if self.quant_method is None else FORMAT_BY_WORD[self.quant_method]

    @property
    def thread_count(self) -> int:
        """The number of threads, as for conversions."""
        return machine.limit_threads(self.threads)

    @property
    def page_statistics(self) -> Path | None:
        """The folder with counts for the HTML page."""
        return None if self.report is None else self.importance.statistics
