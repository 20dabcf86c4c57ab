"""Options of `ktconvert cpu` and `ktconvert gpu`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import click

from ktconvert.layouts.encodings import input_types
from ktconvert.layouts.outputs import LAYOUTS, formats_of
from ktconvert.pipeline.options.declare import Effect, Option, Recorded, leaves
from ktconvert.pipeline.options.option_groups import (
    ArchFile,
    ConversionOptions,
    Gptq,
    Hub,
    ImportanceFile,
    Machine,
    Samples,
)
from ktconvert.pipeline.options.types import Number, OneNumber, OneOrMore, OutputPath, PathOrHubId, Size, Spelled, Text
from ktconvert.quantizers import GROUP_SIZES
from ktconvert.quantizers.choice import ABSMAX, QUANTIZERS

AOCL = (
    "kt-kernel on AMD needs the order of AOCL-BLIS, which only that library knows; --layout plain writes the one of "
    "its build for aarch64, and the AMXINT8 output of int8 runs on AMD in this project's runtime"
)
LATER = {  # what kt-kernel's script takes and we do not, or only in a layout that is asked for
    "awq": "nothing loads kt-kernel's AWQ layout; an AWQ checkpoint is an input of the others",
    "moe_int4": AOCL,
    "moe_int8": AOCL,
}


def choice(words: Iterable[str]) -> click.Choice[str]:
    """One of these words, in any case."""
    return click.Choice(tuple(words), case_sensitive=False)


class QuantizationOptions(ConversionOptions, frozen=True, kw_only=True):
    """What `cpu` and `gpu` have in common. arch_row: the text of --arch-file, for resume; engine, rounding: of GPTQ."""

    part: Annotated[
        str | None,
        Option(
            "Make every N-th file only, from number R on: R/N, or env (RANK and WORLD_SIZE, or a SLURM array's). When "
            "all parts are made, `ktconvert resume` puts the output together.",
            Spelled("env"),
            effect=Effect.TUNING,
            unset="all",
        ),
    ] = None
    max_shard_size: Annotated[
        int | None,
        Option("Cut shards between experts, e.g. 5GB.", Size(), effect=Effect.FILES, unset="one shard per layer"),
    ] = None
    equalize: Annotated[
        bool,
        Option(
            "Scale rows of up_proj and columns of down_proj by powers of two, where the columns differ much; the model "
            "stays the same. `inspect --columns` says whether it is worth it.",
            effect=Effect.WEIGHTS,
        ),
    ] = False
    arch_row: Annotated[str | None, Recorded(Effect.FILES, "--arch-file")] = None
    engine: Annotated[str, Recorded(Effect.WEIGHTS)] = "stream"
    rounding: Annotated[str, Recorded(Effect.WEIGHTS)] = "float32"
    samples: Samples = Samples()
    gptq: Gptq = Gptq()
    machine: Machine = Machine()
    hub: Hub = Hub()
    arch: ArchFile = ArchFile()

    @property
    def calibrated(self) -> bool:
        """Whether codes are chosen on a walk through the model."""
        raise NotImplementedError

    def unused(self) -> Mapping[str, str]:
        """Without --equalize neither plans nor fingerprints name it."""
        return {} if self.equalize else {"equalize": "changes nothing here"}


SEES_ALL = "changes nothing with --calibrate all: every expert sees every token"
# What only GPTQ uses.
CALIBRATION = tuple(leaf.name for group in (Samples, Gptq, Machine) for leaf in leaves(group))


class CpuOptions(QuantizationOptions, frozen=True, kw_only=True):
    """Settings of `ktconvert cpu`.

    layers          those to convert; with --resume-layer as the plan found them
    kept_layers     loose layer folders that were in the output before, and stay; None where none are looked for
    imatrix_sha256  of the importance matrix; second_moments_sha256: of the document that describes them
    """

    input: Annotated[
        str,
        Option(
            "The checkpoint: a directory, a .safetensors or .gguf file, or a hub id (org/name, org/name:FILE.gguf).",
            PathOrHubId(absolute=True),
            flags=("-i", "--input-path"),
        ),
    ]
    output: Annotated[Path, Option("Output directory.", OutputPath(absolute=True), flags=("-o", "--output"))]
    input_type: Annotated[
        str | None,
        Option(
            "The expected type of the weights; another one is an error that names it.",
            choice(input_types()),
            effect=Effect.TUNING,
            unset="from the headers",
        ),
    ] = None
    quant_method: Annotated[
        str,
        Option(
            "Output format. Several, as in int4,int8, are made in one reading of the input: OUT-int4, OUT-int8.",
            OneOrMore([*formats_of("cpu"), *LATER]),
            effect=Effect.WEIGHTS,
        ),
    ] = "int4"
    method_map: Annotated[
        tuple[str, ...],
        Option(
            "Another method for some layers, e.g. 0-5=int8 (or int4, mxfp4, fp8, bf16); for the runtime of ktconvert, "
            "since kt-kernel takes one for all. May be repeated; the last one counts.",
            Text(),
            effect=Effect.WEIGHTS,
        ),
    ] = ()
    config: Annotated[
        str | None,
        Option(
            "Of a GGUF: the Hugging Face model (directory or hub id) whose config.json and tokenizer the output gets.",
            PathOrHubId(absolute=True),
            effect=Effect.FILES,
        ),
    ] = None
    scale: Annotated[
        str,
        Option(
            "How scales are chosen: absmax by the largest value (kt-kernel's bytes), mse by the least squared error "
            "(with second moments: of outputs), imatrix weighted by the inputs; gptq compensates errors, and runs "
            "the model.",
            choice(QUANTIZERS),
            effect=Effect.WEIGHTS,
        ),
    ] = ABSMAX.name
    importance: ImportanceFile = ImportanceFile()
    imatrix_sha256: Annotated[str | None, Recorded(Effect.WEIGHTS, "--imatrix")] = None
    second_moments_sha256: Annotated[str | None, Recorded(Effect.WEIGHTS, "--statistics")] = None
    gptq: Gptq = Gptq(calibrate="mixed", gptq_steps="full")
    threadpool_count: Annotated[
        int,
        Option(
            "NUMA parts into which every expert is split: the number of NUMA nodes that the server may use.",
            Number(min=1),
            effect=Effect.WEIGHTS,
        ),
    ] = 2
    layout: Annotated[
        str | None,
        Option(
            "How experts are stored: in NUMA parts (numa), or as kt-kernel's native methods read them from a "
            "checkpoint (kt), or in the order of its build for aarch64 (plain).",
            choice(LAYOUTS),
            effect=Effect.WEIGHTS,
            unset="the method's first",
        ),
    ] = None
    gpu: Annotated[bool, Option(ignored="no GPU is needed")] = False
    no_merge_safetensor: Annotated[
        bool, Option("Write loose per-layer folders of .kt files, not safetensors.", effect=Effect.WEIGHTS)
    ] = False
    resume_layer: Annotated[int, Option("kt-kernel's resume by hand; ours needs no number.", Number(min=0))] = 0
    save_backward_weights: Annotated[
        bool,
        Option(
            "Also write the transposed matrices that fine-tuning needs; of bf16 only these, in loose files.",
            effect=Effect.WEIGHTS,
        ),
    ] = False
    fp8_expert_batch: Annotated[int | None, Option(type=click.INT, ignored="memory is bounded by one expert")] = None
    profile: Annotated[bool, Option(ignored="--json gives the time of every layer")] = False
    layers: Annotated[str, Option("MoE layers to convert, e.g. 3-60,62.", Spelled("all"), effect=Effect.FILES)] = "all"
    kept_layers: Annotated[tuple[int, ...] | None, Recorded(Effect.FILES, "--resume-layer")] = None
    non_experts: Annotated[
        str,
        Option(
            "Other tensors: leave out (skip), copy under kt-kernel's names (copy), or keep as they are, which makes a "
            "whole model (keep).",
            choice(["skip", "copy", "keep"]),
            effect=Effect.FILES,
        ),
    ] = "skip"

    @property
    def calibrated(self) -> bool:
        """Whether codes are chosen on a walk through the model."""
        return QUANTIZERS[self.scale].calibrated

    def unused(self) -> Mapping[str, str]:
        """What other formats and choices of scales need."""
        unused = {**super().unused()}
        if self.gptq.calibrate == "all":
            unused["min_expert_tokens"] = SEES_ALL
        if not self.calibrated:
            only = "is for --scale gptq only and changes nothing here"
            unused |= dict.fromkeys((*CALIBRATION, "engine", "rounding"), only)
        return unused


IGNORED_MEMORY = "changes nothing here: memory is bounded by {}; --max-memory sets a limit"


class GpuOptions(QuantizationOptions, frozen=True, kw_only=True):
    """Settings of `ktconvert gpu`."""

    input: Annotated[
        str,
        Option(
            "The checkpoint: a directory, a .safetensors file, or a hub id (org/name).",
            PathOrHubId(absolute=True),
            flags=("-i", "--model-id", "--input-path"),
        ),
    ]
    output: Annotated[
        Path, Option("Output directory.", OutputPath(absolute=True), flags=("-o", "--output-dir", "--output"))
    ]
    quant_method: Annotated[
        str,
        Option(
            "Calibrated on a data set (GPTQ), or rounded to nearest (RTN), which takes seconds per GB and no data.",
            choice(["GPTQ", "RTN"]),
            effect=Effect.WEIGHTS,
        ),
    ] = "GPTQ"
    quant_type: Annotated[
        str,
        Option(
            "Output format: 4 or 8 bits, symmetric, one BF16 scale per group of columns.",
            choice(formats_of("gpu")),
            effect=Effect.WEIGHTS,
        ),
    ] = "W8A16"
    group_size: Annotated[
        int,
        Option(
            "Columns that share a scale. Of W4A16 with 32, kt-kernel's RAWINT4 reads the same files for the CPU.",
            OneNumber(GROUP_SIZES),
            effect=Effect.WEIGHTS,
        ),
    ] = GROUP_SIZES[0]
    rounding: Annotated[
        str,
        Option(
            "The bits of llmcompressor (library), or one rounding less (float32).",
            choice(["library", "float32"]),
            effect=Effect.WEIGHTS,
        ),
    ] = "library"
    ignore_patterns: Annotated[
        tuple[str, ...],
        Option(
            "Modules to add to kt-kernel's ignore list, as names or as re: and a regular expression; several after one "
            "flag, or the flag repeated.",
            Text(),
            effect=Effect.FILES,
        ),
    ] = ()
    engine: Annotated[
        str,
        Option(
            "Of GPTQ: layer by layer (stream), or llmcompressor's own implementation on the whole model in memory "
            "(oneshot), for comparison.",
            choice(["stream", "oneshot"]),
            effect=Effect.WEIGHTS,
        ),
    ] = "stream"
    torch_dtype: Annotated[
        str,
        Option(
            "What experts are rounded from: bfloat16.",
            choice(["bfloat16", "float16", "float32"]),
            effect=Effect.WEIGHTS,
        ),
    ] = "bfloat16"
    max_cpu_memory: Annotated[
        int | None,
        Option(
            "Accepted and ignored, with a note: --max-memory sets a limit.",
            Size(),
            unset="1000GiB with --max-gpu-memory",
        ),
    ] = None
    tp_size: Annotated[
        tuple[int, ...],
        Option(
            "Tensor parallelism with which the output will be loaded; refused where experts cannot be split so. May be "
            "repeated.",
            Number(min=1),
            effect=Effect.TUNING,
        ),
    ] = (1,)
    max_shard_size: Annotated[
        int | None, Option("Cut shards between experts.", Size(), effect=Effect.FILES, unset="5GB")
    ] = None

    @property
    def calibrated(self) -> bool:
        """Whether codes are chosen on a walk through the model."""
        return self.quant_method == "GPTQ"

    def unused(self) -> Mapping[str, str]:
        """What the other method needs."""
        if self.calibrated:
            unused = {**super().unused(), **({"min_expert_tokens": SEES_ALL} if self.gptq.calibrate == "all" else {})}
            if self.engine == "oneshot":
                unused["gptq_steps"] = "changes nothing with --engine oneshot: the library has GPTQ alone"
            return {**unused, "max_cpu_memory": IGNORED_MEMORY.format("one layer and some experts")}
        return {
            **super().unused(),
            **dict.fromkeys((*CALIBRATION, "engine"), "is for GPTQ only and changes nothing here"),
            "trust_remote_code": "changes nothing here: rounding to nearest runs no code of a model",
            "force_cpu": "changes nothing here: rounding to nearest never touches a GPU",
            "max_gpu_memory": "changes nothing here: rounding to nearest never touches a GPU",
            "max_cpu_memory": IGNORED_MEMORY.format("a few experts"),
        }
