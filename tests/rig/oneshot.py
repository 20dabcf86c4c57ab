"""llmcompressor's own GPTQ, called as kt-kernel's convert_gpu_weights.py calls it: the oracle of `ktconvert gpu`.

It runs in a process of its own. Two faults are corrected: samples keep the order in which
they are passed (the library shuffles), and decoder layers get a causal mask (the library gives some families none).
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rig.model_server import model_server

MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")


class Job(NamedTuple):
    """A model to quantize into `out`.

    ids       token ids, one list per sample
    repaired  give decoder layers a causal mask

    `actorder` is the library's default, as in the script.
    """

    model: Path
    out: Path
    ids: Sequence[Sequence[int]]
    scheme: str = "W4A16"
    group: int = 128
    dampening: float = 0.1
    repaired: bool = True
    calibrate_all: bool = True


def run(jobs: Sequence[Job], threads: int = 1) -> list[dict[str, Any]]:
    """Do the jobs in one process, which takes long to start, and return a report on each.

    A report is {"masks": {attention: ["causal", "none" or "other"]}, "routed": {experts: [tokens routed to each]}}.
    """
    documents = []
    for job in jobs:
        ids, ignore = [list(map(int, sample)) for sample in job.ids], ignored_linears(job.model)
        documents.append(job._asdict() | {"model": str(job.model), "out": str(job.out), "ids": ids, "ignore": ignore})
    path = jobs[0].out.with_suffix(".jobs")
    path.write_text(json.dumps(documents))
    log, env = path.with_suffix(".log"), {"CUDA_VISIBLE_DEVICES": ""}
    result = model_server().run([path, str(threads)], log, env, program="rig.oneshot:do_jobs")
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(report_path(job.out).read_text()) for job in jobs]


def report_path(out: Path) -> Path:
    """Return the path of the report on an output."""
    return out.with_name(f"{out.name}.report")


def ignored_linears(model: Path) -> list[str]:
    """Return the linears that `ktconvert gpu` ignores, so that both quantize the same linears."""
    from ktconvert.layouts.checkpoints.recognition import recognize
    from ktconvert.layouts.outputs.ignore import make_ignore_list
    from ktconvert.layouts.sources.source import open_checkpoint

    return list(make_ignore_list(recognize(open_checkpoint(str(model)))))


def main(job: dict[str, Any]) -> None:
    """Do one job, and write its report."""
    import torch
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    report: dict[str, Any] = {"masks": {}, "routed": {}}
    samples = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} for ids in job["ids"]]
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    scheme = preset_name_to_scheme(job["scheme"], ["Linear"])
    scheme.weights.group_size = job["group"]
    recipe = {"config_groups": {"group_0": scheme}, "ignore": job["ignore"], "dampening_frac": job["dampening"]}
    with repair_masks(model) if job["repaired"] else contextlib.nullcontext():
        watch(model, report)
        data = {
            "dataset": torch.utils.data.DataLoader(samples, batch_size=None),
            "num_calibration_samples": len(samples),
        }
        data |= {"max_seq_length": max(map(len, job["ids"])), "moe_calibrate_all_experts": job["calibrate_all"]}
        oneshot(model=model, recipe=GPTQModifier(**recipe), output_dir=job["out"], **data)
    report["masks"] = {name: sorted(kinds) for name, kinds in report["masks"].items()}
    # Each sample passes through each layer twice: before and after the layer is quantized.
    report["routed"] = {name: [count // 2 for count in counts] for name, counts in report["routed"].items()}
    report_path(Path(job["out"])).write_text(json.dumps(report))


@contextlib.contextmanager
def repair_masks(model: Any) -> Iterator[None]:
    """Build masks for eager attention, with which the library calibrates; its tracing loses that setting."""
    modeling = sys.modules[type(model).__module__]
    original = {name: getattr(modeling, name) for name in MASKS if hasattr(modeling, name)}

    def eager(make: Any) -> Any:
        def construct(*, config: Any, **options: Any) -> Any:
            config._attn_implementation = "eager"
            return make(config=config, **options)

        return construct

    for name, make in original.items():
        setattr(modeling, name, eager(make))
    try:
        yield
    finally:
        for name, make in original.items():
            setattr(modeling, name, make)


def watch(model: Any, report: dict[str, Any]) -> None:
    """Record which mask each attention module gets, and how many tokens are routed to each expert."""
    import torch
    from llmcompressor.modeling.moe.linearize import linearize_moe

    def attention_hook(name: str) -> Any:
        def hook(_module: Any, _given: Any, named: dict[str, Any]) -> None:
            report["masks"].setdefault(name, set()).add(mask_kind(named["attention_mask"]))

        return hook

    def experts_hook(name: str, count: int) -> Any:
        def hook(_module: Any, inputs: Any) -> None:
            counts = torch.bincount(inputs[1].flatten(), minlength=count).tolist()
            before = report["routed"].get(name, [0] * count)
            report["routed"][name] = [a + b for a, b in zip(before, counts, strict=True)]

        return hook

    linearize_moe(model)  # oneshot would do this, and would replace the modules
    for name, module in model.named_modules():
        if name.endswith(".self_attn"):
            module.register_forward_pre_hook(attention_hook(name), with_kwargs=True)
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(experts_hook(name, module.num_experts))


def mask_kind(mask: Any) -> str:
    """Return "causal" if a mask that is added to scores hides exactly the later tokens."""
    import torch

    if mask is None:
        return "none"
    if mask.ndim != 4 or not mask.is_floating_point():
        return "other"
    later = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    hidden, visible = mask[0, 0][later], mask[0, 0][~later]
    return "causal" if bool((hidden == torch.finfo(mask.dtype).min).all() and (visible == 0).all()) else "other"


def do_jobs() -> None:
    """Do the jobs of the file and with the number of threads that sys.argv names."""
    import torch

    _, path, threads = sys.argv
    torch.set_num_threads(int(threads))
    for each in json.loads(Path(path).read_text()):
        main(each)
