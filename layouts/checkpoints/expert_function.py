"""The function that experts compute, as data: activation, constants, biases, and where routing weights are applied.

An expert computes down(f(gate(x) + bias, up(x) + bias)) + bias. The row of the table of architectures gives the
function and the defaults of its constants; config.json, or a GGUF's metadata, gives the constants of each layer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.files.documents import parse_json
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.containers.gguf import KEYS, PREFIX
from ktconvert.layouts.tensors import format_ranges, name_layers

Floats = NDArray[np.float32] | NDArray[np.float64]

# Config keys of an activation, and of a limit.
HIDDEN_ACT = (
    *("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "dense_act_fn"),
    "ffn_config.ffn_act_fn.name",
)
LIMIT_KEYS = ("swiglu_limit", "swiglu_limits", "expert_swiglu_limit_list")
# Config keys that limit something other than the routed experts.
OTHER_LIMITS = ("swiglu_limits_shared", "shared_expert_swiglu_limit_list", "shared_swiglu_limit")
MOST_LAYERS = 10_000  # in a record: more are damage
LIMITING = re.compile(r"swiglu.*(limit|clamp)|expert.*clamp|clamp.*expert")


@dataclass(frozen=True)
class ExpertFunction:
    """The function of a layer's experts.

    activation   key of ACTIVATIONS
    limit        of gate and up, as the activation defines it; 0: none
    alpha, beta  constants of the activation; 0 where it has none
    gated        False: there is no gate, and the activation of up takes the place of f
    biases       whether gate, up and down have biases
    weights_on   where routing weights are multiplied: "output" of an expert or "input"
    output_norm  whether each expert's output is normalized (RMS) before its routing weight
    """

    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    gated: bool = True
    biases: bool = False
    weights_on: str = "output"
    output_norm: bool = False

    def compute(self, gate: Floats, up: Floats | float = 1.0) -> Floats:
        """Compute the activation by its definition. Without a gate: of up's product, given as `gate`."""
        with np.errstate(over="ignore"):
            value: Floats = ACTIVATIONS[self.activation].compute(self, gate, up)
        return value

    @property
    def formula(self) -> str:
        """The activation as a formula with its constants, without biases."""
        activation = ACTIVATIONS[self.activation]
        text = activation.formula.format(alpha=f"{self.alpha:g}", beta=f"{self.beta:g}")
        if not self.gated:
            text = text.removesuffix(" * up").replace("gate", "up")
        if self.limit:
            text += f", {activation.limits} limited to {self.limit:g}"
        return text

    def __str__(self) -> str:
        extras = (
            (self.biases, "with biases"),
            (self.weights_on == "input", "with routing weights on their input"),
            (self.output_norm, "with a norm of their output"),
        )
        return " ".join([self.formula, *(text for given, text in extras if given)])

    def with_constants(self, values: Mapping[str, float]) -> ExpertFunction:
        """Return the function with these values of limit, alpha and beta."""
        constants: Any = {"limit": self.limit, "alpha": self.alpha, "beta": self.beta, **values}
        return replace(self, **constants)

    @property
    def can_scale_up(self) -> bool:
        """True if scaling up scales the value, so that experts can be equalized."""
        return ACTIVATIONS[self.activation].scales and not self.limit and self.gated and not self.biases

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from a plain silu(gate) * up, and the activation."""
        plain = asdict(ExpertFunction())
        return {name: v for name, v in asdict(self).items() if name == "activation" or v != plain[name]}


PLAIN = ExpertFunction()


class Constant(NamedTuple):
    """A constant of an activation: the field of ExpertFunction, its config keys, and whether 0 is a value."""

    field: str
    keys: tuple[str, ...]
    may_be_zero: bool = True


@dataclass(frozen=True)
class Activation:
    """An activation of experts.

    formula    text in terms of gate, up, {alpha} and {beta}
    compute    (function, gate, up) -> its value
    constants  what config.json may set
    limits     what its limit applies to
    scales     whether scaling up scales the value, so that experts can be equalized
    """

    formula: str
    compute: Callable[[ExpertFunction, Floats, Floats | float], Any]
    constants: tuple[Constant, ...] = ()
    limits: str = "gate and up"
    scales: bool = False


def _sigmoid(x: Floats) -> Any:
    return 1 / (1 + np.exp(-x))


def _limit(f: ExpertFunction, gate: Floats, up: Floats | float) -> tuple[Any, Any]:
    """Return gate limited above, and up limited on both sides."""
    return (np.minimum(gate, f.limit), np.clip(up, -f.limit, f.limit)) if f.limit else (gate, up)


def _silu(f: ExpertFunction, gate: Floats, up: Floats | float) -> Any:
    gate, up = _limit(f, gate, up)
    return gate * _sigmoid(gate) * up


def _swiglu_step(f: ExpertFunction, gate: Floats, up: Floats | float) -> Any:
    limited, up = _limit(f, gate * _sigmoid(gate), up)
    return limited * up


def _swiglu_oai(f: ExpertFunction, gate: Floats, up: Floats | float) -> Any:
    gate, up = _limit(f, gate, up)
    return gate * _sigmoid(f.alpha * gate) * (up + 1)


def _softcap(f: ExpertFunction, gate: Floats, up: Floats | float) -> Any:
    factor = f.beta * np.tanh(up / f.beta) if f.beta else up
    return f.alpha * np.tanh(gate / f.alpha) * _sigmoid(gate) * factor


def _gelu_tanh(f: ExpertFunction, gate: Floats, up: Floats | float) -> Any:
    return gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up


def _gelu_erf(f: ExpertFunction, gate: Floats, up: Floats | float) -> Any:
    erf = np.vectorize(math.erf, otypes=[gate.dtype])
    return gate * (1 + erf(gate / math.sqrt(2))) / 2 * up


LIMIT = Constant("limit", LIMIT_KEYS)
# Kimi-K3's situ is the softcap of Inkling 2 with betas from its config: SituAndMul of its modeling_kimi_linear.py, as
# torchtitan's tests of kimi_k3 quote it, and llama.cpp's src/models/kimi-k3.cpp.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation("silu(gate) * up", _silu, (LIMIT,), scales=True),
    "swiglu_step": Activation("silu(gate) * up", _swiglu_step, (LIMIT,), "silu(gate) and up"),
    "swiglu_oai": Activation(
        "gate * sigmoid({alpha} * gate) * (up + 1)",
        _swiglu_oai,
        (LIMIT, Constant("alpha", ("swiglu_alpha",), may_be_zero=False)),
    ),
    "softcap": Activation(
        "{alpha} * tanh(gate / {alpha}) * sigmoid(gate) * {beta} * tanh(up / {beta})",
        _softcap,
        (
            Constant("alpha", ("mlp_gate_softcap", "activation_situ_beta"), may_be_zero=False),
            Constant("beta", ("mlp_up_softcap", "activation_situ_linear_beta")),
        ),
    ),
    "gelu_tanh": Activation("gelu_tanh(gate) * up", _gelu_tanh, scales=True),
    "gelu_erf": Activation("gelu(gate) * up", _gelu_erf, scales=True),
    "relu": Activation("relu(gate) * up", lambda f, gate, up: np.maximum(gate, 0) * up, scales=True),
    "relu2": Activation("relu(gate)^2 * up", lambda f, gate, up: np.maximum(gate, 0) ** 2 * up, scales=True),
}
CHOOSE_ACTIVATION = (
    "give --arch-file, as docs/reference/architectures.md shows, with the activation of the experts: activation = "
    + ", ".join(map(repr, ACTIVATIONS))
)
# Values of hidden_act -> the activations that they may mean; a row with one of them keeps it, else the first counts.
_SILU = ("silu", "swiglu_step", "swiglu_oai", "softcap")  # gpt-oss and others say silu
HIDDEN_ACTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("silu", "swish", "swiglu"), _SILU),
    **dict.fromkeys(("swigluoai", "swiglu_oai"), ("swiglu_oai",)),
    **dict.fromkeys(("gelu", "gelu_python"), ("gelu_erf", "gelu_tanh")),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_tanh"), ("gelu_tanh",)),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh"), ("gelu_tanh",)),
    **dict.fromkeys(("relu2", "squared_relu"), ("relu2",)),
    "relu": ("relu",),
    "situ": ("softcap",),
}


def find_function(
    row: ExpertFunction, config: dict[str, Any], layer: int, family: str, decides: bool = False
) -> ExpertFunction:
    """Return the function of a layer's experts.

    row      the function of the family, whose constants are defaults
    config   config.json, or the metadata of a GGUF under its keys
    family   name for messages
    decides  the row's activation holds, whatever config.json calls it

    Raises UnsupportedError for an unknown activation or limit, a contradiction, and a wrong or missing constant.
    """
    function = row if decides else replace(row, activation=_find_activation(row, config, family))
    if not decides:
        _refuse_unknown_limits(config)
    constants = ACTIVATIONS[function.activation].constants
    values = {c.field: _read_constant(c, config, layer) for c in {*constants, LIMIT}}
    function = function.with_constants({name: value for name, value in values.items() if value is not None})
    _require_constants(function, row, values, config, family)
    is_plain_silu = function.activation == "swiglu_step" and not function.limit
    return replace(function, activation="silu") if is_plain_silu else function


def _require_constants(
    function: ExpertFunction, row: ExpertFunction, values: dict[str, float | None], config: dict[str, Any], family: str
) -> None:
    """Raise UnsupportedError for a limit that the activation does not have, and for a missing constant.

    values  the constants that the config gives. Only the row's own activation has defaults
    """
    constants, problem = ACTIVATIONS[function.activation].constants, f"{family}: experts compute {function.activation}"
    if function.limit and LIMIT not in constants:
        raise UnsupportedError(
            f"{problem}, which has no limit, but their limit is {function.limit:g}", CHOOSE_ACTIVATION
        )
    is_own = function.activation == row.activation
    for constant in constants:
        is_missing = values[constant.field] is None and not is_own and constant != LIMIT
        if is_missing or not (getattr(function, constant.field) or constant.may_be_zero):
            keys = " or ".join(_name_setting(config, key) for key in constant.keys)
            remedy = f"give --arch-file with activation and {constant.field} = its value"
            raise UnsupportedError(f"{problem}, but {constant.field} ({keys}) is missing", remedy)


def states_constants(config: dict[str, Any]) -> bool:
    """Return whether config.json has a key of any constant of an activation."""
    constants = (constant for activation in ACTIVATIONS.values() for constant in activation.constants)
    return any(cfg.find_value(config, constant.keys) is not None for constant in constants)


def _find_activation(row: ExpertFunction, config: dict[str, Any], family: str) -> str:
    if (entry := cfg.find_value(config, HIDDEN_ACT)) is None:
        return row.activation
    setting = f"{_name_setting(config, entry[0])} is {json.dumps(entry[1])}"
    meant = HIDDEN_ACTS.get(str(entry[1]).lower())
    if meant is None:
        raise UnsupportedError(f"{setting}, an unknown activation", CHOOSE_ACTIVATION)
    if row.activation in meant:
        return row.activation
    if row.activation != "silu":
        raise UnsupportedError(f"{setting}, but experts of {family} compute {row.formula}", CHOOSE_ACTIVATION)
    return meant[0]


def names_activation(config: dict[str, Any]) -> bool:
    """Return whether config.json, or the metadata of a GGUF, names an activation."""
    return cfg.find_value(config, HIDDEN_ACT) is not None


def _name_setting(config: dict[str, Any], key: str) -> str:
    """Return how the user finds a key: in config.json, or in the metadata of a GGUF."""
    family = str(config.get("model_type", ""))
    if family.startswith(PREFIX):
        return f"{family.removeprefix(PREFIX)}.{KEYS.get(key, key)}"
    return f"config.json: {key}"


def _refuse_unknown_limits(config: dict[str, Any]) -> None:
    for scope in cfg.iterate_scopes(config):
        for key, value in scope.items():
            if LIMITING.search(str(key)) and key not in (*LIMIT_KEYS, *OTHER_LIMITS) and value:
                setting = f"{_name_setting(config, key)} = {json.dumps(value)}"
                problem = f"{setting} may limit the experts, and ktconvert does not know it"
                raise UnsupportedError(problem, "give --arch-file with their activation and limit")


def _read_constant(constant: Constant, config: dict[str, Any], layer: int) -> float | None:
    """Return the value of a layer; None if config.json has none. Raises UnsupportedError for a wrong one."""
    if (entry := cfg.find_value(config, constant.keys)) is None:
        return None
    setting, value = _name_setting(config, entry[0]), entry[1]
    if isinstance(value, list):
        if layer >= len(value):
            problem = f"{setting} has {len(value)} values, none for layer {layer}"
            raise UnsupportedError(f"{problem}; correct it, or use another release")
        value = value[layer]
    value = 0 if value is None else value
    is_number = type(value) in (int, float) and 0 <= value < float("inf")
    if not is_number or not (value or constant.may_be_zero):
        least = "of at least 0" if constant.may_be_zero else "above 0"
        problem = f"{setting} must be a finite number {least} for layer {layer}, not {json.dumps(value)[:100]}"
        raise UnsupportedError(f"{problem}; correct it, or use another release")
    return float(value)


# --- in manifests and metadata ------------------------------------------------------------------------------------


def record_functions(functions: Mapping[int, ExpertFunction]) -> dict[str, dict[str, Any]]:
    """Return the record of an output: layers, as in "0-34, 40" -> the fields of their function."""
    layers: dict[ExpertFunction, list[int]] = {}
    for layer, function in sorted(functions.items()):
        layers.setdefault(function, []).append(layer)
    return {format_ranges(numbers): function.to_dict() for function, numbers in layers.items()}


def describe_record(record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a record as text: the function if all layers have the same, else each with its layers."""
    texts = {layers: str(ExpertFunction(**fields)) for layers, fields in record.items()}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name_layers(layers)}: {text}" for layers, text in texts.items())


