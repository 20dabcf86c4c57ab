"""Options of the commands that make an output: cpu, gpu, calibrate, dequantize, merge, resplit, resume."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.encodings import input_types
from ktconvert.layouts.outputs import LAYOUTS, formats_of
from ktconvert.pipeline.options import option_groups as groups
from ktconvert.pipeline.options.declare import NONE, Effect, Options, files, leaves, option, recorded, tuning, weights
from ktconvert.pipeline.options.types import (
    FilePath,
    Number,
    OneNumber,
    OneOrMore,
    OutputPath,
    PathOrHubId,
    Size,
    Spelled,
    Text,
)
from ktconvert.quantizers import GROUP_SIZES
from ktconvert.quantizers.choice import ABSMAX, QUANTIZERS

AOCL = (
    "kt-kernel on AMD needs the order of AOCL-BLIS, which only that library knows; --layout plain writes the one of "
    "its build for aarch64, and the AMXINT8 output of int8 runs on AMD in this project's runtime"
)
INPUT, OUTPUT = ("-i", "--input-path"), ("-o", "--output")
CHECKPOINT = "The checkpoint: a directory, a .safetensors file, or a hub id (org/name)."
AGAIN = "On resume, make again what came from files that were modified since."
LATER = {  # what kt-kernel's script takes and we do not, or only in a layout that is asked for
    "awq": "nothing loads kt-kernel's AWQ layout; an AWQ checkpoint is an input of the others",
    "moe_int4": AOCL,
    "moe_int8": AOCL,
}


def choice(words: Iterable[str]) -> click.Choice[str]:
    return click.Choice(tuple(words), case_sensitive=False)


def read_from(help: str, *flags: str, argument: str | None = None) -> Any:
    return option(help, PathOrHubId(absolute=True), flags=flags, argument=argument, default=NONE)


def written_to(*flags: str, help: str = "Output directory.", argument: str | None = None) -> Any:
    return option(help, OutputPath(absolute=True), flags=flags, argument=argument, default=NONE)


def shard_limit(unset: str, help: str = "Cut shards between experts, e.g. 5GB.") -> Any:
    return files(help, Size(), unset=unset)


class QuantizationOptions(groups.ConversionOptions):
    """What `cpu` and `gpu` have in common. arch_row: the text of --arch-file, for resume; engine, rounding: of GPTQ."""

    part: str | None = tuning(
        "Make every N-th file only, from number R on: R/N, or env (RANK and WORLD_SIZE, or a SLURM array's). When "
        "all parts are made, `ktconvert resume` puts the output together.",
        Spelled("env"),
        unset="all",
    )
    max_shard_size: int | None = shard_limit("one shard per layer")
    equalize: bool = weights(
        "Scale rows of up_proj and columns of down_proj by powers of two, where the columns differ much; the model "
        "stays the same. `inspect --columns` says whether it is worth it.",
        default=False,
    )
    arch_row: str | None = recorded(Effect.FILES, "--arch-file")
    engine: str = recorded(Effect.WEIGHTS, default="stream")
    rounding: str = recorded(Effect.WEIGHTS, default="float32")
    samples: groups.Samples = groups.Samples()
    gptq: groups.Gptq = groups.Gptq()
    machine: groups.Machine = groups.Machine()
    hub: groups.Hub = groups.Hub()
    arch: groups.ArchFile = groups.ArchFile()

    CALIBRATED_BY = "GPTQ"

    @property
    def calibrated(self) -> bool:
        """Whether codes are chosen on a walk through the model."""
        raise NotImplementedError

    def unused(self) -> dict[str, str]:
        """Without --equalize neither plans nor fingerprints name it."""
        unused = {} if self.equalize else {"equalize": "changes nothing here"}
        if not self.calibrated:
            calibrating = (groups.Samples, groups.Gptq, groups.Machine)
            of_gptq = [leaf.name for group in calibrating for leaf in leaves(group)]
            only_for = f"is for {self.CALIBRATED_BY} only and changes nothing here"
            return unused | dict.fromkeys((*of_gptq, "engine"), only_for)
        if self.gptq.calibrate == "all":
            unused["min_expert_tokens"] = "changes nothing with --calibrate all: every expert sees every token"
        return unused


class CpuOptions(QuantizationOptions):
    """layers: those to convert; kept_layers: loose ones that were in the output before, and stay, None where none are
    looked for; both with --resume-layer as the plan found them. second_moments_sha256: of the document that describes
    them.
    """

    input: str = read_from(
        "The checkpoint: a directory, a .safetensors or .gguf file, or a hub id (org/name, org/name:FILE.gguf).",
        *INPUT,
    )
    output: Path = written_to(*OUTPUT)
    input_type: str | None = tuning(
        "The expected type of the weights; another one is an error that names it.",
        choice(input_types()),
        unset="from the headers",
    )
    quant_method: str = weights(
        "Output format. Several, as in int4,int8, are made in one reading of the input: OUT-int4, OUT-int8.",
        OneOrMore([*formats_of("cpu"), *LATER]),
        default="int4",
    )
    method_map: tuple[str, ...] = weights(
        "Another method for some layers, e.g. 0-5=int8 (or int4, mxfp4, fp8, bf16); for the runtime of ktconvert, "
        "since kt-kernel takes one for all. May be repeated; the last one counts.",
        Text(),
        default=(),
    )
    config: str | None = files(
        "Of a GGUF: the Hugging Face model (directory or hub id) whose config.json and tokenizer the output gets.",
        PathOrHubId(absolute=True),
    )
    scale: str = weights(
        "How scales are chosen: absmax by the largest value (kt-kernel's bytes), mse by the least squared error (with "
        "second moments: of outputs), imatrix weighted by the inputs; gptq compensates errors, and runs the model.",
        choice(QUANTIZERS),
        default=ABSMAX.name,
    )
    importance: groups.ImportanceFile = groups.ImportanceFile()
    imatrix_sha256: str | None = recorded(Effect.WEIGHTS, "--imatrix")
    second_moments_sha256: str | None = recorded(Effect.WEIGHTS, "--statistics")
    gptq: groups.Gptq = groups.Gptq(calibrate="mixed", gptq_steps="full")
    threadpool_count: int = weights(
        "NUMA parts into which every expert is split: the number of NUMA nodes that the server may use.",
        Number(min=1),
        default=2,
    )
    layout: str | None = weights(
        "How experts are stored: in NUMA parts (numa), or as kt-kernel's native methods read them from a "
        "checkpoint (kt), or in the order of its build for aarch64 (plain).",
        choice(LAYOUTS),
        unset="the method's first",
    )
    gpu: bool = option(ignored="no GPU is needed", default=False)
    no_merge_safetensor: bool = weights("Write loose per-layer folders of .kt files, not safetensors.", default=False)
    resume_layer: int = option("kt-kernel's resume by hand; ours needs no number.", Number(min=0), default=0)
    save_backward_weights: bool = weights(
        "Also write the transposed matrices that fine-tuning needs; of bf16 only these, in loose files.", default=False
    )
    fp8_expert_batch: int | None = option(type=click.INT, ignored="memory is bounded by one expert")
    profile: bool = option(ignored="--json gives the time of every layer", default=False)
    layers: str = files("MoE layers to convert, e.g. 3-60,62.", Spelled("all"), default="all")
    kept_layers: tuple[int, ...] | None = recorded(Effect.FILES, "--resume-layer")
    non_experts: str = files(
        "Other tensors: leave out (skip), copy under kt-kernel's names (copy), or keep as they are, which makes a "
        "whole model (keep).",
        choice(["skip", "copy", "keep"]),
        default="skip",
    )

    CALIBRATED_BY = "--scale gptq"

    @property
    def calibrated(self) -> bool:
        return QUANTIZERS[self.scale].calibrated

    def unused(self) -> dict[str, str]:
        return super().unused() | ({} if self.calibrated else {"rounding": "is of GPTQ"})


IGNORED_MEMORY = "changes nothing here: memory is bounded by {}; --max-memory sets a limit"


class GpuOptions(QuantizationOptions):
    input: str = read_from(CHECKPOINT, "-i", "--model-id", "--input-path")
    output: Path = written_to("-o", "--output-dir", "--output")
    quant_method: str = weights(
        "Calibrated on a data set (GPTQ), or rounded to nearest (RTN), which takes seconds per GB and no data.",
        choice(["GPTQ", "RTN"]),
        default="GPTQ",
    )
    quant_type: str = weights(
        "Output format: 4 or 8 bits, symmetric, one BF16 scale per group of columns.",
        choice(formats_of("gpu")),
        default="W8A16",
    )
    group_size: int = weights(
        "Columns that share a scale. Of W4A16 with 32, kt-kernel's RAWINT4 reads the same files for the CPU.",
        OneNumber(GROUP_SIZES),
        default=GROUP_SIZES[0],
    )
    rounding: str = weights(
        "The bits of llmcompressor (library), or one rounding less (float32).",
        choice(["library", "float32"]),
        default="library",
    )
    ignore_patterns: tuple[str, ...] = files(
        "Modules to add to kt-kernel's ignore list, as names or as re: and a regular expression; several after one "
        "flag, or the flag repeated.",
        Text(),
        default=(),
    )
    engine: str = weights(
        "Of GPTQ: layer by layer (stream), or llmcompressor's own implementation on the whole model in memory "
        "(oneshot), for comparison.",
        choice(["stream", "oneshot"]),
        default="stream",
    )
    torch_dtype: str = weights(
        "What experts are rounded from: bfloat16.", choice(["bfloat16", "float16", "float32"]), default="bfloat16"
    )
    max_cpu_memory: int | None = option(
        "Accepted and ignored, with a note: --max-memory sets a limit.", Size(), unset="1000GiB with --max-gpu-memory"
    )
    tp_size: tuple[int, ...] = tuning(
        "Tensor parallelism with which the output will be loaded; refused where experts cannot be split so. May be "
        "repeated.",
        Number(min=1),
        default=(1,),
    )
    max_shard_size: int | None = shard_limit("5GB", "Cut shards between experts.")

    @property
    def calibrated(self) -> bool:
        return self.quant_method == "GPTQ"

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        if self.calibrated:
            if self.engine == "oneshot":
                unused["gptq_steps"] = "changes nothing with --engine oneshot: the library has GPTQ alone"
            return {**unused, "max_cpu_memory": IGNORED_MEMORY.format("one layer and some experts")}
        return {
            **unused,
            "trust_remote_code": "changes nothing here: rounding to nearest runs no code of a model",
            "force_cpu": "changes nothing here: rounding to nearest never touches a GPU",
            "max_gpu_memory": "changes nothing here: rounding to nearest never touches a GPU",
            "max_cpu_memory": IGNORED_MEMORY.format("a few experts"),
        }


class CalibrateOptions(groups.ConversionOptions):
    """arch_row: the text of --arch-file."""

    input: str = read_from(CHECKPOINT, argument="model")
    output: Path = written_to(*OUTPUT, help="The folder for the files.")
    second_moments: bool = weights(
        "Also keep the sums of x xT, H x H for a layer and I x I for each expert, which `cpu --scale mse` searches "
        "with; the plan tells their size.",
        default=False,
    )
    arch_row: str | None = recorded(Effect.FILES, "--arch-file")
    samples: groups.Samples = groups.Samples(num_calibration_samples=128)
    machine: groups.Machine = groups.Machine()
    hub: groups.Hub = groups.Hub()
    arch: groups.ArchFile = groups.ArchFile()


class DequantizeOptions(groups.ConversionOptions):
    input: str = read_from(CHECKPOINT, *INPUT, "--model-dir", "--input-fp8-hf-path", argument="src")
    output: Path = written_to(*OUTPUT, "--output-dir", "--output-bf16-hf-path", argument="out")
    config_path: str | None = option(ignored="SRC has the config")
    max_shard_size: int | None = shard_limit("5GB", "Cut shards at this size.")
    hub: groups.Hub = groups.Hub()


class MergeAdapterOptions(DequantizeOptions):
    input: str = read_from(CHECKPOINT, argument="model")
    output: Path = written_to(*OUTPUT)
    config_path: str | None = recorded(Effect.CALL)
    adapter: Path = weights("The adapter's directory.", FilePath(absolute=True), default=NONE)


class MergeOptions(groups.ConversionOptions):
    """Settings of `ktconvert merge`. with_companions: whether --original-path is given."""

    input: str = read_from("The directory with the _layer_N folders of .kt files.", *INPUT)
    output: Path = written_to(*OUTPUT)
    original_path: Path | None = tuning(
        "The original checkpoint: its config, tokenizer and other companion files are copied.",
        FilePath(absolute=True),
        flags=("-r", "--original-path"),
    )
    with_companions: bool = recorded(Effect.FILES, "--original-path", default=False)
    max_tensors: int = files("Tensors per shard.", Number(min=1), default=3000)
    layers: str = files("Merge only these layers, e.g. 3-60,62; others may be missing.", Spelled("all"), default="all")
    verify_inputs: bool = tuning(AGAIN, default=False)


class ResplitOptions(groups.ConversionOptions):
    """Settings of `ktconvert resplit`. Recorded are those of the conversion of OUTPUT that hold for NEW, too."""

    input: str = read_from("The output that is read.", argument="output")
    output: Path = written_to(help="The output that is made.", argument="new")
    threadpool_count: int = weights(
        "NUMA parts of the new output: the number of NUMA nodes that the server may use.", Number(min=1), default=NONE
    )
    against: str | None = option(
        "The checkpoint that OUTPUT was made from: say whether converting it again is better.",
        PathOrHubId(absolute=True),
    )
    revision: str | None = option("Branch, tag or commit, where --against is a hub id.")
    max_shard_size: int | None = shard_limit("one shard per layer")
    verify_inputs: bool = tuning(AGAIN, default=False)
    no_merge_safetensor: bool | None = recorded(Effect.WEIGHTS)
    layers: str | None = recorded(Effect.FILES)
    arch_row: str | None = recorded(Effect.FILES, "--arch-file")


class AsBefore(groups.Execution):
    """What the rest of the work may take of this machine."""

    cpuinfer_threads: int | None = option("Threads.", Number(min=1), unset="as before")
    max_memory: int | None = option("Use fewer threads to stay below this limit, e.g. 4GiB.", Size(), unset="as before")


class ResumeOptions(Options):
    output: Path = written_to(help="The output that was begun.", argument="output")
    dry_run: bool = option("Print which units are finished, which are left, and why; write nothing.", default=False)
    verify_inputs: bool = option("Convert again what came from input files that were modified since.", default=False)
    allow_machine_change: bool = option(
        "Go on with a calibration that was begun with other threads, or another CPU, GPU or library version.",
        default=False,
    )
    execution: AsBefore = AsBefore()
    workers: groups.Workers = groups.Workers()
    leftovers: groups.Leftovers = groups.Leftovers()
    reporting: groups.Reporting = groups.Reporting()
