"""Groups of options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from ktconvert.layouts.errors import InputError, UsageError, absent_path
from ktconvert.layouts.files.documents import Count
from ktconvert.layouts.files.facts import MachineFacts
from ktconvert.native_quant import machine
from ktconvert.pipeline.options.declare import (
    REQUIRED,
    Effect,
    Group,
    Option,
    Options,
    PlannedOptions,
    option,
    record,
    tuning_option,
    weights_option,
)
from ktconvert.pipeline.options.types import (
    FilePath,
    FiniteFloat,
    Integer,
    KeywordText,
    OutputPath,
    PathOrHubId,
    Size,
    Text,
)
from ktconvert.pipeline.report.progress import Reporter

ALLOW_MACHINE_CHANGE = "Continue a calibration on a different CPU, GPU, library version or number of threads."
AS_JSON = Option("Print one JSON object.", flags=("--json",), group=Group.REPORTING)
CHECKPOINT = "Checkpoint: directory, .safetensors file, or hub id (org/name)."
DATASET = "file, folder or hub id"
MODEL = "Directory or hub id (org/name)."
PLOT = Option("Also draw the results into FILE.png, .svg or .pdf.", OutputPath(), group=Group.REPORTING)
PORT = Option("Port to listen on.", Integer(1, 65535))
THREADS = "Number of threads."
AUTO, BF16, INT8 = "auto", "bf16", "int8"
ACTIVATIONS = Option(
    "Activations for GGUF, MXFP4, grouped INT4: bf16, int8 (faster, error 1 %), auto (Q4_0, Q4_K: int8).",
    click.Choice([AUTO, BF16, INT8]),
    group=Group.EXPERTS,
)
THREADS_ALIASES = ("--cpuinfer-threads",)
TRUST_REMOTE_CODE = "Let transformers run Python code that comes with the model."


def input_option(argument: str, *aliases: str, help: str = CHECKPOINT) -> Any:
    """Return the field of a command's input."""
    return option(
        help,
        PathOrHubId(absolute=True),
        flags=("-i", "--input"),
        aliases=aliases,
        argument=argument,
        default=REQUIRED,
        group=Group.INPUT,
    )


def output_option(argument: str, *aliases: str, help: str = "Output directory.") -> Any:
    """Return the field of a command's output."""
    return option(
        help,
        OutputPath(absolute=True),
        flags=("-o", "--output"),
        aliases=aliases,
        argument=argument,
        default=REQUIRED,
        group=Group.OUTPUT,
    )


class Reporting(Options):
    json_events: bool = option(
        "Print one JSON event per line on stdout.", flags=("--json",), default=False, group=Group.REPORTING
    )
    quiet: bool = option(
        "Print only warnings and errors.", flags=("-q", "--quiet"), default=False, group=Group.REPORTING
    )
    verbose: bool = option(
        "Print all notes, and more details.",
        flags=("-v", "--verbose"),
        default=False,
        excludes="quiet",
        group=Group.REPORTING,
    )

    @property
    def reporter(self) -> Reporter:
        return Reporter(json_events=self.json_events, verbosity=-1 if self.quiet else int(self.verbose))


class Execution(Options):
    threads: int | None = tuning_option(
        THREADS, Integer(min=1), unset="all usable CPUs", group=Group.RESOURCES, aliases=THREADS_ALIASES
    )
    max_memory: int | None = tuning_option(
        "Use fewer threads to stay below this limit, e.g. 4GiB.", Size(), unset="the free memory", group=Group.RESOURCES
    )

    @property
    def thread_count(self) -> int:
        """The number of threads, at most and by default one for each CPU that this process may use."""
        return machine.limit_threads(self.threads)


class Workers(Options):
    executor: str = option(
        "Backend that runs the work: threads[:N], dask:local[:N], or dask:ADDRESS for many hosts.",
        KeywordText("threads|dask(:(local|tcp|tls))?"),
        default="threads",
        group=Group.MACHINES,
    )
    executor_timeout: int | None = option(
        "Number of seconds to wait for Dask workers while there are none.",
        Integer(min=1),
        unset="3600",
        group=Group.MACHINES,
    )


