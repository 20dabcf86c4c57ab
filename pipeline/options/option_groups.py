"""Groups of options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

import click

from ktconvert.layouts.errors import UsageError
from ktconvert.layouts.files.documents import Count
from ktconvert.native_quant import machine
from ktconvert.pipeline.options.declare import Effect, Option, Options, Recorded, hashable, values_of
from ktconvert.pipeline.options.types import FilePath, Number, OutputPath, PathOrHubId, Real, Size, Spelled, Text
from ktconvert.pipeline.ui.progress import Reporter


class Reporting(Options, frozen=True, kw_only=True):
    """What is reported, and how."""

    TITLE: ClassVar[str] = "Reporting"

    json_events: Annotated[bool, Option("One JSON event per line on stdout.", flags=("--json",))] = False
    quiet: Annotated[bool, Option("Warnings and errors only.", flags=("-q", "--quiet"))] = False
    verbose: Annotated[bool, Option("Print more details.", flags=("-v", "--verbose"))] = False

    @property
    def reporter(self) -> Reporter:
        """The reporter that these flags ask for."""
        return Reporter(json_events=self.json_events, verbosity=-1 if self.quiet else int(self.verbose))


class Execution(Options, frozen=True, kw_only=True):
    """What the work may take of this machine."""

    TITLE: ClassVar[str] = "Execution"

    cpuinfer_threads: Annotated[
        int | None,
        Option(
            "Threads; more than this process has CPUs are lowered, with a note.",
            Number(min=1),
            effect=Effect.TUNING,
            unset="the CPUs this process may use",
        ),
    ] = None
    max_memory: Annotated[
        int | None,
        Option(
            "Use fewer threads to stay below this limit, e.g. 4GiB.",
            Size(),
            effect=Effect.TUNING,
            unset="the free memory",
        ),
    ] = None

    @property
    def threads(self) -> int:
        """How many threads; by default one for each CPU that this process may use."""
        return self.cpuinfer_threads or machine.allowed_cpus()


class Workers(Options, frozen=True, kw_only=True):
    """Who does the work."""

    TITLE: ClassVar[str] = "Execution"

    executor: Annotated[
        str,
        Option(
            "Who makes the files: threads[:N] here, or Dask's workers on many hosts: dask:tcp://HOST:8786, "
            "dask:tls://HOST:8786, dask:FILE (of a scheduler), dask:local[:N].",
            Spelled("threads|dask(:(local|tcp|tls))?"),
        ),
    ] = "threads"
    executor_timeout: Annotated[
        int | None,
        Option("Seconds to wait for Dask's workers while there are none.", Number(min=1), unset="3600"),
    ] = None


class Leftovers(Options, frozen=True, kw_only=True):
    """What becomes of what an earlier run left."""

    TITLE: ClassVar[str] = "What is there already"

    force_unlock: Annotated[
        bool,
        Option("Take away the lock that a process left when it ended on another host, on a file system without locks."),
    ] = False
    trust_store: Annotated[
        bool,
        Option("Go on from finished files of an earlier run without hashing them first: their sizes decide."),
    ] = False


class Existing(Leftovers, frozen=True, kw_only=True):
    """What may be replaced, and what becomes of what an earlier run left."""

    overwrite: Annotated[bool, Option("Replace the existing output, once the new one is complete.")] = False
    delete_others: Annotated[
        bool, Option("With --overwrite: also delete what no manifest of ktconvert lists.", effect=Effect.TUNING)
    ] = False


class ConversionOptions(Options, frozen=True, kw_only=True):
    """Settings of every command that makes an output. part: as --part says, where a command has it."""

    input: Annotated[str, Recorded(Effect.CALL)]
    output: Annotated[Path, Recorded(Effect.CALL)]
    dry_run: Annotated[bool, Option("Print the plan and stop; read headers only, write nothing.")] = False
    verify_inputs: Annotated[
        bool,
        Option("Hash all input files, and notice any change of them on resume.", effect=Effect.TUNING),
    ] = False
    part: Annotated[str | None, Recorded(Effect.TUNING)] = None
    execution: Execution = Execution()
    workers: Workers = Workers()
    existing: Existing = Existing()
    reporting: Reporting = Reporting()

    def unused(self) -> Mapping[str, str]:
        """The options that have no meaning with the others -> why. They are neither recorded nor compared."""
        return {}

    def recorded(self, *effects: Effect) -> dict[str, Any]:
        """What plan.json holds of the options with these effects: name -> value."""
        unused = self.unused()
        return {name: value for name, value in values_of(self, *effects).items() if name not in unused}

    @property
    def settings(self) -> dict[str, Any]:
        """What can change the output: name -> value."""
        return self.recorded(Effect.FILES, Effect.WEIGHTS)

    @property
    def tuning(self) -> dict[str, Any]:
        """What cannot: name -> value."""
        return self.recorded(Effect.TUNING)

    @property
    def weights(self) -> tuple[tuple[str, Any], ...]:
        """What changes the bytes of experts: (name, value), for fingerprints of units."""
        found: tuple[tuple[str, Any], ...] = hashable(self.recorded(Effect.WEIGHTS))
        return found


class Hub(Options, frozen=True, kw_only=True):
    """Which version of a hub's checkpoint is read."""

    revision: Annotated[
        str | None, Option("Branch, tag or commit of a hub id.", Text(), effect=Effect.TUNING, unset="main")
    ] = None


