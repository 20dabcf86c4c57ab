"""Layer runs and their visitors: a visitor receives the inputs of transformers' own modules, also beside GPTQ."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if any(find_spec(name) is None for name in ("torch", "transformers", "accelerate")):
    pytest.skip("transformers is not installed", allow_module_level=True)

from itertools import product

import torch

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.files.direct_file import RowFile
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant import kernels
from ktconvert.pipeline.calibration.expert_visitors import ExpertGroup, ExpertVisitor, ExpertWeights, StatisticsSpec
from ktconvert.pipeline.calibration.gather_statistics import TokenCounter
from ktconvert.pipeline.calibration.gptq_experts import GptqVisitor
from ktconvert.pipeline.calibration.layer_runner import LayerRun, run_expert_layer
from ktconvert.pipeline.calibration.layered_model import LayeredModel, bits_to_tensor, tensor_to_bits
from ktconvert.quantizers import gptq
from rig import hf

EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen3-moe-small"
LENGTHS = (23, 9, 1)
pytestmark = pytest.mark.usefixtures("one_thread")


class Magnitudes:
    """A visitor that gathers token counts and the sum of |x| of each column, by layer, expert and linear."""

    replaces_weights = False

    class Sum:
        def __init__(self, width: int, device: Any) -> None:
            self.tokens, self.sum = 0, torch.zeros(width, dtype=torch.float64, device=device)

        def add(self, inputs: torch.Tensor, shares: torch.Tensor | None = None) -> None:
            self.tokens += len(inputs)
            self.sum += inputs.double().abs().sum(0)

    def __init__(self, routed: bool) -> None:
        self.statistics = StatisticsSpec(self.Sum, "routed" if routed else "all")
        self.sums: dict[tuple[int, int, str], tuple[int, torch.Tensor]] = {}

    def visit(self, group: ExpertGroup) -> None:
        for expert in group.weights:
            for name in ("gate_up", "down"):
                accumulator = getattr(group, name)[expert]
                self.sums[group.layer, expert, name] = accumulator.tokens, accumulator.sum


@pytest.fixture(scope="module")
def samples() -> list[Any]:
    """Draw token ids."""
    rng = np.random.default_rng(0)
    return [rng.integers(10, 2000, length) for length in LENGTHS]


def run_model(
    samples: Sequence[Any], visitors_of: Callable[[MoeModel, int], Sequence[ExpertVisitor]], folder: Path
) -> None:
    """Run the samples through all layers of the bundled model, three experts at a time."""
    source = open_checkpoint(EXAMPLE)
    model = recognize(source)
    rest = find_non_expert_tensors(source, model.expert_tensor_names(), model.quantization).output_tensors()
    lm = LayeredModel(source, {tensor.key: tensor for tensor in rest})
    folder.mkdir()
    with RowFile(folder / "embedded", sum(LENGTHS), lm.hidden, new=True) as file:
        start = 0
        for hidden in lm.embed(iter(samples)):
            file.write(start, tensor_to_bits(hidden))
            start += len(hidden)
    entering = folder / "embedded"
    for layer in model.layers:
        leaving = folder / f"after-{layer}" if layer != model.layers[-1] else None
        scratch = folder / f"scratch-{layer}"
        scratch.mkdir()
        with RowFile(entering, sum(LENGTHS), lm.hidden, new=False) as rows:
            run_expert_layer(LayerRun(model, lm, layer, LENGTHS, 3), visitors_of(model, layer), rows, scratch, leaving)
        entering = leaving or entering


def transformers_model(weights: dict[tuple[int, int], ExpertWeights] | None = None) -> Any:
    """Return the bundled model, with these weights of experts, if given."""
    model = hf.load_complete(EXAMPLE, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager")
    for (layer, expert), expert_weights in (weights or {}).items():
        experts = model.model.layers[layer].mlp.experts
        experts.gate_up_proj.data[expert] = torch.cat([expert_weights.matrices[p] for p in ("gate", "up")])
        experts.down_proj.data[expert] = expert_weights.matrices["down"]
    return model


@torch.no_grad()
def gather_by_hooks(
    model: Any, samples: Sequence[Any], routed: bool
) -> dict[tuple[int, int, str], tuple[int, torch.Tensor]]:
    """Gather the same as Magnitudes from the arguments of the model's experts modules."""
    captured: dict[tuple[int, int, str], tuple[int, torch.Tensor]] = {}
    for sample, (layer, module) in product(samples, hf.experts_of(model).items()):
        hidden, ids, *_ = hf.record_experts(model, torch.from_numpy(sample)[None])[layer]
        for expert in range(module.num_experts):
            x = hidden[(ids == expert).any(1)] if routed else hidden
            gate, up = torch.nn.functional.linear(x, module.gate_up_proj[expert]).chunk(2, -1)
            for name, read in (("gate_up", x), ("down", module.act_fn(gate) * up)):
                tokens, total = captured.get((layer, expert, name), (0, torch.zeros(read.shape[1]).double()))
                captured[layer, expert, name] = tokens + len(read), total + read.double().abs().sum(0)
    return captured


