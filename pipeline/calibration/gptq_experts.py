"""GPTQ of one layer's experts: as a visitor in a layer run, or by llmcompressor's oneshot on the whole model.

`--engine oneshot` loads the whole model into memory; its purpose is to compare `--engine stream` with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings.encoding import Encoding, scales_to_f32
from ktconvert.layouts.errors import UnsupportedError, VerificationError
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.slices import LinearId, PackedSlices, Slicing, allocate_slices, cut_slices, join_slices
from ktconvert.pipeline.calibration.expert_visitors import ExpertGroup, ExpertWeights, StatisticsSpec
from ktconvert.pipeline.calibration.layered_model import bits_to_tensor, tensor_to_bits
from ktconvert.pipeline.models import pretrained
from ktconvert.pipeline.models.text_datasets import Ids
from ktconvert.pipeline.report.text import first_line
from ktconvert.quantizers import descent, gptq, predictions
from ktconvert.quantizers.reference import F32, e8m0_exponents

if TYPE_CHECKING:
    import torch

Scales = npt.NDArray[Any]  # the scales that Encoding.unpack_scales returns
WriteLinear = Callable[[int, str, PackedSlices], None]
# (expert, projection, importance of its columns [k] or None if its inputs are unknown) -> the linear, rounded to
# nearest. Raises InputError for a value that is not finite.
RoundLinear = Callable[[int, str, F32 | None], PackedSlices]
ReadLinear = Callable[[int, int, str], PackedSlices]  # (layer, expert, projection) -> the quantized linear
ONESHOT_TARGETS = r"re:.*layers\.\d+\..*experts\.\d+\.(gate|up|down)_proj$"


class _ErrorMetric(NamedTuple):
    """The factor of a Hessian, and the cost of errors; costs is None if the codes stay as GPTQ chose them."""

    factor: gptq.Factor
    costs: descent.Metric | None


@dataclass
class SharedFactors:
    """Results that all experts of a layer share: the error metric of gate and up, the factor of the outputs' F."""

    metric: _ErrorMetric | None = None
    outputs: predictions.RowFactor | None = None