def read_functions(record: Any) -> dict[int, ExpertFunction]:
    """Return layer -> function of a record, or of its JSON text, as in the metadata of shards.

    Raises InputError for anything that record_functions does not write.
    """
    functions: dict[int, ExpertFunction] = {}
    try:
        if isinstance(record, str):
            record = parse_json(record.encode())
        for ranges, fields in record.items():
            function = ExpertFunction(**fields)
            if any(type(value) is not type(asdict(PLAIN)[name]) for name, value in asdict(function).items()):
                raise TypeError
            if function.activation not in ACTIVATIONS or not all(map(math.isfinite, _constants(function))):
                raise ValueError
            functions |= dict.fromkeys(_parse_ranges(ranges), function)
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"the record of what experts compute cannot be read ({json.dumps(record)[:200]})") from None
    return functions


def _parse_ranges(text: str) -> list[int]:
    """Return the numbers of a text of format_ranges. Raises ValueError for any other text."""
    numbers: list[int] = []
    for run in text.split(", "):
        first, _, last = run.partition("-")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= MOST_LAYERS:
            raise ValueError(text)
        numbers += range(int(first), int(first) + count)
    return numbers


def _constants(function: ExpertFunction) -> tuple[float, float, float]:
    return function.limit, function.alpha, function.beta
