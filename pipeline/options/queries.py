"""Options of bench, doctor, eval, experts, inspect, run, serve, status and verify: commands that convert nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from ktconvert.layouts.outputs import FORMATS
from ktconvert.pipeline.options.declare import Option, Options
from ktconvert.pipeline.options.option_groups import ArchFile, GpuExperts, Hub, ImportanceFile, Reporting, Workers
from ktconvert.pipeline.options.quantization import choice
from ktconvert.pipeline.options.types import Directory, FilePath, Number, OutputPath, PathOrHubId, Real

# What --quant-method of verify takes, options and names -> the name of what is stored.
METHODS = {word.lower(): fmt.name for fmt in reversed(FORMATS.values()) for word in (fmt.option, fmt.name)}

MODEL = Option("A directory or a hub id (org/name).", PathOrHubId(), argument="model")
JSON = Option("Print one JSON object.", flags=("--json",))
PLOT = Option("Also draw it, into FILE.png, .svg or .pdf.", OutputPath())
THREADS = Option("Threads of the experts and of torch.", Number(min=1), unset="physical cores")
EXACT = Option("Round as kt-kernel does, bit for bit.")
TRUST = Option("Let transformers run Python code that comes with MODEL.")
CPU_WEIGHTS = Option(
    "What MODEL was converted into, or a checkpoint of it: the experts are computed from it.", FilePath(), unset="MODEL"
)


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


class BenchOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert bench`."""

    output: Annotated[Path, Option("An output, or a checkpoint.", FilePath(absolute=True), argument="output")]
    layer: Annotated[int | None, Option("Layer to compute.", Number(min=0), unset="the first")] = None
    tokens: Annotated[Any, Option("Tokens per forward, several separated by commas.", Counts())] = "1,4,16,64,256,1024"
    threads: Annotated[
        int | None, Option("Threads that compute, and that read memory.", Number(min=1), unset="physical cores")
    ] = None
    as_json: Annotated[bool, JSON] = False
    plot: Annotated[Path | None, PLOT] = None


class DoctorOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert doctor`."""

    disk: Annotated[
        Path, Option("Directory whose disk is measured: at most 256 MiB are written and removed.", Directory())
    ] = Path()
    as_json: Annotated[bool, JSON] = False


class VersionOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert version`."""

    as_json: Annotated[bool, JSON] = False


class EvalOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert eval`."""

    model: Annotated[str, MODEL]
    cpu_weights: Annotated[
        Path | None,
        Option("What MODEL was converted into for the CPU, or a checkpoint of it; this or --gpu-weights.", FilePath()),
    ] = None
    gpu_weights: Annotated[Path | None, Option("What MODEL was converted into for the GPU.", FilePath())] = None
    text: Annotated[Path, Option("What both models read: a UTF-8 text file.", FilePath())]
    window: Annotated[int, Option("Tokens read at a time.", Number(min=2))] = 512
    skip_windows: Annotated[int, Option("Skip this many windows at the beginning.", Number(min=0))] = 0
    max_windows: Annotated[int | None, Option("Then read at most this many windows.", Number(min=1), unset="all")] = (
        None
    )
    threads: Annotated[int | None, THREADS] = None
    exact: Annotated[bool, EXACT] = False
    hub: Hub = Hub()
    trust_remote_code: Annotated[bool, TRUST] = False
    as_json: Annotated[bool, JSON] = False
    plot: Annotated[Path | None, PLOT] = None


class ExpertsOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert experts`."""

    dir: Annotated[Path, Option("What `calibrate` wrote.", FilePath(), argument="dir")]
    output: Annotated[
        Path, Option("Safetensors file for --gpu-experts-mask; an older one of ours is replaced.", OutputPath())
    ]
    num_gpu_experts: Annotated[int | None, Option("Experts of each layer; this or --total.", Number(min=0))] = None
    total: Annotated[
        int | None, Option("Instead: experts of all layers together, as kt-kernel chooses.", Number(min=0))
    ] = None
    as_json: Annotated[bool, JSON] = False
    plot: Annotated[Path | None, PLOT] = None


class InspectOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert inspect`."""

    path: Annotated[str, Option("A checkpoint, an output, or one that was begun.", PathOrHubId(), argument="path")]
    columns: Annotated[
        bool,
        Option(
            "Of a checkpoint: also how much the columns of down_proj differ, by reading 8 experts of each layer; more "
            "than 0.5 is what --equalize is for."
        ),
    ] = False
    hub: Hub = Hub()
    arch: ArchFile = ArchFile()
    as_json: Annotated[bool, JSON] = False


class RunOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert run`."""

    model: Annotated[str, MODEL]
    cpu_weights: Annotated[Path | None, CPU_WEIGHTS] = None
    torch_experts: Annotated[bool, Option("Leave the experts to transformers, for comparison.")] = False
    gpu_experts: GpuExperts = GpuExperts()
    prompt: Annotated[str | None, Option("The text to continue, as it stands; this or --chat.")] = None
    chat: Annotated[bool, Option("Talk with the model, line by line; Ctrl-D ends.")] = False
    max_new_tokens: Annotated[int, Option("The largest number of tokens per answer.", Number(min=1))] = 256
    temperature: Annotated[float, Option("0: always the likeliest token; above: chosen by chance.", Real(min=0))] = 0.0
    threads: Annotated[int | None, THREADS] = None
    exact: Annotated[bool, EXACT] = False
    hub: Hub = Hub()
    trust_remote_code: Annotated[bool, TRUST] = False


class ServeOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert serve`."""

    model: Annotated[str, MODEL]
    cpu_weights: Annotated[Path | None, CPU_WEIGHTS] = None
    gpu_experts: GpuExperts = GpuExperts()
    host: Annotated[str, Option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on.", Number(1, 65535))] = 8000
    model_name: Annotated[str | None, Option("What clients call the model.", unset="MODEL")] = None
    api_key_file: Annotated[
        Path | None,
        Option("A file with the key that clients have to send.", FilePath(), unset="KTCONVERT_API_KEY, else none"),
    ] = None
    threads: Annotated[int | None, THREADS] = None
    exact: Annotated[bool, EXACT] = False
    trust_remote_code: Annotated[bool, TRUST] = False


class StatusOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert status`."""

    output: Annotated[Path, Option("The output that was begun.", FilePath(absolute=True), argument="output")]
    watch: Annotated[bool, Option("Look again every two seconds, until nothing works on it any more.")] = False
    as_json: Annotated[bool, Option("Print a JSON object; with --watch, one per line.", flags=("--json",))] = False


class VerifyOptions(Options, frozen=True, kw_only=True):
    """Settings of `ktconvert verify`."""

    output: Annotated[Path, Option("An output, ours or kt-kernel's.", FilePath(absolute=True), argument="output")]
    against: Annotated[
        str | None,
        Option("The source (directory, file or hub id), or another output.", PathOrHubId(absolute=True)),
    ] = None
    revision: Annotated[str | None, Option("Branch, tag or commit, where --against is a hub id.")] = None
    numa: Annotated[int | None, Option("The NUMA parts that it must have; without it, any.", Number(min=1))] = None
    quant_method: Annotated[
        str | None, Option("The method that it must have: kt-kernel does not notice a wrong one.", choice(METHODS))
    ] = None
    arch: ArchFile = ArchFile()
    full: Annotated[bool, Option("Measure the error of every expert, not of 8 per layer.")] = False
    load: Annotated[
        bool,
        Option(
            "Of an output for the GPU: whether transformers may load it (names; with --against SOURCE, predictions).",
            flags=("--load/--no-load",),
        ),
    ] = True
    text: Annotated[
        Path | None,
        Option("What source and output then read: a UTF-8 text file.", FilePath(), unset="a few lines of our own"),
    ] = None
    importance: ImportanceFile = ImportanceFile()
    report: Annotated[
        Path | None,
        Option(
            "Also write it as one HTML page, FILE.html: maps of errors, worst rows, scales, and with --statistics the "
            "use of experts. An older page is replaced.",
            OutputPath(),
        ),
    ] = None
    run: Annotated[bool, Option("Also compute: a few random tokens through one layer, against float.")] = False
    workers: Workers = Workers()
    cpuinfer_threads: Annotated[
        int | None,
        Option(
            "Threads; more than this process has CPUs are lowered, with a note.",
            Number(min=1),
            unset="the CPUs this process may use",
        ),
    ] = None
    reporting: Reporting = Reporting()
