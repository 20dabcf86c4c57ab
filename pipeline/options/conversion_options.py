"""Options of the conversion commands: all commands that write an output, and resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import click

from ktconvert.layouts.checkpoints.archs import ALL
from ktconvert.layouts.encodings import input_types
from ktconvert.layouts.files.documents import Number
from ktconvert.layouts.outputs import LAYOUTS, formats_by_option
from ktconvert.pipeline.options import option_groups as groups
from ktconvert.pipeline.options.declare import (
    AS_BEFORE,
    REQUIRED,
    Effect,
    Group,
    Options,
    files_option,
    option,
    option_fields,
    record,
    tuning_option,
    weights_option,
)
from ktconvert.pipeline.options.types import (
    ChoiceList,
    FilePath,
    Integer,
    IntegerChoice,
    KeywordText,
    OutputPath,
    PathOrHubId,
    Size,
    Text,
    WordChoice,
)
from ktconvert.quantizers import GROUP_SIZES
from ktconvert.quantizers.quantizer import ABSMAX, QUANTIZERS

AOCL = (
    "kt-kernel on AMD needs the order of AOCL-BLIS, which is not documented; --layout plain writes the order of "
    "kt-kernel's aarch64 build, and ktconvert's own runtime computes the AMXINT8 output of int8 on AMD"
)
CONVERT_CHANGED = "On resume, convert units again whose input files changed."
AUTO = "auto"  # value of --method-map
NUMA_ALIASES = ("--threadpool-count",)
NUMA_SLICES = "Number of NUMA slices, one for each node."
GPU_METHOD = "it is for the GPU, so that `ktconvert gpu --quant-type` writes it"
# Methods of kt-kernel's script, and of `gpu`, that are always refused, and those that require --layout -> the reason
REFUSED_METHODS = {
    "awq": "no program loads kt-kernel's AWQ layout; the other methods accept an AWQ checkpoint as input",
    **dict.fromkeys(("w4a16", "w8a16"), GPU_METHOD),
}
PLAIN_METHODS = {"moe_int4": AOCL, "moe_int8": AOCL}
UNSUPPORTED_METHODS = REFUSED_METHODS | PLAIN_METHODS
# Names of formats in plans and reports, in lower case -> the method that writes them
METHOD_NAMES = {fmt.name.lower(): method for method, fmt in formats_by_option("cpu").items()}


def shard_size_option(unset: str) -> Any:
    """Return the field of --max-shard-size."""
    return files_option("Maximum size of a shard, e.g. 5GB.", Size(), unset=unset, group=Group.ADVANCED)


def experts_option() -> Any:
    """Return the field of --experts."""
    return weights_option(
        "Stack of experts to convert, e.g. text; all: every stack that the model has.",
        Text(),
        default=ALL,
        group=Group.ADVANCED,
    )


class QuantizationOptions(groups.ConversionOptions):
    """Options that `cpu` and `gpu` share.

    arch_row          the text of --arch-file, for resume
    engine, rounding  settings of GPTQ
    """

    part: str | None = tuning_option(
        "Make only every N-th file: R/N with R from 0 to N-1, or env (RANK/WORLD_SIZE or a SLURM array).",
        KeywordText("env"),
        unset="all",
        group=Group.MACHINES,
    )
    max_shard_size: int | None = shard_size_option("one shard per layer")
    equalize: bool = weights_option(
        "Equalize the columns of down_proj by powers of two; the model computes the same.",
        default=False,
        group=Group.ADVANCED,
    )
    arch_row: str | None = record(Effect.FILES, "--arch-file")
    engine: str = record(Effect.WEIGHTS, default="stream")
    rounding: str = record(Effect.WEIGHTS, default="float32")
    samples: groups.Samples = groups.Samples()
    gptq: groups.Gptq = groups.Gptq()
    hardware: groups.Hardware = groups.Hardware()
    hub: groups.Hub = groups.Hub()
    streaming: groups.Streaming = groups.Streaming()
    arch: groups.ArchFile = groups.ArchFile()

    CALIBRATED_BY = ""  # the options that make `calibrated` true

    @property
    def calibrated(self) -> bool:
        """True if codes are chosen while the model runs on calibration data."""
        raise NotImplementedError

    @classmethod
    def find_heading(cls, group: Group) -> str:
        title = super().find_heading(group)
        is_calibration = group in (Group.CALIBRATION, Group.CALIBRATION_DETAILS)
        return f"{title} (only with {cls.CALIBRATED_BY})" if is_calibration else title

    def find_unused(self) -> dict[str, str]:
        """Without --equalize neither plans nor fingerprints name it."""
        unused = {} if self.equalize else {"equalize": "has no effect"}
        if not self.calibrated:
            calibrating = (groups.Samples, groups.Gptq, groups.Hardware)
            names = [option_field.name for group in calibrating for option_field in option_fields(group)]
            only_for = f"is only for {self.CALIBRATED_BY} and has no effect"
            return unused | dict.fromkeys((*names, "engine"), only_for)
        if self.gptq.calibrate == "all":
            unused["min_expert_tokens"] = "has no effect with --calibrate all, where every expert sees every token"
        return unused


class MapChoice(TypedDict):
    """Inputs of the choice of `--method-map auto`: hashes of importance matrix and model, and the budget."""

    imatrix: str | None
    model: str
    ram: Number


class CpuOptions(QuantizationOptions, command="cpu"):
    """Options of `ktconvert cpu`.

    method_map             the map; in a plan, the one that was chosen for `auto`
    map_choice             what it was chosen from (MapChoice); None if it was given
    layers                 the layers to convert; with --resume-layer, as the plan found them
    kept_layers            loose layers that the output already had and keeps; None without --resume-layer
    second_moments_sha256  hash of the document that describes the second moments
    """

    input: str = groups.input_option(
        "model",
        "--input-path",
        help="Checkpoint: directory, .safetensors or .gguf file, or hub id (org/name[:FILE.gguf]).",
    )
    output: Path = groups.output_option("out")
    input_type: str | None = tuning_option(
        "Expected encoding of the experts; a mismatch is an error.",
        WordChoice(input_types()),
        unset="from the headers",
        group=Group.ADVANCED,
    )
    quant_method: str = weights_option(
        "Output format; several (int4,int8) share one read of the input.",
        ChoiceList([*formats_by_option("cpu"), *PLAIN_METHODS], REFUSED_METHODS, METHOD_NAMES),
        default="int4",
        group=Group.QUANTIZATION,
    )
    method_map: tuple[str, ...] = weights_option(
        "Method of some layers, e.g. 0-5=int8 (repeatable), or auto with --ram (not for kt-kernel).",
        Text(),
        default=(),
        group=Group.ADVANCED,
    )
    ram: int | None = option("Memory for the experts with --method-map auto, e.g. 400GB.", Size(), group=Group.ADVANCED)
    experts: str = experts_option()
    map_choice: dict[str, Any] | None = record(Effect.FILES, "--method-map auto", shape=MapChoice)
    config: str | None = files_option(
        "Model that provides config.json and tokenizer (for GGUF input).",
        PathOrHubId(absolute=True),
        group=Group.INPUT,
    )
    scale: str = weights_option(
        "How scales are chosen; gptq runs the model on text.",
        WordChoice(QUANTIZERS),
        default=ABSMAX.name,
        group=Group.QUANTIZATION,
    )
    importance: groups.ImportanceFile = groups.ImportanceFile()
    imatrix_sha256: str | None = record(Effect.WEIGHTS, "--imatrix")
    second_moments_sha256: str | None = record(Effect.WEIGHTS, "--statistics")
    gptq: groups.Gptq = groups.Gptq(calibrate="mixed", gptq_steps="full")
    numa: int | None = weights_option(
        NUMA_SLICES, Integer(min=1), unset="this machine's nodes", group=Group.QUANTIZATION, aliases=NUMA_ALIASES
    )
    layout: str | None = weights_option(
        "File layout: NUMA slices (numa), kt-kernel's native checkpoints (kt), or its aarch64 build (plain).",
        WordChoice(LAYOUTS),
        unset="the method's first layout",
        group=Group.ADVANCED,
    )
    gpu: bool = option(ignored="no GPU is needed", default=False, group=Group.IGNORED)
    no_merge_safetensor: bool = weights_option(
        "Write loose per-layer folders of .kt files, not safetensors.", default=False, group=Group.ADVANCED
    )
    resume_layer: int = option(
        "Skip layers below this one, as kt-kernel does (not needed to resume).",
        Integer(min=0),
        default=0,
        group=Group.ADVANCED,
    )
    save_backward_weights: bool = weights_option(
        "Also write the transposed matrices that fine-tuning needs (for bf16: only these).",
        default=False,
        group=Group.ADVANCED,
    )
    fp8_expert_batch: int | None = option(
        type=click.INT, ignored="memory is bounded by one expert", group=Group.IGNORED
    )
    profile: bool = option(ignored="--json gives the time of every layer", default=False, group=Group.IGNORED)
    layers: str = files_option("Layers to convert, e.g. 3-60,62.", KeywordText("all"), default="all", group=Group.INPUT)
    kept_layers: tuple[int, ...] | None = record(Effect.FILES, "--resume-layer")
    non_experts: str = files_option(
        "Non-expert tensors: skip, copy, or keep (for a whole model).",
        WordChoice(["skip", "copy", "keep"]),
        default="skip",
        group=Group.OUTPUT,
    )

    CALIBRATED_BY = "--scale gptq"

    @property
    def calibrated(self) -> bool:
        return QUANTIZERS[self.scale].calibrated

    @property
    def chooses_map(self) -> bool:
        """True if the plan chooses the methods of layers."""
        return AUTO in self.method_map

    def find_unused(self) -> dict[str, str]:
        automatic = f"--method-map {AUTO}"
        return (
            super().find_unused()
            | ({} if self.calibrated else {"rounding": "is only for GPTQ"})
            | ({"quant_method": f"has no effect with {automatic}"} if self.chooses_map else {})
            | ({} if self.chooses_map else {"ram": f"is only for {automatic} and has no effect"})
        )


IGNORED_MEMORY = "has no effect, because memory is bounded by {}; --max-memory sets a limit"


class GpuOptions(QuantizationOptions, command="gpu"):
    input: str = groups.input_option("model", "--model-id", "--input-path")
    output: Path = groups.output_option("out", "--output-dir")
    quant_method: str = weights_option(
        "GPTQ (calibrates on a data set) or RTN (rounds to nearest; fast, no data).",
        WordChoice(["GPTQ", "RTN"]),
        default="GPTQ",
        group=Group.QUANTIZATION,
    )
    quant_type: str = weights_option(
        "Output format: 4 or 8 bits, symmetric, with one BF16 scale per group of columns.",
        WordChoice(formats_by_option("gpu")),
        default="W8A16",
        group=Group.QUANTIZATION,
    )
    group_size: int = weights_option(
        "Number of columns that share a scale.",
        IntegerChoice(GROUP_SIZES),
        default=GROUP_SIZES[0],
        group=Group.QUANTIZATION,
    )
    rounding: str = weights_option(
        "Rounding: llmcompressor's bits (library), or one rounding less (float32).",
        WordChoice(["library", "float32"]),
        default="library",
        group=Group.ADVANCED,
    )
    ignore_patterns: tuple[str, ...] = files_option(
        "Modules to leave unquantized besides kt-kernel's list: names, or re:REGEX; may be repeated.",
        Text(),
        default=(),
        group=Group.ADVANCED,
    )
    engine: str = weights_option(
        "GPTQ implementation: layer by layer (stream), or llmcompressor on the whole model (oneshot).",
        WordChoice(["stream", "oneshot"]),
        default="stream",
        group=Group.ADVANCED,
    )
    torch_dtype: str = weights_option(
        "Dtype that experts are rounded from; only bfloat16 is supported.",
        WordChoice(["bfloat16", "float16", "float32"]),
        default="bfloat16",
        group=Group.ADVANCED,
    )
    max_cpu_memory: int | None = option(
        "Accepted and ignored, with a note; --max-memory sets a limit.",
        Size(),
        unset="1000GiB with --max-gpu-memory",
        group=Group.IGNORED,
    )
    tp_size: tuple[int, ...] = tuning_option(
        "Tensor-parallel size that the output must support; may be repeated.",
        Integer(min=1),
        default=(1,),
        group=Group.ADVANCED,
    )
    max_shard_size: int | None = shard_size_option("5GB")

    CALIBRATED_BY = "--quant-method GPTQ"

    @property
    def calibrated(self) -> bool:
        return self.quant_method == "GPTQ"

    def find_unused(self) -> dict[str, str]:
        unused = super().find_unused()
        if self.calibrated:
            if self.engine == "oneshot":
                unused["gptq_steps"] = "has no effect with --engine oneshot, because the library has only plain GPTQ"
            return {**unused, "max_cpu_memory": IGNORED_MEMORY.format("one layer and some experts")}
        return {
            **unused,
            "trust_remote_code": "has no effect: rounding to nearest runs no code of the model",
            "force_cpu": "has no effect: rounding to nearest uses no GPU",
            "max_gpu_memory": "has no effect: rounding to nearest uses no GPU",
            "max_cpu_memory": IGNORED_MEMORY.format("a few experts"),
        }


class CalibrateOptions(groups.ConversionOptions, command="calibrate"):
    """Options of `ktconvert calibrate`.

    arch_row  the text of --arch-file
    """

    input: str = groups.input_option("model")
    output: Path = groups.output_option("out", help="Output folder.")
    second_moments: bool = weights_option(
        "Also write second moments of the experts' inputs, for `cpu --scale mse`.", default=False, group=Group.OUTPUT
    )
    experts: str = experts_option()
    arch_row: str | None = record(Effect.FILES, "--arch-file")
    samples: groups.Samples = groups.Samples(num_calibration_samples=128)
    hardware: groups.Hardware = groups.Hardware()
    hub: groups.Hub = groups.Hub()
    arch: groups.ArchFile = groups.ArchFile()


class DequantizeOptions(groups.ConversionOptions, command="dequantize"):
    input: str = groups.input_option("model", "--input-path", "--model-dir", "--input-fp8-hf-path")
    output: Path = groups.output_option("out", "--output-dir", "--output-bf16-hf-path")
    config_path: str | None = option(ignored="MODEL has the config", group=Group.IGNORED)
    max_shard_size: int | None = shard_size_option("5GB")
    hub: groups.Hub = groups.Hub()
    streaming: groups.Streaming = groups.Streaming()


class FetchOptions(groups.ConversionOptions, command="fetch"):
    input: str = groups.input_option("model", "--input-path")
    output: Path = groups.output_option("out")
    gpu_experts_mask: Path | None = files_option(
        "Also fetch the experts that this mask of `ktconvert experts` marks.",
        FilePath(absolute=True),
        group=Group.EXPERTS,
    )
    max_shard_size: int | None = shard_size_option("5GB")
    hub: groups.Hub = groups.Hub()

    @property
    def streaming(self) -> groups.Streaming:
        """A model of the hub is never downloaded whole."""
        return groups.Streaming(stream=True)


class MergeAdapterOptions(DequantizeOptions, command="merge-adapter"):
    input: str = groups.input_option("model")
    output: Path = groups.output_option("out")
    config_path: str | None = record(Effect.CALL)
    adapter: Path = weights_option(
        "Directory of the adapter.", FilePath(absolute=True), default=REQUIRED, group=Group.INPUT
    )


class MergeOptions(groups.ConversionOptions, command="merge"):
    """Options of `ktconvert merge`.

    with_companions  whether --original-path is given
    """

    input: str = groups.input_option("folder", "--input-path", help="Directory with the _layer_N folders of .kt files.")
    output: Path = groups.output_option("out")
    original_path: Path | None = tuning_option(
        "Original checkpoint whose config, tokenizer and other companion files are copied.",
        FilePath(absolute=True),
        flags=("-r", "--original-path"),
        group=Group.INPUT,
    )
    with_companions: bool = record(Effect.FILES, "--original-path", default=False)
    max_tensors: int = files_option(
        "Maximum number of tensors per shard.", Integer(min=1), default=3000, group=Group.ADVANCED
    )
    layers: str = files_option(
        "Merge only these layers, e.g. 3-60,62; others may be missing.",
        KeywordText("all"),
        default="all",
        group=Group.INPUT,
    )
    verify_inputs: bool = tuning_option(CONVERT_CHANGED, default=False, group=Group.ADVANCED)


class ResplitOptions(groups.ConversionOptions, command="resplit"):
    """Options of `ktconvert resplit`. The recorded values are those of OLD's conversion that also hold for NEW."""

    input: str = groups.input_option("old", help="Output to read.")
    output: Path = groups.output_option("new", help="Output to write.")
    numa: int = weights_option(NUMA_SLICES, Integer(min=1), default=REQUIRED, group=Group.OUTPUT, aliases=NUMA_ALIASES)
    against: str | None = option(
        "Source checkpoint of OLD: report whether converting again is better.",
        PathOrHubId(absolute=True),
        group=Group.INPUT,
    )
    revision: str | None = option("Branch, tag or commit, if --against is a hub id.", group=Group.INPUT)
    max_shard_size: int | None = shard_size_option("one shard per layer")
    verify_inputs: bool = tuning_option(CONVERT_CHANGED, default=False, group=Group.ADVANCED)
    no_merge_safetensor: bool | None = record(Effect.WEIGHTS)
    layers: str | None = record(Effect.FILES)
    arch_row: str | None = record(Effect.FILES, "--arch-file")


