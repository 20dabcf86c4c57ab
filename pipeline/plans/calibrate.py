"""The plan of `ktconvert calibrate`: from options and a checkpoint's headers to a chain, sizes and refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError
from ktconvert.pipeline.engine.plan import CONFIG, Assembly, Plan, Request, tool_version
from ktconvert.pipeline.plans import statistics
from ktconvert.pipeline.plans.checkpoint import (
    CheckpointFiles,
    collector_at_rest,
    files_named,
    require_whole,
    rows_for,
    shape_facts,
    source_files,
)
from ktconvert.pipeline.stages import calibrate_layers, chain, copy_tensors
from ktconvert.pipeline.walk import environment as machine
from ktconvert.pipeline.walk import needs
from ktconvert.pipeline.walk.calibration import Calibration
from ktconvert.pipeline.walk.settings import Walking


def require_available() -> None:
    """Raise KtconvertError where something is not installed."""
    machine.require("calibrate", machine.WALK)


def this_machine(tuning: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of this machine that can change sums."""
    threads, limit = tuning["cpuinfer_threads"], tuning["max_gpu_memory"]
    return machine.this_machine(threads, tuning["force_cpu"], limit, machine.WALK_PACKAGES)


@collector_at_rest()
def plan_calibrate(request: Request, hashed: Callable[[int], None] | None = None) -> Plan:
    """Read headers only, and say everything that will happen. hashed is called with the number of bytes as
    --verify-inputs reads them.

    Raises UnsupportedError, InputError or KtconvertError before any weight is read.
    """
    require_available()
    chosen = request.settings
    source = open_checkpoint(request.input, request.tuning.get("revision"))
    require_whole(source, "`ktconvert calibrate`")
    if not (source.root / CONFIG).is_file():
        raise InputError(f"{source.root}: has no {CONFIG}, which tells how the model computes; download it too.")
    model = recognise(source, rows_for(chosen.get("arch_file")))
    chain.require_calibratable(model, calibrate_layers.INSTEAD)
    group = needs.experts_at_a_time(model, int(chosen["machine"]["group_bytes"]), needs.squares_bytes)
    walking = Walking(Calibration.of(chosen), group, chosen["trust_remote_code"], chosen["machine"])
    shape = needs.shape_of(model, chosen, "calibrate", group=group, on_gpu=chosen["machine"]["device_type"] != "cpu")
    rest = copy_tensors.decoded_others(other_tensors(source, model.expert_tensor_names(), model.quantization))
    about = statistics.describe(model, request)
    files = source_files(source, request, hashed)
    return Plan(
        request=request,
        source=files,
        reads=(*source.paths(), *files_named(request)),
        stages=(calibrate_layers.stage(model, walking, {tensor.key: tensor for tensor in rest}, about),),
        facts={
            "architecture": model.arch.name,
            **shape_facts(model, model.layers),
            "data": dict(about["data"]),
        },
        notes=tuple(_notes(model)),
        assembly=Assembly(companions=(), config=None, loose=True),
        conversion=Calibrating(CheckpointFiles(source, files), request, shape, about),
        scratch_bytes=needs.needs(shape).disk,
        advice=tuple(needs.advice(shape)),
        remedies=needs.REMEDIES_TO_CALIBRATE,
    )


@dataclass(frozen=True)
class Calibrating:
    """`ktconvert calibrate`; a Conversion."""

    files: CheckpointFiles
    request: Request
    shape: needs.Shape
    about: Mapping[str, Any]

    def peak_memory(self, threads: int) -> int:
        """As the walk needs it, whatever the number of threads."""
        return needs.needs(self.shape).host

    def require_ready(self) -> None:
        """Calibration goes on only on the machine where it began."""
        tuning = self.request.tuning
        begun, now = self.request.settings["machine"], this_machine(tuning)
        machine.require_same(begun, now, self.request.output, tuning["allow_machine_change"])

    def card(self, stats: Sequence[Mapping[str, Any]]) -> bytes:
        """README.md of the output."""
        return statistics.card(self.about, list(stats), tool_version())

    def check(self, assembled: Path) -> None:
        """Raise InputError for files that could not be read back."""
        from ktconvert.layouts.statistics.folder import read_statistics

        read_statistics(assembled)


def _notes(model: MoeModel) -> list[str]:
    notes = list(model.common_notes)
    if model.mtp_tensors:
        which = f"layer {', '.join(map(str, model.mtp_layers))}" if model.mtp_layers else "blocks called mtp"
        notes.append(f"the MTP part ({which}) is left out: it does not take part in the walk")
    return notes
