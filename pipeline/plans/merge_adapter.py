"""The plan of `ktconvert merge-adapter`: a whole checkpoint in BF16, with an adapter folded into its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ktconvert.layouts.checkpoints.adapter import CONFIG, WEIGHTS, read_adapter
from ktconvert.layouts.errors import KtconvertError
from ktconvert.layouts.files import publish
from ktconvert.pipeline.engine.plan import Plan, Request
from ktconvert.pipeline.options.quantization import MergeAdapterOptions
from ktconvert.pipeline.plans.dequantize import plan_dequantize
from ktconvert.pipeline.stages.add_adapter import merged
from ktconvert.pipeline.stages.copy_tensors import OtherTensor


def plan_merge_adapter(request: Request[MergeAdapterOptions]) -> Plan:
    """Of headers and the adapter's hash. Raises InputError or UnsupportedError for one of another checkpoint."""
    plan, folder = plan_dequantize(request, partial(_with_adapter, request)), request.options.adapter
    return replace(plan, reads=(*plan.reads, folder / CONFIG, folder / WEIGHTS))


def _with_adapter(
    request: Request[MergeAdapterOptions], tensors: Sequence[OtherTensor]
) -> tuple[Sequence[OtherTensor], str]:
    folder = request.options.adapter
    deltas = read_adapter(folder)
    try:
        made, count = merged(tensors, deltas, publish.sha256_file(folder / WEIGHTS))
    except KtconvertError as error:
        raise error.at(folder) from error
    return made, f"the adapter {folder.name} is added to {count} tensors, each rounded to BF16 once"