class ResumeExecution(groups.Execution):
    """Limits for the remaining work on this machine."""

    threads: int | None = option(
        groups.THREADS, Integer(min=1), unset=AS_BEFORE, group=Group.RESOURCES, aliases=groups.THREADS_ALIASES
    )
    max_memory: int | None = option(
        "Use fewer threads to stay below this limit, e.g. 4GiB.", Size(), unset=AS_BEFORE, group=Group.RESOURCES
    )


# Command -> its options, for each command that converts; plan_NAME in pipeline/plans/NAME.py builds its plan
CONVERSION_OPTIONS: Mapping[str, type[groups.ConversionOptions]] = {
    cls.command: cls
    for cls in (
        CpuOptions,
        GpuOptions,
        CalibrateOptions,
        DequantizeOptions,
        FetchOptions,
        MergeOptions,
        MergeAdapterOptions,
        ResplitOptions,
    )
}


class ResumeOptions(Options):
    output: Path = option(
        "Output of the interrupted conversion.",
        OutputPath(absolute=True),
        argument="output",
        default=REQUIRED,
        group=Group.OUTPUT,
    )
    dry_run: bool = option(
        "Print finished and remaining units, and why; write nothing.", default=False, group=Group.OUTPUT
    )
    verify_inputs: bool = option("Convert units again whose input files changed.", default=False, group=Group.ADVANCED)
    allow_machine_change: bool = option(groups.ALLOW_MACHINE_CHANGE, default=False, group=Group.ADVANCED)
    execution: ResumeExecution = ResumeExecution()
    workers: groups.Workers = groups.Workers()
    earlier_run: groups.EarlierRun = groups.EarlierRun()
    reporting: groups.Reporting = groups.Reporting()