class EarlierRun(Options):
    """Options for the lock and the finished files of an earlier run."""

    force_unlock: bool = option("Remove a stale lock left by another host.", default=False, group=Group.ADVANCED)
    trust_store: bool = option(
        "Reuse finished files of an earlier run if their sizes match, without hashing them.",
        default=False,
        group=Group.ADVANCED,
    )


class ExistingOutput(EarlierRun):
    overwrite: bool = option("Replace an existing output at the end.", default=False, group=Group.OUTPUT)
    delete_others: bool = tuning_option(
        "With --overwrite, also delete files that no manifest of ktconvert lists.", default=False, group=Group.ADVANCED
    )

    def require_consistent(self) -> None:
        """Raise UsageError for options that contradict each other."""
        if self.delete_others and not self.overwrite:
            raise UsageError("--delete-others needs --overwrite; add it, or leave out --delete-others.")


SHARD_LIMITS = ("max_shard_size", "max_tensors")  # options that cut an output into smaller files


class OutputOptions(PlannedOptions):
    """Settings of every command that makes an output.

    part  the job share of --part, if the command has that option
    """

    input: str = record(Effect.CALL, default=REQUIRED)
    output: Path = record(Effect.CALL, default=REQUIRED)
    dry_run: bool = option("Print the plan; write nothing.", default=False, group=Group.OUTPUT)
    verify_inputs: bool = tuning_option(
        "Hash all input files, and detect changed ones on resume.", default=False, group=Group.ADVANCED
    )
    part: str | None = record(Effect.TUNING)

    @property
    def shard_limit_flag(self) -> str | None:
        """The option that limits the size of shards, if the command has one that applies."""
        return next((self.find_flag(name) for name in SHARD_LIMITS if name in self.settings), None)

    @property
    def execution(self) -> Execution:
        """The settings for threads and memory."""
        raise NotImplementedError

    @property
    def existing(self) -> ExistingOutput:
        """The settings for an output that exists."""
        raise NotImplementedError

    @property
    def reporting(self) -> Reporting:
        """The settings for the output on the terminal."""
        raise NotImplementedError


class ConversionOptions(OutputOptions):
    """Settings of every conversion."""

    execution: Execution = Execution()
    workers: Workers = Workers()
    existing: ExistingOutput = ExistingOutput()
    reporting: Reporting = Reporting()


class Hub(Options):
    revision: str | None = tuning_option(
        "Branch, tag or commit of a hub id.", Text(), unset="main", group=Group.ADVANCED
    )


class Streaming(Options):
    stream: bool = tuning_option(
        "Fetch the weights of a hub id or a URL while they are needed.", default=False, group=Group.INPUT
    )
    stream_ahead: int = tuning_option(
        "Number of files that --stream fetches ahead; 0: fetch only parts of files.",
        Integer(min=0),
        default=3,
        group=Group.ADVANCED,
    )


class ArchFile(Options):
    arch_file: Path | None = tuning_option(
        "TOML file that describes an architecture missing from the built-in table.",
        FilePath(absolute=True),
        group=Group.ADVANCED,
    )

    def load_text(self) -> str | None:
        """Return the content of the file, None without one.

        Raises InputError if it cannot be read or describes no architecture.
        """
        from ktconvert.layouts.checkpoints.arch_file import parse_arch

        if self.arch_file is None:
            return None
        try:
            text = self.arch_file.read_text()
            parse_arch(text)
        except InputError as error:
            raise error.with_path(f"--arch-file {self.arch_file}") from None
        except FileNotFoundError:
            raise absent_path(self.arch_file) from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InputError(f"--arch-file {self.arch_file}: cannot be read ({reason})", "give a TOML file") from error
        return text


class ImportanceFile(Options):
    imatrix: Path | None = tuning_option(
        "Importance matrix (.gguf or .dat) for --scale imatrix.",
        FilePath(absolute=True),
        group=Group.QUANTIZATION,
    )
    statistics: Path | None = tuning_option(
        "Folder of `calibrate`, for --scale imatrix or mse (not with --imatrix).",
        FilePath(absolute=True, directory=True),
        excludes="imatrix",
        group=Group.QUANTIZATION,
    )

    @property
    def file(self) -> Path | None:
        """The file that one of the options names."""
        from ktconvert.layouts.statistics.folder import IMATRIX

        return self.imatrix if self.statistics is None else self.statistics / IMATRIX


