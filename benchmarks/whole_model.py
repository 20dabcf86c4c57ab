#!/usr/bin/env python3
"""A whole model in the shape of Qwen3-30B-A3B: tokens per second of `ktconvert run` and of llama.cpp, from one GGUF.

python benchmarks/whole_model.py                                    only ours; 2 GB of disk, two minutes
python benchmarks/whole_model.py --llama-bench PATH --layers 8      also llama.cpp; 3 GB of disk, four minutes

Both read the same experts. llama.cpp also reads attention and output in Q8_0; ours takes these from a checkpoint, in
BF16 and rounded to int8. The vocabulary has 4096 tokens, so that the output is small, as it is
next to 48 layers. The second table divides the time of a new token among the parts of the model.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import models

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "qwen3-moe-small"
WORD = "import os\n"  # two tokens
NEW_TOKENS = 64
FORMS = ("stored", "int8")  # --non-experts


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=llama_cpp.TYPES, default="Q4_0", help="type of the experts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program")
    parser.add_argument("--dir", type=Path, help="where the temporary directory is created")
    parser.add_argument("--generate", help=argparse.SUPPRESS)  # the arguments of a process of ours
    options = parser.parse_args()
    if options.generate:
        print(json.dumps(generate(**json.loads(options.generate))))
        return
    with tempfile.TemporaryDirectory(prefix="ktconvert-whole-", dir=options.dir) as folder:
        weights, trunk = Path(folder) / "model.gguf", Path(folder) / "trunk"
        llama_cpp.write_model(weights, options.type, experts=True, layers=options.layers)
        write_trunk(trunk, options.layers)
        sizes = {"prompt": options.prompt, "threads": options.threads}
        print(
            f"{options.layers} layers, experts in {options.type}, {options.threads} threads; best of {options.rounds}"
        )
        print(f"{'':16} {'prefill, tokens/s':>18} {'decode, tokens/s':>18}")
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in FORMS}
        for _ in range(options.rounds):
            for name in FORMS:
                arguments = {"trunk": str(trunk), "weights": str(weights), "non_experts": name, **sizes}
                command = [sys.executable, __file__, "--generate", json.dumps(arguments)]
                rounds[name].append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
        for name in FORMS:
            prefill, decode = (min(each[key] for each in rounds[name]) for key in ("prefill", "decode"))
            print(f"{'ktconvert ' + name:16} {options.prompt / prefill:18.1f} {1 / decode:18.1f}")
        if options.llama_bench:
            run = [options.llama_bench, weights]
            prefill, decode = (
                min(llama_cpp.run_llama_bench(*run, tokens, options.threads) for _ in range(options.rounds))
                for tokens in (options.prompt, 1)
            )
            print(f"{'llama.cpp':16} {options.prompt / prefill:18.1f} {1 / decode:18.1f}")
        print(f"\nms of a new token in ktconvert ({', '.join(FORMS)})")
        best = [min(rounds[name], key=lambda each: each["decode"])["parts"] for name in FORMS]
        for part in best[0]:
            print(f"{part:20} " + " ".join(f"{1e3 * parts[part]:8.2f}" for parts in best))


def write_trunk(folder: Path, layers: int) -> None:
    """Write the config, the tokenizer, and all tensors except those of the experts."""
    shape, head = llama_cpp.SHAPE, llama_cpp.HEAD
    tensors, config = models.qwen3(layers, shape.experts)
    tensors = [tensor for tensor in tensors if ".experts." not in tensor.name and "embed_tokens" not in tensor.name]
    vocabulary = (llama_cpp.VOCABULARY, shape.hidden)
    tensors += [models.Tensor(name, "BF16", vocabulary) for name in ("model.embed_tokens.weight", "lm_head.weight")]
    for layer in range(layers):
        base = f"model.layers.{layer}.self_attn"
        tensors += [models.Tensor(f"{base}.{name}_norm.weight", "BF16", (head,)) for name in "qk"]
    config |= {
        "num_attention_heads": llama_cpp.HEADS,
        "num_key_value_heads": llama_cpp.KV_HEADS,
        "head_dim": head,
        "vocab_size": llama_cpp.VOCABULARY,
        "dtype": "bfloat16",
        "norm_topk_prob": True,
    }
    models.write_model(folder, tensors, config, shards=1, fill=models.gaussian())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, folder)


# --- a process of ours ----------------------------------------------------------------------------


def generate(trunk: str, weights: str, non_experts: str, prompt: int, threads: int) -> dict[str, Any]:
    """Return the seconds of the prompt and of a new token, and those of each part of the model for a new token."""
    from ktconvert.pipeline.models import generating, loading

    choice = loading.ModelChoice(model=trunk, cpu_weights=Path(weights), non_experts=non_experts, threads=threads)
    model, tokenizer = loading.load_model_and_tokenizer(choice)
    model.generation_config.eos_token_id = None
    inputs = generating.prompt_inputs(tokenizer, WORD * (prompt // 2))

    def answer() -> generating.Speed:
        options = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0}
        return generating.generate_text(model, tokenizer, inputs, emit=lambda text: None, **options)[1]

    answer()  # a first one is slower
    speed = answer()
    parts = collections.Counter[str]()
    time_parts(model, parts)
    timed = answer()
    step = timed.decode / (timed.new - 1)
    seconds = {name: total / (timed.new - 1) for name, total in parts.items()}
    return {
        "prefill": speed.prefill,
        "decode": speed.decode / (speed.new - 1),
        "parts": seconds | {"other": step - sum(seconds.values()), "all, while timed": step},
    }


def time_parts(model: Any, parts: collections.Counter[str]) -> None:
    """Add the seconds of each part of the model to `parts` when it computes one token."""
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        part = {"self_attn": "attention", "experts": "experts", "gate": "router", "lm_head": "output"}.get(last)
        if part is None and last in ("input_layernorm", "post_attention_layernorm", "norm"):
            part = "norms"
        if part is not None:
            module.forward = time_calls(module.forward, part, parts)


def time_calls(forward: Callable[..., Any], part: str, parts: collections.Counter[str]) -> Callable[..., Any]:
    """Return a function that calls `forward`, and adds its seconds if the input is one token."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        start = time.perf_counter()
        result = forward(*args, **kwargs)
        if hidden.numel() == hidden.shape[-1]:
            parts[part] += time.perf_counter() - start
        return result

    return timed


if __name__ == "__main__":
    main()
