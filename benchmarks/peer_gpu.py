"""llmcompressor's entry points for the same weights, each in a new process, like `ktconvert gpu`.

    peer_gpu.py model_free_ptq MODEL OUT TYPE
    peer_gpu.py oneshot-RTN MODEL OUT TYPE
    peer_gpu.py oneshot-GPTQ MODEL OUT TYPE DATASET.jsonl SAMPLES LENGTH

The ignore list is ours, so that all quantize the same linears. GPTQ has the settings of kt-kernel's
convert_gpu_weights.py, for rows with a text.
"""

import json
import sys
from pathlib import Path


def model_free(model: str, out: str, scheme: str) -> None:
    """Quantize shard by shard, without the model's class; one worker per CPU."""
    import os

    from llmcompressor import model_free_ptq

    workers = len(os.sched_getaffinity(0))
    model_free_ptq(model, out, scheme, ignore=our_ignore_list(model), max_workers=workers, device="cpu")


def oneshot(method: str, model: str, out: str, scheme: str, *data: str) -> None:
    """Quantize with the whole model in memory."""
    import torch
    import transformers
    from llmcompressor import oneshot as library
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    whole_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    settings = {"targets": "Linear", "scheme": scheme, "ignore": our_ignore_list(model)}
    if method == "RTN":
        library(model=whole_model, recipe=QuantizationModifier(**settings), output_dir=out)
        return
    from datasets import Dataset

    path, samples, length = data[0], int(data[1]), int(data[2])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()[:samples]]
    tokens = tokenizer(rows, padding=False, max_length=length, truncation=True, add_special_tokens=False)
    library(
        model=whole_model,
        dataset=Dataset.from_dict(dict(tokens)).shuffle(seed=42),
        recipe=GPTQModifier(dampening_frac=0.1, **settings),
        output_dir=out,
        max_seq_length=length,
        num_calibration_samples=samples,
    )


def our_ignore_list(model: str) -> list[str]:
    """Return the ignore list that ktconvert writes to quantization_config."""
    from ktconvert.layouts.checkpoints.recognition import recognize
    from ktconvert.layouts.outputs.ignore import make_ignore_list
    from ktconvert.layouts.sources.source import open_checkpoint

    return list(make_ignore_list(recognize(open_checkpoint(model))))


if __name__ == "__main__":
    method, *arguments = sys.argv[1:]
    if method == "model_free_ptq":
        model_free(*arguments)
    else:
        oneshot(method.removeprefix("oneshot-"), *arguments)