class Samples(Options):
    dataset: str = weights_option(
        f"Calibration texts: {DATASET}.",
        PathOrHubId(absolute=True),
        default="HuggingFaceH4/ultrachat_200k",
        group=Group.CALIBRATION,
        aliases=("--text",),
    )
    dataset_split: str = weights_option(
        "Split of a data set from the hub.", default="train_sft", group=Group.CALIBRATION_DETAILS
    )
    num_calibration_samples: int = weights_option(
        "Number of samples.", Integer(min=1), default=512, group=Group.CALIBRATION
    )
    sequence_length: int = weights_option(
        "Number of tokens at which a sample is cut.",
        Integer(min=2),
        default=2048,
        group=Group.CALIBRATION_DETAILS,
        aliases=("--max-sequence-length",),
    )
    seed: int = weights_option(
        "Seed for the order of samples.",
        Integer(min=0),
        default=42,
        group=Group.CALIBRATION_DETAILS,
        aliases=("--random-seed",),
    )


class Gptq(Options):
    dampening_frac: float = weights_option(
        "Dampening of the Hessian's diagonal, as a fraction of its mean.",
        FiniteFloat(min=0, max=1),
        default=0.1,
        group=Group.CALIBRATION_DETAILS,
    )
    calibrate: str = weights_option(
        "Tokens that calibrate an expert: all, those routed to it, or mixed (down: routed; others: all).",
        click.Choice(["all", "routed", "mixed"], case_sensitive=False),
        default="all",
        group=Group.CALIBRATION_DETAILS,
    )
    gptq_steps: str = weights_option(
        "GPTQ only (plain), then coordinate descent (descent), weighted by Fisher information (full).",
        click.Choice(["plain", "descent", "full"], case_sensitive=False),
        default="plain",
        group=Group.CALIBRATION_DETAILS,
    )
    min_expert_tokens: int = weights_option(
        "Minimum number of tokens for GPTQ of a linear (not with --calibrate all).",
        Integer(min=1),
        default=32,
        group=Group.CALIBRATION_DETAILS,
    )
    save_statistics: Path | None = tuning_option(
        "Also write the files of `calibrate` into this folder.",
        OutputPath(absolute=True),
        group=Group.CALIBRATION_DETAILS,
    )
    with_statistics: bool | None = record(Effect.FILES, "--save-statistics")

    @property
    def saves_statistics(self) -> bool | None:
        """True with --save-statistics, None without, which is not recorded."""
        return None if self.save_statistics is None else True


class RecordedMachine(MachineFacts):
    """The machine on which a calibration run was begun.

    group_bytes  memory for experts that are held together
    """

    group_bytes: Count
    device_type: str


class Hardware(Options):
    """Options for the machine that runs a model.

    machine  the properties of the first run's machine that can change bytes
    """

    trust_remote_code: bool = weights_option(TRUST_REMOTE_CODE, default=False, group=Group.CALIBRATION_DETAILS)
    force_cpu: bool = tuning_option("Do not use a GPU.", default=False, group=Group.CALIBRATION_DETAILS)
    max_gpu_memory: int | None = tuning_option(
        "Limit of the GPU memory to use, e.g. 40GiB.", Size(), unset="the GPU's memory", group=Group.CALIBRATION_DETAILS
    )
    allow_machine_change: bool = tuning_option(ALLOW_MACHINE_CHANGE, default=False, group=Group.CALIBRATION_DETAILS)
    machine: dict[str, int | str] | None = record(Effect.WEIGHTS, shape=RecordedMachine)

    @property
    def first_machine(self) -> RecordedMachine:
        """The recorded machine; the options of a calibration run have one before its plan is built."""
        assert self.machine is not None
        return cast("RecordedMachine", self.machine)

    @property
    def on_gpu(self) -> bool:
        """Return whether a GPU computes a calibration run."""
        return self.first_machine["device_type"] != "cpu"


class GpuExperts(Options):
    """The hot experts: those that come from MODEL and not from --cpu-weights."""

    gpu_experts_mask: Path | None = option(
        "Safetensors file that selects the experts computed from MODEL.", group=Group.EXPERTS
    )
    num_gpu_experts: int | None = option(
        "Number of experts per layer computed from MODEL (instead of a mask).", Integer(min=0), group=Group.EXPERTS
    )
