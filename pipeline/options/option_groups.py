"""Groups of options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import click

from ktconvert.layouts.errors import UsageError
from ktconvert.layouts.files.documents import Count
from ktconvert.native_quant import machine
from ktconvert.pipeline.options.declare import NONE, Effect, Options, PlannedOptions, option, recorded, tuning, weights
from ktconvert.pipeline.options.types import FilePath, Number, OutputPath, PathOrHubId, Real, Size, Spelled, Text
from ktconvert.pipeline.report.progress import Reporter


class Reporting(Options, title="Reporting"):
    json_events: bool = option("One JSON event per line on stdout.", flags=("--json",), default=False)
    quiet: bool = option("Warnings and errors only.", flags=("-q", "--quiet"), default=False)
    verbose: bool = option("Print more details.", flags=("-v", "--verbose"), default=False)

    @property
    def reporter(self) -> Reporter:
        return Reporter(json_events=self.json_events, verbosity=-1 if self.quiet else int(self.verbose))


class Execution(Options, title="Execution"):
    cpuinfer_threads: int | None = tuning(
        "Threads; more than this process has CPUs are lowered, with a note.",
        Number(min=1),
        unset="the CPUs this process may use",
    )
    max_memory: int | None = tuning(
        "Use fewer threads to stay below this limit, e.g. 4GiB.", Size(), unset="the free memory"
    )

    @property
    def threads(self) -> int:
        """How many threads; by default one for each CPU that this process may use."""
        return self.cpuinfer_threads or machine.allowed_cpus()


class Workers(Options, title="Execution"):
    executor: str = option(
        "Who makes the files: threads[:N] here, or Dask's workers on many hosts: dask:tcp://HOST:8786, "
        "dask:tls://HOST:8786, dask:FILE (of a scheduler), dask:local[:N].",
        Spelled("threads|dask(:(local|tcp|tls))?"),
        default="threads",
    )
    executor_timeout: int | None = option(
        "Seconds to wait for Dask's workers while there are none.", Number(min=1), unset="3600"
    )


class Leftovers(Options, title="What is there already"):
    force_unlock: bool = option(
        "Take away the lock that a process left when it ended on another host, on a file system without locks.",
        default=False,
    )
    trust_store: bool = option(
        "Go on from finished files of an earlier run without hashing them first: their sizes decide.", default=False
    )


class Existing(Leftovers):
    overwrite: bool = option("Replace the existing output, once the new one is complete.", default=False)
    delete_others: bool = tuning("With --overwrite: also delete what no manifest of ktconvert lists.", default=False)

    def require_consistent(self) -> None:
        """Raise UsageError for options that do not go together."""
        if self.delete_others and not self.overwrite:
            raise UsageError("--delete-others goes with --overwrite; add it, or leave it out.")


class OutputOptions(PlannedOptions):
    """Settings of every command that makes an output. part: as --part says, where a command has it."""

    input: str = recorded(Effect.CALL, default=NONE)
    output: Path = recorded(Effect.CALL, default=NONE)
    dry_run: bool = option("Print the plan and stop; read headers only, write nothing.", default=False)
    verify_inputs: bool = tuning("Hash all input files, and notice any change of them on resume.", default=False)
    part: str | None = recorded(Effect.TUNING)

    @property
    def execution(self) -> Execution:
        """Threads and memory."""
        raise NotImplementedError

    @property
    def existing(self) -> Existing:
        """Settings for an output that exists."""
        raise NotImplementedError

    @property
    def reporting(self) -> Reporting:
        """Settings of the output on the terminal."""
        raise NotImplementedError


class ConversionOptions(OutputOptions):
    """Settings of every conversion."""

    execution: Execution = Execution()
    workers: Workers = Workers()
    existing: Existing = Existing()
    reporting: Reporting = Reporting()


class Hub(Options):
    revision: str | None = tuning("Branch, tag or commit of a hub id.", Text(), unset="main")


class ArchFile(Options):
    arch_file: Path | None = tuning(
        "A row for an architecture that is not in the table (TOML).", FilePath(absolute=True)
    )

    def text(self) -> str | None:
        """What the file holds. Raises UsageError where it cannot be read."""
        if self.arch_file is None:
            return None
        try:
            return self.arch_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--arch-file {self.arch_file}: cannot be read ({error}).") from error


class ImportanceFile(Options):
    imatrix: Path | None = tuning(
        "For --scale imatrix: the model's importance matrix, of llama.cpp or `calibrate`, in GGUF or .dat.",
        FilePath(absolute=True),
    )
    statistics: Path | None = tuning(
        "Instead: a folder with imatrix.gguf, as `calibrate` writes it. For --scale mse: one of `calibrate "
        "--second-moments`.",
        FilePath(absolute=True),
    )

    @property
    def file(self) -> Path | None:
        """The file that one of them names. Raises UsageError for both."""
        from ktconvert.layouts.statistics.folder import IMATRIX

        if self.imatrix is not None and self.statistics is not None:
            raise UsageError("--imatrix and --statistics both name an importance matrix; give one of them.")
        return self.imatrix if self.statistics is None else self.statistics / IMATRIX


class Samples(Options, title="Calibration"):
    dataset: str = weights(
        "Calibration texts: a file or folder (.txt, .jsonl, .json, .parquet), or a hub id.",
        PathOrHubId(absolute=True),
        default="HuggingFaceH4/ultrachat_200k",
    )
    dataset_split: str = weights("Split of a hub's data set.", default="train_sft")
    num_calibration_samples: int = weights("Samples: the first rows of the split.", Number(min=1), default=512)
    max_sequence_length: int = weights("Tokens at which a sample is cut.", Number(min=2), default=2048)
    random_seed: int = weights("Seed for the order of samples.", Number(min=0), default=42)


class Gptq(Options, title="Calibration"):
    dampening_frac: float = weights(
        "The fraction of the mean of the Hessian's diagonal that is added to the diagonal.",
        Real(min=0, max=1),
        default=0.1,
    )
    calibrate: str = weights(
        "Every expert sees all tokens, or those routed to it; mixed: gate and up see all, down those routed.",
        click.Choice(["all", "routed", "mixed"], case_sensitive=False),
        default="all",
    )
    gptq_steps: str = weights(
        "GPTQ alone (plain); or errors weighted by routing weights, scales that are fitted again after GPTQ, and "
        "codes that go where the error is least (descent); or all that, where predictions feel it least (full).",
        click.Choice(["plain", "descent", "full"], case_sensitive=False),
        default="plain",
    )
    min_expert_tokens: int = weights(
        "Linears that fewer tokens reached are not compensated; their experts are listed. Unless --calibrate all.",
        Number(min=1),
        default=32,
    )
    save_statistics: Path | None = tuning(
        "Also write what `calibrate` writes, to this folder.", OutputPath(absolute=True)
    )
    with_statistics: bool | None = recorded(Effect.FILES, "--save-statistics")

    @property
    def saves_statistics(self) -> bool | None:
        """Whether --save-statistics is given, as it is recorded: None where it is not."""
        return None if self.save_statistics is None else True


class MachineProperties(TypedDict):
    """What every recorded machine tells; versions of packages besides."""

    threads: Count
    group_bytes: Count
    device_type: str
    device: str


class Machine(Options, title="Calibration"):
    """Where a model runs. machine: properties of the one where the conversion was begun that can change bytes."""

    trust_remote_code: bool = weights("Let transformers run Python code that comes with the model.", default=False)
    force_cpu: bool = tuning("Do not use a GPU.", default=False)
    max_gpu_memory: int | None = tuning("Use no more of the GPU's memory, e.g. 40GiB.", Size(), unset="the GPU's")
    allow_machine_change: bool = tuning(
        "Go on with a calibration that was begun with other threads, or another CPU, GPU or library version.",
        default=False,
    )
    machine: dict[str, int | str] | None = recorded(Effect.WEIGHTS, shape=MachineProperties)


class GpuExperts(Options):
    """Which experts come from MODEL and not from --cpu-weights."""

    gpu_experts_mask: Path | None = option(
        "Safetensors file with gpu_experts_mask, bool [decoder layers, experts]: which experts come from MODEL."
    )
    num_gpu_experts: int | None = option(
        "Instead of a mask: the first N experts of each layer come from MODEL.", Number(min=0)
    )
