"""Options of bench, doctor, eval, experts, inspect, run, serve, status and verify: commands that convert nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.outputs import FORMATS
from ktconvert.native_quant import machine
from ktconvert.pipeline.options.declare import NONE, Effect, Option, Options, declared, option, recorded
from ktconvert.pipeline.options.option_groups import ArchFile, GpuExperts, Hub, ImportanceFile, Reporting, Workers
from ktconvert.pipeline.options.quantization import choice
from ktconvert.pipeline.options.types import FilePath, NamedPath, Number, OutputPath, PathOrHubId, Real

# What --quant-method of verify takes, options and names -> the name of what is stored.
METHODS = {word.lower(): fmt.name for fmt in reversed(FORMATS.values()) for word in (fmt.option, fmt.name)}

JSON = Option("Print one JSON object.", flags=("--json",))
PLOT = Option("Also draw it, into FILE.png, .svg or .pdf.", OutputPath())
ADAPTER = Option("A LoRA adapter of MODEL, as `train` or PEFT writes it.", FilePath())


class ModelOptions(Options):
    """What `run`, `serve` and `eval` have in common."""

    model: str = option("A directory or a hub id (org/name).", PathOrHubId(), argument="model", default=NONE)
    cpu_weights: Path | None = option(
        "What MODEL was converted into, or a checkpoint of it: the experts are computed from it.",
        FilePath(),
        unset="MODEL",
    )
    threads: int | None = option("Threads of the experts and of torch.", Number(min=1), unset="physical cores")
    exact: bool = option("Round as kt-kernel does, bit for bit.", default=False)
    trust_remote_code: bool = option("Let transformers run Python code that comes with MODEL.", default=False)


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """Numbers of tokens: 1,4,16."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Each at least 1, in the user's order, without duplicates."""
        try:
            counts = tuple(dict.fromkeys(int(text) for text in str(value).split(",")))
        except ValueError:
            counts = ()
        if not counts or not 1 <= min(counts) <= max(counts) <= 1 << 20:
            self.fail(f"{value!r} is not a list of numbers of tokens like 1,16,256", param, ctx)
        return counts


class BenchOptions(Options):
    output: Path = option("An output, or a checkpoint.", FilePath(absolute=True), argument="output", default=NONE)
    layer: int | None = option("Layer to compute.", Number(min=0), unset="the first")
    tokens: Any = option("Tokens per forward, several separated by commas.", Counts(), default="1,4,16,64,256,1024")
    threads: int | None = option("Threads that compute, and that read memory.", Number(min=1), unset="physical cores")
    as_json: bool = declared(JSON, default=False)
    plot: Path | None = declared(PLOT)


class DoctorOptions(Options):
    disk: Path = option(
        "Directory whose disk is measured: at most 256 MiB are written and removed.",
        FilePath(directory=True),
        default=Path(),
    )
    as_json: bool = declared(JSON, default=False)


class EvalOptions(ModelOptions):
    cpu_weights: Path | None = option(
        "What MODEL was converted into for the CPU, or a checkpoint of it; this or --gpu-weights.", FilePath()
    )
    gpu_weights: Path | None = option("What MODEL was converted into for the GPU.", FilePath())
    adapter: Path | None = declared(ADAPTER)
    text: Path = option("What both models read: a UTF-8 text file.", FilePath(), default=NONE)
    window: int = option("Tokens read at a time.", Number(min=2), default=512)
    skip_windows: int = option("Skip this many windows at the beginning.", Number(min=0), default=0)
    max_windows: int | None = option("Then read at most this many windows.", Number(min=1), unset="all")
    hub: Hub = Hub()
    as_json: bool = declared(JSON, default=False)
    plot: Path | None = declared(PLOT)


class ExpertsOptions(Options):
    dir: Path = option("What `calibrate` wrote.", FilePath(), argument="dir", default=NONE)
    output: Path = option(
        "Safetensors file for --gpu-experts-mask; an older one of ours is replaced.", OutputPath(), default=NONE
    )
    num_gpu_experts: int | None = option("Experts of each layer; this or --total.", Number(min=0))
    total: int | None = option("Instead: experts of all layers together, as kt-kernel chooses.", Number(min=0))
    as_json: bool = declared(JSON, default=False)
    plot: Path | None = declared(PLOT)