@dataclass
class GptqVisitor:
    """Quantizes one layer's experts, starting with the scales of rounding to nearest.

    dampening         fraction of mean(diag(H)) that is added to the diagonal
    rounding          "library": codes are computed again from BF16 values with a division in BF16, as
                      compressed-tensors does, which moves one 8-bit code in 400 by one; "float32": GPTQ's own codes
    tokens            tokens that an expert is calibrated on, as in StatisticsSpec
    min_tokens        a linear that fewer tokens reached is rounded to nearest
    round_to_nearest  rounds a linear to nearest
    write_linear      receives the linears, in file order
    numa              NUMA slices of a linear
    steps             "plain": GPTQ only; "descent": errors are weighted by routing weights, and scales and codes
                      improved after GPTQ; "full": errors are also weighted by their effect on the predictions
    too_few_tokens    experts with linears that were rounded to nearest because too few tokens were routed to them
    not_factorized    linears that were rounded to nearest because their Hessian could not be factorized
    shared            results that all experts of the layer share
    """

    encoding: Encoding
    dampening: float
    rounding: str
    tokens: str
    min_tokens: int
    round_to_nearest: RoundLinear
    write_linear: WriteLinear
    numa: int = 1
    steps: str = "plain"
    too_few_tokens: list[int] = field(default_factory=list)
    not_factorized: list[LinearId] = field(default_factory=list)
    shared: SharedFactors = field(default_factory=SharedFactors)
    replaces_weights = True

    @property
    def statistics(self) -> StatisticsSpec:
        return StatisticsSpec(gptq.Hessian.empty, self.tokens, self.steps != "plain", self.steps == "full")

    def visit(self, group: ExpertGroup) -> Mapping[int, ExpertWeights]:
        """Quantize and write experts; return their dequantized weights.

        Raises VerificationError if statistics are not finite.
        """
        if group.portion_result is not None:
            return self._restore_result(group, group.portion_result)
        dequantized = {}
        for expert in group.weights:
            linears = self._quantize_expert(group, expert)
            for projection, (packed, _) in linears.items():
                self.write_linear(expert, projection, packed)
            values = {projection: rounded for projection, (_, rounded) in linears.items()}
            dequantized[expert] = replace(group.weights[expert], matrices=values)
        return dequantized

    def export_result(self, linears: Sequence[tuple[int, str, PackedSlices]]) -> dict[str, Any]:
        """Return a worker's result for `_restore_result`.

        linears  the linears that were written: expert, projection and slices
        """
        import torch

        stored_linears = [
            (expert, projection, [[torch.from_numpy(array) for array in arrays] for _, arrays in slices])
            for expert, projection, slices in linears
        ]
        return {"linears": stored_linears, "too_few": self.too_few_tokens, "fell_back": self.not_factorized}

    def _restore_result(self, group: ExpertGroup, result: Mapping[str, Any]) -> Mapping[int, ExpertWeights]:
        """Write the linears of a worker's result; return the weights of the group, which the worker has replaced."""
        for expert, projection, stored_slices in result["linears"]:
            hidden, width = group.weights[expert].matrices["down"].shape
            slices = Slicing(group.layer, hidden, width, self.numa).slices(expert, projection)
            arrays = [[tensor.cpu().numpy() for tensor in tensors] for tensors in stored_slices]
            self.write_linear(expert, projection, [*zip(slices, arrays, strict=True)])
        self.too_few_tokens += result["too_few"]
        self.not_factorized += result["fell_back"]
        return group.weights

    def _quantize_expert(self, group: ExpertGroup, expert: int) -> dict[str, tuple[PackedSlices, torch.Tensor]]:
        """Return each linear of an expert, and the BF16 values that its codes stand for."""
        has_few_tokens = group.token_counts[expert] < self.min_tokens
        linears: dict[str, tuple[PackedSlices, torch.Tensor]] = {}
        spec = self.statistics
        # Gate and up have the same inputs: they are quantized as one tall matrix.
        *gate_up, down = group.weights[expert].matrices
        for projections, only_routed in ((gate_up, not spec.shared_gate_up), ([down], spec.routed_down)):
            if has_few_tokens and only_routed:
                linears |= {p: self._round_with_values(group, expert, p) for p in projections}
            else:
                linears |= self._compensate(group, expert, projections)
        if has_few_tokens and spec.routed_down:
            self.too_few_tokens.append(expert)
        return linears

    def _round_with_values(self, group: ExpertGroup, expert: int, projection: str) -> tuple[PackedSlices, torch.Tensor]:
        import torch

        linear = self._round_to_nearest(group, expert, projection)
        decoded = [
            self.encoding.decode(tensors, numa_slice.n, numa_slice.k, slice(None)) for numa_slice, tensors in linear
        ]
        weight = group.weights[expert].matrices[projection]
        return linear, torch.from_numpy(join_slices(projection, decoded)).to(weight)

    def _round_to_nearest(self, group: ExpertGroup, expert: int, projection: str) -> PackedSlices:
        """Round a linear to nearest, weighted by the mean square of each input column (up to a factor) if known."""
        import torch

        hessian = _get_hessian(group, expert, projection)
        diagonal: F32 = torch.diagonal(hessian.sum).float().cpu().numpy().copy()
        return self.round_to_nearest(expert, projection, diagonal if diagonal.any() else None)

    def _initial_scales(self, group: ExpertGroup, expert: int, projection: str) -> Scales:
        """Return the scales of rounding a linear to nearest, [n, groups]."""
        assert self.encoding.unpack_scales is not None
        linear = self._round_to_nearest(group, expert, projection)
        index = self.encoding.scale_index
        scales = [
            self.encoding.unpack_scales(stored[index], numa_slice.n, numa_slice.k) for numa_slice, stored in linear
        ]
        return join_slices(projection, scales)

    def _compensate(
        self, group: ExpertGroup, expert: int, projections: Sequence[str]
    ) -> dict[str, tuple[PackedSlices, torch.Tensor]]:
        """Quantize an expert's matrices with GPTQ; return codes, scales and values by projection."""
        import torch

        items = [(expert, projection) for projection in projections]
        matrices = group.weights[expert].matrices
        weight = torch.cat([matrices[projection] for projection in projections])
        scales = np.concatenate([self._initial_scales(group, *item) for item in items])
        steps = code_steps(self.encoding, scales).to(weight.device)
        try:
            with torch.inference_mode():
                shared = "down" not in projections and self.statistics.shared_gate_up
                metric = self._make_error_metric(_get_hessian(group, *items[0]), shared=shared)
                output_rows = self._factorize_outputs(group, expert, projections)
                if output_rows is None:
                    chosen, values = self._choose_codes(weight, steps, metric)
                else:
                    chosen = predictions.round_rows(
                        weight, output_rows, lambda rows, numbers: self._choose_codes(rows, steps[numbers], metric)[0]
                    )
                    values = chosen.values
                codes = chosen.codes
                rounded = values.to(weight.dtype)
                if self.steps != "plain":
                    scales = scales_from_steps(self.encoding, chosen.scale)
        except gptq.NotFinite as error:
            linears = f"layer {group.layer}, {' and '.join(projections)} of expert {expert}"
            raise VerificationError(
                f"{linears}: {error}; the model gives NaN or infinity on this data set. Try a different --dataset, or "
                "an option that needs none: --quant-method RTN (gpu), --scale mse (cpu)."
            ) from error
        if metric.factor.fell_back:
            self.not_factorized += items
        hidden, width = matrices["down"].shape
        slicing = Slicing(group.layer, hidden, width, self.numa)
        n = len(items)
        results = zip(items, codes.chunk(n), np.split(scales, n), rounded.chunk(n), strict=True)
        return {
            item[1]: (pack_linear(self.encoding, item, item_codes, item_scales, slicing), item_values)
            for item, item_codes, item_scales, item_values in results
        }

    def _choose_codes(
        self, weight: torch.Tensor, steps: torch.Tensor, metric: _ErrorMetric
    ) -> tuple[descent.CodesAndScales, torch.Tensor]:
        """Choose codes and scales of rows of a linear; return them and their values.

        steps  the numbers that codes are multiples of at first, as `code_steps` returns them
        """
        grid = self.encoding.grid
        if metric.costs is not None:
            chosen = descent.choose_codes(weight, metric.costs, steps.float(), grid)
            return chosen, chosen.values
        values = gptq.round_columns(weight, metric.factor, steps, grid.code_range)
        if self.rounding == "float32":
            codes = gptq.find_codes(values, steps.float(), grid.code_range)
        else:
            values = values.bfloat16()
            codes = gptq.find_codes(values, steps, grid.code_range)
        return descent.CodesAndScales(codes, steps.float()), values

    def _factorize_outputs(
        self, group: ExpertGroup, expert: int, projections: Sequence[str]
    ) -> predictions.RowFactor | None:
        """Factorize the Fisher information about these linears' outputs; return None unless it was asked for."""
        if group.output_fisher is None:
            return None
        if "down" not in projections:
            down = group.weights[expert].matrices["down"]
            return predictions.factorize_information(
                predictions.gate_up_information(group.output_fisher, down, group.slopes[expert])
            )
        self.shared.outputs = self.shared.outputs or predictions.factorize_information(group.output_fisher)
        return self.shared.outputs

    def _make_error_metric(self, hessian: gptq.Hessian, *, shared: bool) -> _ErrorMetric:
        """Return the error metric of a Hessian. A Hessian that a layer's experts share is factorized once."""
        if shared and self.shared.metric is not None:
            return self.shared.metric
        factor = gptq.factorize_hessian(hessian, self.dampening)
        descends = self.steps != "plain" and not factor.fell_back
        metric = _ErrorMetric(factor, descent.make_metric(hessian, factor, self.dampening) if descends else None)
        if shared:
            self.shared.metric = metric
        return metric