def assert_same(ours: Any, expected: Any, layers: Sequence[int]) -> None:
    """Assert that the statistics of these layers are equal."""
    ours, expected = ({key: value for key, value in x.items() if key[0] in layers} for x in (ours, expected))
    assert ours.keys() == expected.keys() and ours
    for key in expected:
        assert ours[key][0] == expected[key][0], key
        assert torch.equal(ours[key][1], expected[key][1]), key


@pytest.mark.parametrize("routed", [True, False])
def test_visitor_receives_inputs_of_transformers_experts(routed, samples, tmp_path):
    """This holds in each layer, also together with a visitor that needs different statistics."""
    ours, other, counts = Magnitudes(routed), Magnitudes(not routed), TokenCounter()
    run_model(samples, lambda *_: (counts, ours, other), tmp_path / "walk")
    model = transformers_model()
    layers = range(len(model.model.layers))
    assert_same(ours.sums, gather_by_hooks(model, samples, routed), layers)
    routed_sums = ours.sums if routed else other.sums
    for layer in layers:
        tokens = counts.token_counts[layer]
        assert tokens.sum() == sum(LENGTHS) * model.config.num_experts_per_tok
        assert [routed_sums[layer, e, "down"][0] for e in range(len(tokens))] == tokens.tolist()


class Gptq:
    """GptqVisitor for all layers; keeps the linears that it writes, and the values of its codes."""

    def __init__(self, encoding: Encoding = FORMATS["W4A16"].encoding) -> None:
        self.encoding = encoding
        self.stored: dict[tuple[int, int, str], list[Any]] = {}
        self.values: dict[tuple[int, int], ExpertWeights] = {}

    def visitor_of_layer(self, model: MoeModel, layer: int) -> GptqVisitor:
        def round_to_nearest(expert: int, projection: str, importance: Any) -> list[Any]:
            linear = model.linear(layer, expert, projection)
            assert len(importance) == linear.shape[1]
            _, hidden, width = model.shape(layer)
            (numa_slice,) = Slicing(layer, hidden, width).slices(expert, projection)
            stored = [np.empty(tensor.nbytes, np.uint8) for tensor in self.encoding.tensors(*linear.shape)]
            self.encoding.quantize(linear, stored)
            return [(numa_slice, stored)]

        def write(expert: int, projection: str, stored: list[Any]) -> None:
            ((_, self.stored[layer, expert, projection]),) = stored

        visitor = GptqVisitor(self.encoding, 0.01, "library", "all", 0, round_to_nearest, write)
        visit = visitor.visit

        def visit_and_remember(group: ExpertGroup) -> Any:
            values = visit(group)
            self.values.update({(layer, expert): expert_weights for expert, expert_weights in values.items()})
            return values

        visitor.visit = visit_and_remember  # type: ignore[method-assign]
        return visitor