class ArchFile(Options, frozen=True, kw_only=True):
    """A row for an architecture that is not in the table."""

    arch_file: Annotated[
        Path | None,
        Option(
            "A row for an architecture that is not in the table (TOML).",
            FilePath(absolute=True),
            effect=Effect.TUNING,
        ),
    ] = None

    def text(self) -> str | None:
        """What the file holds. Raises UsageError where it cannot be read."""
        if self.arch_file is None:
            return None
        try:
            return self.arch_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--arch-file {self.arch_file}: cannot be read ({error}).") from error


class ImportanceFile(Options, frozen=True, kw_only=True):
    """Where the importance of inputs is read from."""

    imatrix: Annotated[
        Path | None,
        Option(
            "For --scale imatrix: the model's importance matrix, of llama.cpp or `calibrate`, in GGUF or .dat.",
            FilePath(absolute=True),
            effect=Effect.TUNING,
        ),
    ] = None
    statistics: Annotated[
        Path | None,
        Option(
            "Instead: a folder with imatrix.gguf, as `calibrate` writes it. For --scale mse: one of `calibrate "
            "--second-moments`.",
            FilePath(absolute=True),
            effect=Effect.TUNING,
        ),
    ] = None

    @property
    def file(self) -> Path | None:
        """The file that one of them names. Raises UsageError for both."""
        from ktconvert.layouts.statistics.folder import IMATRIX

        if self.imatrix is not None and self.statistics is not None:
            raise UsageError("--imatrix and --statistics both name an importance matrix; give one of them.")
        return self.imatrix if self.statistics is None else self.statistics / IMATRIX


class Samples(Options, frozen=True, kw_only=True):
    """Which samples a model is run on."""

    TITLE: ClassVar[str] = "Calibration"

    dataset: Annotated[
        str,
        Option(
            "Calibration texts: a file or folder (.txt, .jsonl, .json, .parquet), or a hub id.",
            PathOrHubId(absolute=True),
            effect=Effect.WEIGHTS,
        ),
    ] = "HuggingFaceH4/ultrachat_200k"
    dataset_split: Annotated[str, Option("Split of a hub's data set.", effect=Effect.WEIGHTS)] = "train_sft"
    num_calibration_samples: Annotated[
        int, Option("Samples: the first rows of the split.", Number(min=1), effect=Effect.WEIGHTS)
    ] = 512
    max_sequence_length: Annotated[
        int, Option("Tokens at which a sample is cut.", Number(min=2), effect=Effect.WEIGHTS)
    ] = 2048
    random_seed: Annotated[int, Option("Seed for the order of samples.", Number(min=0), effect=Effect.WEIGHTS)] = 42


class Gptq(Options, frozen=True, kw_only=True):
    """How GPTQ uses samples."""

    TITLE: ClassVar[str] = "Calibration"

    dampening_frac: Annotated[
        float,
        Option(
            "The fraction of the mean of the Hessian's diagonal that is added to the diagonal.",
            Real(min=0, max=1),
            effect=Effect.WEIGHTS,
        ),
    ] = 0.1
    calibrate: Annotated[
        str,
        Option(
            "Every expert sees all tokens, or those routed to it; mixed: gate and up see all, down those routed.",
            click.Choice(["all", "routed", "mixed"], case_sensitive=False),
            effect=Effect.WEIGHTS,
        ),
    ] = "all"
    gptq_steps: Annotated[
        str,
        Option(
            "GPTQ alone (plain); or errors weighted by routing weights, scales that are fitted again after GPTQ, and "
            "codes that go where the error is least (descent); or all that, where predictions feel it least (full).",
            click.Choice(["plain", "descent", "full"], case_sensitive=False),
            effect=Effect.WEIGHTS,
        ),
    ] = "plain"
    min_expert_tokens: Annotated[
        int,
        Option(
            "Linears that fewer tokens reached are not compensated; their experts are listed. Unless --calibrate all.",
            Number(min=1),
            effect=Effect.WEIGHTS,
        ),
    ] = 32
    save_statistics: Annotated[
        Path | None,
        Option(
            "Also write what `calibrate` writes, to this folder.",
            OutputPath(absolute=True),
            effect=Effect.TUNING,
        ),
    ] = None
    with_statistics: Annotated[bool | None, Recorded(Effect.FILES, "--save-statistics")] = None

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


class Machine(Options, frozen=True, kw_only=True):
    """Where a model runs. machine: properties of the one where the conversion was begun that can change bytes."""

    TITLE: ClassVar[str] = "Calibration"

    trust_remote_code: Annotated[
        bool,
        Option(
            "Let transformers run Python code that comes with the model.",
            effect=Effect.WEIGHTS,
        ),
    ] = False
    force_cpu: Annotated[bool, Option("Do not use a GPU.", effect=Effect.TUNING)] = False
    max_gpu_memory: Annotated[
        int | None,
        Option("Use no more of the GPU's memory, e.g. 40GiB.", Size(), effect=Effect.TUNING, unset="the GPU's"),
    ] = None
    allow_machine_change: Annotated[
        bool,
        Option(
            "Go on with a calibration that was begun with other threads, or another CPU, GPU or library version.",
            effect=Effect.TUNING,
        ),
    ] = False
    machine: Annotated[dict[str, int | str] | None, Recorded(Effect.WEIGHTS, shape=MachineProperties)] = None


class GpuExperts(Options, frozen=True, kw_only=True):
    """Which experts come from MODEL and not from --cpu-weights."""

    gpu_experts_mask: Annotated[
        Path | None,
        Option(
            "Safetensors file with gpu_experts_mask, bool [decoder layers, experts]: which experts come from MODEL."
        ),
    ] = None
    num_gpu_experts: Annotated[
        int | None,
        Option("Instead of a mask: the first N experts of each layer come from MODEL.", Number(min=0)),
    ] = None
