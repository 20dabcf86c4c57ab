"""Hot experts: torch computes them, on a GPU if available, while the CPU runtime computes the other experts.

Masks choose them. Their weights are read one linear at a time, packed integers as codes and scales, others as BF16.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.recognition import WITHOUT_EXPERTS, recognize
from ktconvert.layouts.errors import ArgumentError, InputError, ResourceError, UnsupportedError, UsageError
from ktconvert.layouts.extras import require_packages
from ktconvert.layouts.files import documents
from ktconvert.layouts.files.publish import MARK
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.sources.containers.safetensors import read_matrix
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels, machine
from ktconvert.native_quant.arrays import F32, F64, I64, Array, Bool
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.native_quant.matrix import INT4, INT8
from ktconvert.native_quant.runtime.arguments import describe, require_path
from ktconvert.native_quant.runtime.install import generate_gpu_experts_masks
from ktconvert.quantizers.packed import read_signed_codes

if TYPE_CHECKING:
    import torch

Mask = Bool  # [experts] of a layer, or [layers, experts]
REMEDY = "choose fewer hot experts"
MASK_NAME = "gpu_experts_mask"  # the tensor's name in a file
MASK_FORM = (
    f"give a safetensors file with a tensor {MASK_NAME!r}, bool [decoder layers, experts], as "
    "`ktconvert experts --format mask` writes it"
)
MAX_SCALE = 2.0**120  # a larger scale could give a weight that BF16 cannot hold


# --- masks -----------------------------------------------------------------------------------------


def parse_mask(mask: Any) -> str | list[list[bool]]:
    """Return a mask as a JSON value: the path of a file, or lists. mask: one of these, or a tensor or array.

    Raises ArgumentError for any other value.
    """
    if isinstance(mask, str | os.PathLike):
        return require_path(MASK_NAME, mask)
    table: Any = mask.tolist() if hasattr(mask, "tolist") else mask
    try:
        documents.as_type(table, list[list[bool]])
    except msgspec.ValidationError:
        is_table = False
    else:
        is_table = len({len(row) for row in table}) == 1
    if not is_table:
        raise ArgumentError(f"{MASK_NAME} must be bool [decoder layers, experts], or a file, not {describe(mask)}")
    return table  # type: ignore[no-any-return]


def read_mask(path: Path) -> Mask:
    """Read the mask [layers, experts] of a file. Raises InputError for a damaged file or a missing tensor."""
    values = read_matrix(path, MASK_NAME, "BOOL", MASK_FORM)
    if (values > 1).any():
        raise InputError(f"{path}: {MASK_NAME!r} contains bytes other than 0 and 1; {MASK_FORM}")
    return values.astype(np.bool_)


def mask_file(mask: Mask) -> bytes:
    """Return the content of a file from which `read_mask` reads this mask [layers, experts]."""
    plan = plan_shard([TensorInfo(MASK_NAME, "BOOL", mask.shape, mask.nbytes)], {"generator": MARK})
    return plan.header + mask.tobytes()


def masks_by_layer(
    mask: str | list[list[bool]] | None, count: int | None, experts: Mapping[int, int], layers: int
) -> dict[int, Mask]:
    """Return for each layer with experts a mask bool [E] of its hot experts.

    mask     a file, or the mask itself, [layers, E]: row n is layer n of the model, as in SGLang; rows of layers
             without experts are ignored
    count    instead of a mask: the first `count` experts of each layer
    experts  layer -> E
    layers   number of decoder layers of the model, with and without experts
    Raises InputError if a file does not fit the model, ArgumentError if a table or `count` does not.
    """
    if mask is None:
        for layer, total in experts.items():
            if (count or 0) > total:
                raise ArgumentError(f"{count} experts for the GPU, but layer {layer} has {total}; give at most {total}")
        return {layer: np.arange(total) < (count or 0) for layer, total in experts.items()}
    source, error = (mask, InputError) if isinstance(mask, str) else (MASK_NAME, ArgumentError)
    table: Array = read_mask(Path(mask).expanduser()) if isinstance(mask, str) else np.array(mask)
    shape = list(table.shape)
    if table.dtype != np.bool_ or table.ndim != 2:
        raise error(f"{source}: is {table.dtype} of shape {shape}; must be bool [decoder layers, experts]")
    for layer, total in experts.items():
        if table.shape != (layers, total):
            sizes = f"{layers} decoder layers, and layer {layer} has {total} experts"
            rule = f"use a mask of shape {[layers, total]}"
            raise error(f"{source}: has shape {shape}, but the model has {sizes}; {rule}")
    return {layer: table[layer].copy() for layer in experts}


def most_used_per_layer(counts: I64, number: int) -> Mask:
    """Return a mask of the `number` experts of each layer that got the most tokens; ties go to the first.

    counts [layers, experts]: routed tokens. Layers without experts have zeros and get none.
    """
    if number > counts.shape[1]:
        raise UsageError(f"--num-gpu-experts {number}: a layer has {counts.shape[1]} experts; use at most that number.")
    mask = np.zeros(counts.shape, np.bool_)
    np.put_along_axis(mask, np.argsort(-counts, axis=1, kind="stable")[:, :number], True, axis=1)
    return mask & counts.any(axis=1, keepdims=True)


def most_used_in_total(counts: I64, number: int) -> Mask:
    """Return a mask of the `number` experts of all layers together that got the most tokens.

    Ties go to the experts that kt-kernel takes, but to none of a layer without experts. Raises UsageError if there are
    fewer experts, KTConvertError if torch is not installed.
    """
    has_experts = counts.any(axis=1, keepdims=True)
    most = int(has_experts.sum()) * counts.shape[1]
    if number > most:
        raise UsageError(f"--total {number}: all layers together have {most} experts; use at most that number.")
    require_packages("choosing experts of all layers together", ["torch"], "torch")
    import torch

    for candidates in (counts, np.where(has_experts, counts, -1)):
        mask: Mask = generate_gpu_experts_masks(torch.from_numpy(np.ascontiguousarray(candidates)), number).numpy()
        if (mask <= has_experts).all():
            break
    return mask


def hot_fraction(counts: I64, mask: Mask) -> F64:
    """Return the fraction of each layer's routed tokens that go to hot experts: float64 [layers], NaN without."""
    total = counts.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray((counts * mask).sum(axis=1) / total)