def test_visitor_runs_beside_gptq(samples, tmp_path):
    """GPTQ writes the same bytes as alone; in later layers the visitor receives inputs from the quantized experts."""
    gptq_only, with_other, ours = Gptq(), Gptq(), Magnitudes(routed=True)
    run_model(samples, lambda model, layer: [gptq_only.visitor_of_layer(model, layer)], tmp_path / "alone")
    run_model(samples, lambda model, layer: [ours, with_other.visitor_of_layer(model, layer)], tmp_path / "beside")
    assert gptq_only.stored.keys() == with_other.stored.keys() and gptq_only.stored
    for key, tensors in gptq_only.stored.items():
        assert all(np.array_equal(a, b) for a, b in zip(tensors, with_other.stored[key], strict=True))

    plain = gather_by_hooks(transformers_model(), samples, routed=True)
    last = max(layer for layer, _, _ in plain)
    assert_same(ours.sums, plain, [0])  # before anything is replaced, and by weights that are not
    assert not all(torch.equal(ours.sums[key][1], plain[key][1]) for key in plain if key[0] == last)
    quantized = gather_by_hooks(transformers_model(with_other.values), samples, routed=True)
    assert_same(
        {key: value for key, value in ours.sums.items() if key[2] == "gate_up"},
        {key: value for key, value in quantized.items() if key[2] == "gate_up"},
        range(last + 1),
    )


@pytest.mark.parametrize("name", ["AMXINT4", "AMXINT8"])
def test_gptq_supports_one_scale_per_row(name, samples, tmp_path):
    """Codes differ from rounding to nearest, scales do not; the next layer gets these values; errors are smaller."""
    encoding = FORMATS[name].encoding
    ours, inputs = Gptq(encoding), HessianKeeper()
    run_model(samples, lambda model, layer: [inputs, ours.visitor_of_layer(model, layer)], tmp_path / "walk")
    model = recognize(open_checkpoint(EXAMPLE))
    assert len(ours.stored) == 2 * 8 * len(PROJECTIONS)
    for (layer, expert, projection), stored in ours.stored.items():
        linear = model.linear(layer, expert, projection)
        nearest = [np.empty(tensor.nbytes, np.uint8) for tensor in encoding.tensors(*linear.shape)]
        encoding.quantize(linear, nearest)
        assert np.array_equal(
            encoding.unpack_scales(stored[-1], *linear.shape), encoding.unpack_scales(nearest[-1], *linear.shape)
        )
        assert not np.array_equal(stored[0], nearest[0])
        our_values, nearest_values = (
            torch.from_numpy(encoding.decode(tensors, *linear.shape)) for tensors in (stored, nearest)
        )
        assert torch.equal(our_values.bfloat16(), ours.values[layer, expert].matrices[projection])
        h = inputs.sums[layer, expert, "down" if projection == "down" else "gate_up"].sum
        x = bits_to_tensor(kernels.decode(linear)).float()
        our_error, nearest_error = (
            float(torch.einsum("ni,ij,nj->", x - y, h, x - y)) for y in (our_values, nearest_values)
        )
        assert our_error < nearest_error, (layer, expert, projection)


class HessianKeeper:
    """A visitor that keeps the Hessians that GPTQ quantizes with."""

    replaces_weights = False
    statistics = StatisticsSpec(gptq.Hessian.empty)

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int, str], gptq.Hessian] = {}

    def visit(self, group: ExpertGroup) -> None:
        for name in ("gate_up", "down"):
            self.sums |= {(group.layer, e, name): hessian for e, hessian in getattr(group, name).items()}


def test_visitors_with_equal_specs_share_accumulators(samples, tmp_path):
    groups: list[Any] = []

    class RecordsAccumulators:
        replaces_weights = False
        statistics = StatisticsSpec(gptq.Hessian.empty)

        def visit(self, group: ExpertGroup) -> None:
            groups.append([*group.gate_up.values(), *group.down.values()])

    run_model(
        samples,
        lambda _, layer: [RecordsAccumulators(), RecordsAccumulators()] if layer == 0 else [],
        tmp_path / "walk",
    )
    for first, second in zip(groups[::2], groups[1::2], strict=True):
        assert all(a is b for a, b in zip(first, second, strict=True))
    assert len({id(group[0]) for group in groups}) == 1  # gate and up of all experts read the same
    assert all(hessian.batches == len(LENGTHS) for group in groups for hessian in group)


def test_at_most_one_visitor_replaces_weights(samples, tmp_path):
    visitors = [Gptq(), Gptq()]
    with pytest.raises(ValueError, match="more than one visitor replaces weights"):
        run_model(samples, lambda model, layer: [c.visitor_of_layer(model, layer) for c in visitors], tmp_path / "walk")
