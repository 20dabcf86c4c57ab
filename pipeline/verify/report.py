"""The results of verify, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ktconvert.layouts.outputs import cpu_card, decoded
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.measuring import Measure, formats_by_names
from ktconvert.layouts.outputs.output import Output
from ktconvert.pipeline.ui.text import aligned, joined, plural, size
from ktconvert.pipeline.verify.checks import ProjectionErrors, worst
from ktconvert.pipeline.verify.structure import sizes_of
from ktconvert.pipeline.verify.verify import Report

CHECKPOINT = "checkpoint"  # as it was released
SHOWN = 10  # problems printed per check; --json has them all
ARRANGEMENTS = {
    "merged": "{shards} safetensors shards",
    "native": "{shards} safetensors shards, as kt-kernel's native method reads them",
    "loose": "loose .kt folders",
    "pack-quantized": "a whole model for the GPU, pack-quantized, in {shards} safetensors shards",
    CHECKPOINT: "a checkpoint, in {shards} safetensors shards",
    decoded.ARRANGEMENT: "a whole checkpoint, not quantized, in {shards} safetensors shards",
}


def facts(output: Output, measure: Measure) -> dict[str, Any]:
    """What an output is, by its bytes; who made it, by its manifest."""
    manifest, bare = output.manifest, decoded.ARRANGEMENT if output.manifest else CHECKPOINT
    arrangement = "loose" if output.loose else formats_by_names(output)[0].arrangement.name if output.methods else bare
    return {
        "output": str(output.root),
        "made_by": f"ktconvert {manifest.tool.version}" if manifest else None,
        "command": manifest.command if manifest else None,
        "arrangement": arrangement,
        **sizes_of(measure),
        **{name: output.facts[name] for name in ("scale", "too_few_tokens", "equalized") if name in output.facts},
        "layers": list(measure.shapes),
        "tensors": len(output.tensors),
        "expert_bytes": sum(s.nbytes for s in output.tensors.values()),
        "other_tensors": len(output.others),
        "other_bytes": sum(s.nbytes for s in output.others.values()),
        "shards": 0 if output.loose else len(output.shards),
    }


def facts_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    maker = f"{document['made_by']} {document['command']}" if document["made_by"] else "not ktconvert (no manifest)"
    arrangement = document["arrangement"]
    rows = [("output", document["output"]), ("made by", maker)]
    rows.append(("arrangement", ARRANGEMENTS[arrangement].format(**document)))
    others = f"{size(document['other_bytes'])} in {document['other_tensors']} tensors"
    if arrangement == decoded.ARRANGEMENT:
        return [*rows, ("weights", others)]
    rows += [
        ("method", document["method"]),
        *(("", f"{method}: layers {layers}") for method, layers in document.get("methods", {}).items()),
        *([("scales", document["scale"])] if "scale" in document else []),
        *([("too few tokens", "; ".join(document["too_few_tokens"]))] if "too_few_tokens" in document else []),
        *cpu_card.equalized(document),
        *([("NUMA parts", joined(document["numa"]))] if arrangement in ("merged", "loose") else []),
        ("layers", f"{len(document['layers'])} ({ranges(document['layers'])})"),
        ("experts", joined(document["experts"])),
        ("hidden size", joined(document["hidden"] or "unknown")),
        ("expert width", joined(document["intermediate"] or "unknown")),
    ]
    if arrangement == CHECKPOINT:
        return [*rows, ("weights", others)]
    rows.append(("weights", f"{size(document['expert_bytes'])} in {document['tensors']} tensors"))
    if document["backward"]:
        rows.append(("backward", "yes"))
    if document["other_tensors"]:
        rows.append(("other", f"{document['other_tensors']} tensors, {size(document['other_bytes'])}"))
    return rows


def document(report: Report) -> dict[str, Any]:
    return {
        "event": "verified",
        **facts(report.output, report.measure),
        "ok": not report.problems,
        "message": report.sentence,
        "against": report.against,
        "checks": [
            {"name": c.name, "ok": not c.problems, "result": c.result, "problems": list(c.problems)}
            for c in report.checks
        ],
        "notes": list(report.notes),
        "errors": [_finite(_figures(e)) for e in report.errors],
        "worst": [_finite(e._asdict()) for e in worst(report.errors)],
        "predictions": None if report.predictions is None else asdict(report.predictions),
    }


def lines(report: Report) -> list[str]:
    out = aligned(facts_rows(facts(report.output, report.measure)))
    results = [plural(len(c.problems), "problem") if c.problems else f"ok: {c.result}" for c in report.checks]
    named = zip([check.name for check in report.checks], results, strict=True)
    out += ["", *aligned([("check", "result"), *named])]
    for check in report.checks:
        if check.problems:
            out += ["", f"{check.name}:", *(f"  {problem}" for problem in check.problems[:SHOWN])]
            if len(check.problems) > SHOWN:
                out.append(f"  ... and {len(check.problems) - SHOWN} more (--json lists them all)")
    if report.errors:
        rows: list[tuple[str, ...]] = [("layer", "projection", "relative error", "cosine", "worst expert")]
        for e in report.errors:
            error, cosine = f"{e.figures['relative_error']:.4f}", f"{e.figures['cosine']:.5f}"
            own = f"{e.worst.expert} ({e.worst.relative_error:.4f})"
            rows.append((str(e.layer), e.projection, error, cosine, own))
        measured = len(report.errors[0].experts)
        out += ["", f"error against the source in BF16, {measured} experts per layer", *aligned(rows)]
        rows = []
        for w in worst(report.errors):
            linear = f"layer {w.layer}, expert {w.expert}, {w.projection}_proj"
            rows.append((linear, f"{w.relative_error:.4f}", f"cosine {w.cosine:.5f}"))
        out += ["", "worst experts", *aligned(rows, "  ")]
    return [*out, "", "verified" if not report.problems else "NOT verified"]


def _figures(e: ProjectionErrors) -> dict[str, Any]:
    of_worst = {"worst_expert": e.worst.expert, "worst_relative_error": e.worst.relative_error}
    return {"layer": e.layer, "projection": e.projection, "experts": len(e.experts), **e.figures, **of_worst}


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
