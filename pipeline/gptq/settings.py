"""The settings of GPTQ in the form that its stage takes, and what follows from them before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.outputs import Format
from ktconvert.pipeline.options.option_groups import Gptq
from ktconvert.pipeline.options.quantization import QuantizationOptions
from ktconvert.pipeline.walk import footprint
from ktconvert.pipeline.walk.calibration_data import Calibration, WalkSettings

INSTEAD = "use --quant-method RTN (gpu) or --scale mse (cpu)"  # advice where a model cannot be calibrated


@dataclass(frozen=True)
class Settings(WalkSettings):
    """The settings of GPTQ: those of the walk, those of compensate.Compensate, and the engine: "stream", or "oneshot",
    llmcompressor's own, for comparison.
    """

    dampening: float
    rounding: str
    sees: str
    floor: int
    steps: str
    engine: str


def settings_of(model: MoeModel, options: QuantizationOptions) -> Settings:
    machine = options.machine.machine
    assert machine is not None  # the plan has recorded it
    gptq = options.gptq
    return Settings(
        calibration=Calibration.of(options.samples),
        dampening=gptq.dampening_frac,
        rounding=options.rounding,
        sees=gptq.calibrate,
        floor=gptq.min_expert_tokens,
        steps=gptq.gptq_steps,
        group=group_size(model, int(machine["group_bytes"]), gptq),
        engine=options.engine,
        trust_remote_code=options.machine.trust_remote_code,
        machine=machine,
        fingerprint=options.weights,
    )


def group_size(model: MoeModel, budget: int, options: Gptq) -> int:
    """How many experts of the widest layer, with Hessians and working copies, fit into `budget` bytes; at least one."""

    def bytes_of(hidden: int, width: int) -> int:
        hessians = 4 * width * width + (4 * hidden * hidden if options.calibrate == "routed" else 0)
        slopes = 4 * (2 * width) ** 2 if options.gptq_steps == "full" else 0
        return 2 * 3 * hidden * width * 2 + hessians + slopes  # weights as they are, and rounded

    return footprint.experts_at_a_time(model, budget, bytes_of)


def facts(options: QuantizationOptions) -> dict[str, Any]:
    gptq, data = options.gptq, Calibration.of(options.samples).facts()
    settings = {"dampening": gptq.dampening_frac, "calibrate": gptq.calibrate, "steps": gptq.gptq_steps}
    return {"calibration": {**data, **settings, "engine": options.engine}}


def shape_of(model: MoeModel, fmt: Format, settings: Settings, options: QuantizationOptions) -> footprint.WalkShape:
    return footprint.shape_of(
        model,
        options.samples,
        quantizes=True,
        calibrate=settings.sees,
        statistics=options.gptq.save_statistics is not None,
        bits=max(own.encoding.grid.bits for own in fmt.formats),
        group=settings.group,
        outputs=settings.steps == "full",
        on_gpu=settings.machine["device_type"] != "cpu",
    )
