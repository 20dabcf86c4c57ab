"""The commands that make an output."""

from __future__ import annotations

from ktconvert.pipeline.cli.command import SeveralValues, command
from ktconvert.pipeline.options import quantization
from ktconvert.pipeline.options.option_groups import ConversionOptions


def _convert(name: str, options: ConversionOptions) -> None:
    from ktconvert.pipeline.cli.making import convert  # imported here so that --help is instant

    convert(name, options)


@command("cpu", quantization.CpuOptions)
def cpu(options: quantization.CpuOptions) -> None:
    """Convert a checkpoint's routed experts to kt-kernel's AMX INT4/INT8 weights, or to MXFP4, FP8 or BF16.

    Safetensors in BF16, FP16, F32, FP8, MXFP8, MXFP4, NVFP4, packed INT4 or INT8, GPTQ, AWQ, and GGUF are read; no
    GPU is needed. Memory is bounded by a few experts (--scale gptq: by one layer), whatever the model's size.

    Examples:
      ktconvert cpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-INT4
      ktconvert cpu -i deepseek-ai/DeepSeek-V3.1 -o DeepSeek-V3.1-INT8 --quant-method int8 --threadpool-count 2
      ktconvert cpu -i Qwen3-30B-A3B-Q8_0.gguf --config Qwen/Qwen3-30B-A3B -o OUT --quant-method int8
      ktconvert cpu -i MODEL -o OUT --scale mse          INT4 of the same size with less error
      ktconvert cpu -i MODEL -o OUT --scale gptq --dataset texts.jsonl                  with the least
      ktconvert cpu -i MODEL -o OUT --quant-method int4,int8    OUT-int4 and OUT-int8, reading MODEL once
      ktconvert cpu -i MODEL -o OUT --dry-run            what would be done, from headers only
      ktconvert cpu -i MODEL -o OUT --layers 3-10        some layers only

    The same command again, or `ktconvert resume OUT`, finishes what was cut off.
    """
    _convert("cpu", options)


@command("gpu", quantization.GpuOptions, SeveralValues)
def gpu(options: quantization.GpuOptions) -> None:
    """Quantize a checkpoint's routed experts to W4A16 or W8A16, for the GPU: SGLang, vLLM and transformers load the
    output.

    What `cpu` reads is read here too; memory is bounded by a few experts (RTN) or by one layer (GPTQ),
    whatever the model's size. All other tensors are copied as they are.

    Examples:
      ktconvert gpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-W4A16 --quant-type W4A16   GPTQ, on ultrachat_200k
      ktconvert gpu -i /models/Qwen3-30B-A3B -o OUT --dataset texts.jsonl --num-calibration-samples 128
      ktconvert gpu -i deepseek-ai/DeepSeek-V3.1 -o DeepSeek-V3.1-W8A16 --quant-method RTN       no calibration
      ktconvert gpu -i MODEL -o OUT --dry-run                     what would be done, and what it takes

    The same command again, or `ktconvert resume OUT`, finishes what was cut off.
    """
    _convert("gpu", options)


@command("calibrate", quantization.CalibrateOptions)
def calibrate(options: quantization.CalibrateOptions) -> None:
    """Measure what a model's routed experts read: how often each is chosen, and how important each input is.

    MODEL is a directory, a .safetensors file, or a hub id (org/name). Its samples go through the model with one layer
    in memory, as for `gpu`'s GPTQ, and nothing is quantized. The folder gets imatrix.gguf, counts.safetensors and
    statistics.json.

    Examples:
      ktconvert calibrate /models/Qwen3-30B-A3B --output /models/Qwen3-30B-A3B-statistics       on ultrachat_200k
      ktconvert calibrate /models/Qwen3-30B-A3B --output DIR --dataset book.txt --max-sequence-length 512
      ktconvert calibrate deepseek-ai/DeepSeek-V3.1 --output DIR --dry-run                      what it takes

    The same command again, or `ktconvert resume DIR`, finishes what was cut off.
    """
    _convert("calibrate", options)


@command("dequantize", quantization.DequantizeOptions)
def dequantize(options: quantization.DequantizeOptions) -> None:
    """Write a quantized checkpoint as a BF16 release: a whole model for any loader.

    SRC is a directory, a .safetensors file, or a hub id (org/name); OUT is the output directory. Every quantized weight
    becomes BF16, all other tensors stay as they are, and config.json no longer says that the model is quantized. Memory
    is bounded by some MiB, whatever the model's size.

    Examples:
      ktconvert dequantize /models/DeepSeek-V3.1 /models/DeepSeek-V3.1-BF16
      ktconvert dequantize moonshotai/Kimi-K2-Thinking Kimi-K2-Thinking-BF16 --dry-run

    The same command again, or `ktconvert resume OUT`, finishes what was cut off.
    """
    _convert("dequantize", options)


@command("merge", quantization.MergeOptions)
def merge(options: quantization.MergeOptions) -> None:
    """Turn loose per-layer folders of .kt files, ours or kt-kernel's, into safetensors with an
    index. Can be resumed.

    Examples:
      ktconvert merge -i /models/loose -o /models/merged
      ktconvert merge -i /models/loose -o /models/merged -r /models/Qwen3-30B-A3B    with config and tokenizer
    """
    _convert("merge", options)


@command("merge-adapter", quantization.MergeAdapterOptions)
def merge_adapter(options: quantization.MergeAdapterOptions) -> None:
    """Fold a LoRA adapter into its model: a checkpoint in BF16, which `cpu` and `gpu` convert and any loader reads.

    MODEL is a directory, a .safetensors file, or a hub id (org/name); what is quantized in it becomes BF16 first.
    W + scaling * B A is computed in float32 and rounded once. Memory is bounded by a few matrices. Can be resumed.

    Examples:
      ktconvert merge-adapter /models/Qwen3-30B-A3B --adapter ADAPTER -o /models/Qwen3-30B-A3B-tuned
      ktconvert cpu -i /models/Qwen3-30B-A3B-tuned -o /models/Qwen3-30B-A3B-tuned-INT4
    """
    _convert("merge-adapter", options)


@command("resplit", quantization.ResplitOptions)
def resplit(options: quantization.ResplitOptions) -> None:
    """Rewrite OUTPUT, experts of `cpu` or `merge` or kt-kernel, as NEW, for another number of NUMA nodes.

    MXFP4, FP8 and BF16 keep every value, and so do gate and up projections of AMXINT4 and AMXINT8. So does their down
    projection where the new number is a multiple of the old one; else its columns are rounded once more where parts
    are put together, and the plan says by how much. Can be resumed.

    Examples:
      ktconvert resplit /models/Qwen3-30B-A3B-INT8 /models/Qwen3-30B-A3B-INT8-4 --threadpool-count 4
      ktconvert resplit OUT NEW --threadpool-count 1 --against MODEL --dry-run      or is converting again better?
    """
    _convert("resplit", options)


@command("resume", quantization.ResumeOptions)
def resume(options: quantization.ResumeOptions) -> None:
    """Finish a conversion that was cut off. Its options need not be repeated: the plan is stored beside the output.

    Examples:
      ktconvert resume /models/Qwen3-30B-A3B-INT8 --dry-run    what is done, what is left, and why
      ktconvert resume /models/Qwen3-30B-A3B-INT8
    """
    from ktconvert.pipeline.cli.making import go_on

    go_on(options)
