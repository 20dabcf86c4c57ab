"""llmcompressor's own GPTQ, called as kt-kernel's convert_gpu_weights.py calls it, in a process of its own: the oracle of `ktconvert gpu`.

Two things are set right first: each sample comes in the order in which it is given (the library shuffles), and decoder layers get a
causal mask (the library gives some families none). As a script this file is that process: `oneshot.py JOB.json`.
Tests load this file by its path, as killpoint.py says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
TIMEOUT = (
    900.0  # seconds; importing the library takes seven, a small model as many again, a loaded machine many times that
)


class Tensor(NamedTuple):
    """One tensor as it is stored."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def oneshot_gptq(
    model: Path,
    out: Path,
    ids: Iterable[Sequence[int]],
    scheme: str = "W4A16",
    *,
    dampening: float = 0.1,
    repaired: bool = True,
    calibrate_all: bool = True,
    threads: int = 1,
) -> dict[str, Any]:
    """Quantize `model` with these token ids, one sample each, into `out`; `actorder` is the library's default, as in the script.

    Returns {"masks": {layer: [what its attention got: "causal", "none" or "other"]}, "routed": {experts: [tokens of each]}}.
    """
    job = {
        "model": str(model),
        "out": str(out),
        "ids": [[int(i) for i in sample] for sample in ids],
        "scheme": scheme,
        "dampening": dampening,
        "repaired": repaired,
        "calibrate_all": calibrate_all,
        "ignore": ignored(model),
        "report": f"{out}.json",
    }
    path = out.with_name(f"{out.name}.job")
    path.write_text(json.dumps(job))
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, str(path)], env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(Path(job["report"]).read_text())
    return report


def ignored(model: Path) -> list[str]:
    """What `ktconvert gpu` names in quantization_config, so that both quantize the same linears."""
    from ktconvert.layouts.checkpoints.experts import recognise
    from ktconvert.layouts.checkpoints.source import open_checkpoint
    from ktconvert.layouts.ignore import ignore_list

    return list(ignore_list(recognise(open_checkpoint(str(model)))))


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, told in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = told["data_offsets"]
                assert name not in found, name
                found[name] = Tensor(told["dtype"], tuple(told["shape"]), data[start + first : start + last])
    return found


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are missing, extra or not the same."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


# ---- the process of its own ------------------------------------------------------------------------------------------


def main(job: dict[str, Any]) -> None:
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    if job["repaired"]:
        repair(sys.modules[type(model).__module__])
    report: dict[str, Any] = {"masks": {}, "routed": {}}
    watch(model, report)
    samples = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} for ids in job["ids"]]
    oneshot(
        model=model,
        dataset=torch.utils.data.DataLoader(samples, batch_size=None),
        recipe=GPTQModifier(
            targets="Linear", scheme=job["scheme"], ignore=job["ignore"], dampening_frac=job["dampening"]
        ),
        output_dir=job["out"],
        max_seq_length=max(map(len, job["ids"])),
        num_calibration_samples=len(samples),
        moe_calibrate_all_experts=job["calibrate_all"],
    )
    report["masks"] = {name: sorted(kinds) for name, kinds in report["masks"].items()}
    Path(job["report"]).write_text(json.dumps(report))


def repair(modeling: Any) -> None:
    """Have this module's masks made for eager attention: the library calibrates with it, and what it traces forgets that."""

    def eager(real: Any) -> Any:
        def make(*, config: Any, **given: Any) -> Any:
            config._attn_implementation = "eager"
            return real(config=config, **given)

        return make

    for name in MASKS:
        if hasattr(modeling, name):
            setattr(modeling, name, eager(getattr(modeling, name)))


def watch(model: Any, report: dict[str, Any]) -> None:
    """Record which mask each attention module gets, and how many tokens of the samples are routed to each expert."""
    import torch

    def kind(mask: Any) -> str:
        if mask is None:
            return "none"
        if mask.ndim != 4 or mask.dtype == torch.bool:
            return "other"
        upper = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
        least = torch.finfo(mask.dtype).min
        hidden, seen = mask[0, 0][upper], mask[0, 0][~upper]
        return "causal" if bool((hidden == least).all() and (seen == 0).all()) else "other"

    def attention(name: str) -> Any:
        def hook(_module: Any, _given: Any, named: dict[str, Any]) -> None:
            report["masks"].setdefault(name, set()).add(kind(named["attention_mask"]))

        return hook

    def experts(name: str) -> Any:
        def hook(_module: Any, given: Any) -> None:
            counts = torch.bincount(given[1].flatten(), minlength=counted[name]).tolist()
            before = report["routed"].get(name, [0] * len(counts))
            report["routed"][name] = [a + b for a, b in zip(before, counts, strict=True)]

        return hook

    from llmcompressor.modeling.moe.linearize import linearize_moe

    linearize_moe(model)
    counted = {name: m.num_experts for name, m in model.named_modules() if name.endswith(".experts")}
    for name, module in model.named_modules():
        if name.endswith(".self_attn"):
            module.register_forward_pre_hook(attention(name), with_kwargs=True)
        elif name in counted:
            module.register_forward_pre_hook(experts(name))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
