"""The plan of `ktconvert merge-adapter`: a whole BF16 checkpoint with an adapter folded into its weights."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ktconvert.layouts.checkpoints.adapter import require_adapter
from ktconvert.layouts.checkpoints.adapter_merging import FILES, RECORDED, add_adapter
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.files import publish
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.pipeline.engine.plan import Plan, identify_by_stat
from ktconvert.pipeline.options.conversion_options import MergeAdapterOptions
from ktconvert.pipeline.plans.dequantize import plan_dequantize


def plan_merge_adapter(options: MergeAdapterOptions) -> Plan:
    """Build the plan from headers and the adapter. Raises InputError or UnsupportedError if they do not fit."""
    folder = options.adapter
    require_adapter(folder)
    # The files are small, so they are identified by their content.
    files = {
        folder / name: msgspec.structs.replace(
            identify_by_stat(folder / name, f"{RECORDED}{name}"), sha256=publish.sha256_file(folder / name)
        )
        for name in FILES
        if (folder / name).is_file()
    }
    identity = "".join(str(file.sha256) for file in files.values())

    def change(
        source: TensorSource, tensors: Sequence[OutputTensor]
    ) -> tuple[Sequence[OutputTensor], str, Sequence[str]]:
        changed, warnings = add_adapter(folder, identity, source, tensors)
        count = sum(tensor.deltas is not None for tensor in changed)
        return changed, f"the adapter {folder.name} is merged into {count} tensors, each rounded to BF16 once", warnings

    return plan_dequantize(options, change, files)