def code_steps(encoding: Encoding, scales: Scales) -> torch.Tensor:
    """Return the numbers that codes are multiples of, from scales [n, groups]; BF16 for BF16 scales, else float32."""
    import torch

    if scales.dtype == np.uint16:
        return bits_to_tensor(scales) * encoding.grid.step
    return torch.from_numpy(scales_to_f32(scales)) * encoding.grid.step


def scales_from_steps(encoding: Encoding, steps: torch.Tensor) -> Scales:
    """Invert `code_steps` for float32 numbers that can be stored; return scales as Encoding.unpack_scales does."""
    scales = steps / encoding.grid.step
    if encoding.grid.scale_dtype == "BF16":
        return tensor_to_bits(scales.bfloat16())
    numbers = np.ascontiguousarray(scales.cpu().numpy())
    return e8m0_exponents(numbers) if encoding.grid.scale_dtype == "U8" else numbers


def pack_linear(
    encoding: Encoding, item: LinearId, codes: torch.Tensor, scales: Scales, slicing: Slicing
) -> PackedSlices:
    """Pack a linear with these codes, int8 [n, k], and scales [n, groups]; return its NUMA slices."""
    expert, projection = item
    codes_by_slice = cut_slices(projection, codes.cpu().numpy(), slicing.numa)
    scales_by_slice = cut_slices(projection, scales, slicing.numa)
    packed = allocate_slices(encoding, slicing.slices(expert, projection))
    assert encoding.pack is not None
    for (_, tensors), slice_codes, slice_scales in zip(packed, codes_by_slice, scales_by_slice, strict=True):
        encoding.pack(np.ascontiguousarray(slice_codes), np.ascontiguousarray(slice_scales), tensors)
    return packed