# --- weights ---------------------------------------------------------------------------------------


class HotWeights:
    """The routed experts of a checkpoint, or some of them: a directory, or a model of the hub.

    Opening it reads only headers.
    """

    def __init__(self, path: str | Path) -> None:
        self._source = open_checkpoint(path)
        self._source.require_one_reading()
        self.root = self._source.root
        try:
            self.model: MoeModel = recognize(self._source, partial=True)
        except InputError as error:
            if error.remedy != WITHOUT_EXPERTS:
                raise
            remedy = "give the complete model, or one from `ktconvert fetch --gpu-experts-mask`"
            raise InputError("has no experts for the GPU", remedy, path=self.root) from error

    def require_experts(self, layer: int, shape: tuple[int, int, int], mask: Mask) -> None:
        """Require the hot experts of a layer.

        shape  sizes E, H and I of the loaded model
        mask   bool [E], the hot experts

        Raises UnsupportedError if the layer is missing or has other sizes, InputError if it lacks one of the experts.
        """
        e, h, i = self.model.shape(layer) if layer in self.model.layers else (0, 0, 0)
        contents = (
            f"layer {layer} has {e} experts of hidden size {h} and width {i}, but the model has {{}} of {{}} and {{}}"
        )
        if not e:
            contents = f"has no experts of layer {layer}, but the model has"
        if (e, h, i) != shape:
            raise UnsupportedError(f"{self.root}: {contents.format(*shape)}; use a checkpoint of this model")
        stored = {expert for _, expert in self.model.moe_layers[layer].weights}
        missing = sorted({*map(int, mask.nonzero()[0])} - stored)
        if missing and -1 not in stored:  # which stands for a tensor of all experts
            problem = f"lacks expert {missing[0]} of layer {layer}, which is in the mask"
            raise InputError(problem, "give the complete model, or fetch it with the same mask", path=self.root)

    def require_function(self, layer: int, function: ExpertFunction) -> None:
        """Raise UnsupportedError if a layer's experts compute something other than this function."""
        if (own := self.model.functions[layer]) != function:
            problem = f"experts of layer {layer} compute {own}, but those of the model compute {function}"
            raise UnsupportedError(f"{self.root}: {problem}; use a checkpoint of this model")

    def linear(self, layer: int, expert: int, projection: str) -> tuple[Array, F32 | None]:
        """Return int8 codes [n, k] and float32 scales [n, groups], or BF16 bits [n, k] and None. Raises InputError."""
        linear = self.model.linear(layer, expert, projection)
        is_packed = linear.kind in (INT4, INT8) and linear.zeros is None and linear.column_groups is None
        values: Array = read_signed_codes(linear) if is_packed else kernels.decode(linear)
        for info in self.model.expert_tensors(layer, expert):
            self._source.release(info)
        if not is_packed:
            return values, None
        assert linear.scales is not None
        largest = float(np.max(np.abs(linear.scales)))
        if largest > MAX_SCALE:
            scale = self.model.weight(layer, expert, projection).tensors["scale"]
            problem = f"tensor {scale.name!r} contains {largest}, too large for BF16 weights"
            raise InputError(f"{self._source.path(scale)}: {problem}; create this checkpoint again")
        return values, linear.scales