class InspectOptions(Options):
    path: str = option("A checkpoint, an output, or one that was begun.", PathOrHubId(), argument="path", default=NONE)
    columns: bool = option(
        "Of a checkpoint: also how much the columns of down_proj differ, by reading 8 experts of each layer; more "
        "than 0.5 is what --equalize is for.",
        default=False,
    )
    hub: Hub = Hub()
    arch: ArchFile = ArchFile()
    as_json: bool = declared(JSON, default=False)


class RunOptions(ModelOptions):
    torch_experts: bool = option("Leave the experts to transformers, for comparison.", default=False)
    gpu_experts: GpuExperts = GpuExperts()
    adapter: Path | None = declared(ADAPTER)
    prompt: str | None = option("The text to continue, as it stands; this or --chat.")
    chat: bool = option("Talk with the model, line by line; Ctrl-D ends.", default=False)
    max_new_tokens: int = option("The largest number of tokens per answer.", Number(min=1), default=256)
    temperature: float = option("0: always the likeliest token; above: chosen by chance.", Real(min=0), default=0.0)
    hub: Hub = Hub()


class ServeOptions(ModelOptions):
    gpu_experts: GpuExperts = GpuExperts()
    adapters: tuple[tuple[str, Path], ...] = option(
        "ADAPTER or NAME=ADAPTER: a LoRA adapter of MODEL, which answers under this name, else under its folder's; may "
        "be repeated.",
        NamedPath(),
        flags=("--adapter",),
        default=(),
    )
    host: str = option("Address to listen on.", default="127.0.0.1")
    port: int = option("Port to listen on.", Number(1, 65535), default=8000)
    model_name: str | None = option("What clients call the model.", unset="MODEL")
    api_key_file: Path | None = option(
        "A file with the key that clients have to send.", FilePath(), unset="KTCONVERT_API_KEY, else none"
    )


class StatusOptions(Options):
    output: Path = option("The output that was begun.", FilePath(absolute=True), argument="output", default=NONE)
    watch: bool = option("Look again every two seconds, until nothing works on it any more.", default=False)
    as_json: bool = option("Print a JSON object; with --watch, one per line.", flags=("--json",), default=False)


class VerifyOptions(Options):
    """arch_row: the text of --arch-file, which workers need not see, for an output whose manifest has none."""

    output: Path = option("An output, ours or kt-kernel's.", FilePath(absolute=True), argument="output", default=NONE)
    against: str | None = option(
        "The source (directory, file or hub id), or another output.", PathOrHubId(absolute=True)
    )
    revision: str | None = option("Branch, tag or commit, where --against is a hub id.")
    numa: int | None = option("The NUMA parts that it must have; without it, any.", Number(min=1))
    quant_method: str | None = option(
        "The method that it must have: kt-kernel does not notice a wrong one.", choice(METHODS)
    )
    arch: ArchFile = ArchFile()
    full: bool = option("Measure the error of every expert, not of 8 per layer.", default=False)
    load: bool = option(
        "Of an output for the GPU: whether transformers may load it (names; with --against SOURCE, predictions).",
        flags=("--load/--no-load",),
        default=True,
    )
    text: Path | None = option(
        "What source and output then read: a UTF-8 text file.", FilePath(), unset="a few lines of our own"
    )
    importance: ImportanceFile = ImportanceFile()
    report: Path | None = option(
        "Also write it as one HTML page, FILE.html: maps of errors, worst rows, scales, and with --statistics the "
        "use of experts. An older page is replaced.",
        OutputPath(),
    )
    run: bool = option("Also compute: a few random tokens through one layer, against float.", default=False)
    workers: Workers = Workers()
    cpuinfer_threads: int | None = option(
        "Threads; more than this process has CPUs are lowered, with a note.",
        Number(min=1),
        unset="the CPUs this process may use",
    )
    reporting: Reporting = Reporting()
    arch_row: str | None = recorded(Effect.CALL, "--arch-file")

    @property
    def method(self) -> str | None:
        """The name of what must be stored."""
        return None if self.quant_method is None else METHODS[self.quant_method]

    @property
    def threads(self) -> int:
        return self.cpuinfer_threads or machine.allowed_cpus()

    @property
    def page_statistics(self) -> Path | None:
        """A folder with counts, for the page. Raises UsageError for --imatrix besides."""
        return None if self.importance.file is None or self.report is None else self.importance.statistics