def _get_hessian(group: ExpertGroup, expert: int, projection: str) -> gptq.Hessian:
    hessian: gptq.Hessian = (group.down if projection == "down" else group.gate_up)[expert]
    return hessian


def run_oneshot(
    source: MoeModel,
    samples: Sequence[Ids],
    fmt: Format,
    *,
    dampening: float,
    every_expert: bool,
    trust_remote_code: bool,
) -> ReadLinear:
    """Run llmcompressor's oneshot with GPTQModifier on the routed experts; return a function that returns a linear.

    Raises UnsupportedError for a checkpoint that the library cannot load, and for experts that it did not quantize.
    """
    import torch
    import transformers
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    from ktconvert.native_quant.runtime.hf_modules import find_experts

    scheme = preset_name_to_scheme(fmt.name, [ONESHOT_TARGETS])
    assert scheme.weights is not None
    weights = scheme.weights.model_copy(update={"group_size": fmt.encoding.grid.group})
    root = source.source.root
    try:
        config = pretrained.read_config(str(root), trust_remote_code=trust_remote_code)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            root, config=config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
        names = {experts.layer: experts.name for experts in find_experts(model, source.functions.get)}
        inputs = [torch.from_numpy(sample)[None] for sample in samples]
        rows: Any = [{"input_ids": ids, "attention_mask": torch.ones(ids.shape)} for ids in inputs]
        oneshot(
            model=model,
            dataset=torch.utils.data.DataLoader(rows, batch_size=None),
            recipe=GPTQModifier(
                config_groups={"group_0": scheme.model_copy(update={"weights": weights})}, dampening_frac=dampening
            ),
            max_seq_length=max(map(len, samples)),
            num_calibration_samples=len(samples),
            moe_calibrate_all_experts=every_expert,
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise UnsupportedError(
            f"{root}: llmcompressor's oneshot failed ({first_line(error)}); use --engine stream."
        ) from error

    def read_linear(layer: int, expert: int, projection: str) -> PackedSlices:
        name = f"{names[layer]}.{expert}.{projection}_proj"
        linear = model.get_submodule(name)
        if not hasattr(linear, "weight_scale"):
            raise UnsupportedError(f"{root}: llmcompressor's oneshot did not quantize {name}; use --engine stream.")
        scale = linear.weight_scale.detach().to("cpu", torch.bfloat16).contiguous()
        codes = gptq.find_codes(linear.weight.detach().cpu(), scale, fmt.encoding.grid.code_range)
        n, k = codes.shape
        hidden, width = (n, k) if projection == "down" else (k, n)
        return pack_linear(
            fmt.encoding, (expert, projection), codes, tensor_to_bits(scale), Slicing(layer, hidden, width)
        )

    return read_linear