class HotExpert(NamedTuple):
    """Weights of an expert, BF16, and its biases, float32 (None: none). Without a gate, the first matrix is up alone.

    gate_up  gate and up, [2I, H]
    down     [H, I]
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class HotExperts:
    """Hot experts of one layer with E experts.

    mask      bool [E], the hot ones
    function  what they compute
    """

    def __init__(
        self,
        mask: Mask,
        weights: Mapping[int, HotExpert],
        device: torch.device,
        function: ExpertFunction = PLAIN,
    ) -> None:
        self.mask, self.device, self.function = mask, device, function
        self.weights = dict(sorted(weights.items()))

    def __len__(self) -> int:
        return len(self.weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> HotExperts:
        return self  # never modified

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's hot experts, in the order of their numbers: float32 [T, H].

        The result is on `device`; hidden [T, H] may be anywhere. ids int64 and weights float32 [T, k] are on the CPU,
        so that the CPU never waits for a GPU.
        """
        import torch
        from torch.nn.functional import linear

        function = self.function
        hidden = hidden.to(self.device, torch.bfloat16)
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=self.device)
        order = ids.reshape(-1).argsort(stable=True)  # pairs (token, expert), by expert
        starts = torch.searchsorted(ids.reshape(-1)[order], torch.arange(len(self.mask) + 1, device="cpu")).tolist()
        tokens = (order // ids.shape[1]).to(self.device)
        scale = weights.reshape(-1)[order].to(self.device)
        for number, expert in self.weights.items():
            pairs = slice(starts[number], starts[number + 1])
            if pairs.start == pairs.stop:
                continue
            inputs, weight = hidden[tokens[pairs]], scale[pairs, None]
            if function.weights_on == "input":
                inputs, weight = (inputs.float() * weight).to(torch.bfloat16), torch.ones_like(weight)
            products = linear(inputs, expert.gate_up).float()
            if expert.gate_up_bias is not None:
                products += expert.gate_up_bias
            gate, up = products.chunk(2, dim=-1) if function.gated else (products, None)
            output = linear(compute_activation(function, gate, up).to(torch.bfloat16), expert.down).float()
            if expert.down_bias is not None:
                output += expert.down_bias
            out.index_add_(0, tokens[pairs], output * weight)
        return out


def compute_activation(function: ExpertFunction, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Compute what ExpertFunction.compute defines, with torch. up: None without a gate."""
    import torch
    from torch.nn.functional import gelu, relu, silu

    limit, alpha, beta = function.limit, function.alpha, function.beta
    factor = torch.ones((), device=gate.device) if up is None else up
    if limit:
        factor = factor.clamp(-limit, limit)
        gate = gate if function.activation == "swiglu_step" else gate.clamp(max=limit)
    match function.activation:
        case "silu":
            return silu(gate) * factor
        case "swiglu_step":
            return (silu(gate).clamp(max=limit) if limit else silu(gate)) * factor
        case "swiglu_oai":
            return gate * torch.sigmoid(alpha * gate) * (factor + 1)
        case "softcap":
            factor = beta * torch.tanh(factor / beta) if beta else factor
            return alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * factor
        case "gelu_tanh" | "gelu_erf":
            return gelu(gate, approximate="tanh" if function.activation == "gelu_tanh" else "none") * factor
        case "relu":
            return relu(gate) * factor
    assert function.activation == "relu2", function
    return relu(gate).square() * factor


def hot_device() -> torch.device:
    """Return the device that computes hot experts: the current GPU if there is one, else the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def require_memory(masks: Iterable[Mask], hidden: int, width: int, device: torch.device) -> None:
    """Raise ResourceError if the hot experts of all layers do not fit into free memory of the device."""
    import torch

    count = sum(int(mask.sum()) for mask in masks)
    required = count * 3 * hidden * width * 2
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.memory_available()
    if required > free:
        problem = f"take {required / 2**30:.1f} GiB in BF16, and {device} has {free / 2**30:.1f} GiB left"
        raise ResourceError(f"{count} hot experts {problem}; {REMEDY}")


def load_hot_experts(source: HotWeights, layer: int, mask: Mask, device: torch.device) -> HotExperts:
    """Read and unpack the hot experts of one layer, and no others, in several threads."""
    import torch

    def matrix(expert: int, projection: str) -> torch.Tensor:
        # code * scale rounded to BF16, as compressed-tensors unpacks
        values, scale = source.linear(layer, expert, projection)
        if scale is None:
            return torch.from_numpy(values).view(torch.bfloat16).to(device)
        codes = torch.from_numpy(values).to(device).to(torch.float32)
        scales = torch.from_numpy(scale).to(device)
        return (codes.view(*scales.shape, -1) * scales[:, :, None]).view(codes.shape).to(torch.bfloat16)

    def bias(expert: int, *projections: str) -> torch.Tensor | None:
        biases = [source.model.bias(layer, expert, projection) for projection in projections]
        joined = [each for each in biases if each is not None]
        return torch.from_numpy(np.concatenate(joined)).to(device) if joined else None

    def load(expert: int) -> tuple[int, HotExpert]:
        *first, last = source.model.projections
        gate_up = torch.cat([matrix(expert, projection) for projection in first])
        return expert, HotExpert(gate_up, matrix(expert, last), bias(expert, *first), bias(expert, last))

    function = source.model.functions[layer]
    with ThreadPoolExecutor(machine.physical_cores(), initializer=unbind_thread) as executor:
        return HotExperts(mask, dict(executor.map(load, mask.nonzero()[0].tolist())), device, function)
