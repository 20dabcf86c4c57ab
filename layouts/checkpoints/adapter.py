"""LoRA adapters as PEFT writes them: their settings, and the matrices that they add to weights."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from ktconvert.layouts import patterns
from ktconvert.layouts.checkpoints.kt_adapter import FUSED, OF_EXPERT, ExpertNames, read_fused
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.files import documents, publish
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, Array
from ktconvert.quantizers.reference import bf16_to_f32

V = TypeVar("V")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SAVE_AGAIN = "save the adapter again"
MATRIX = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# PEFT's module around a parameter of stacked experts, and around two of them: the inner one is the first.
OF_STACK = re.compile(r"(?P<experts>.*\bexperts)(?P<inner>\.base_layer)?")
# transformers' parameters of all experts: [E, 2 I, H], or [E, I, H] without a gate, and [E, H, I]
GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


# --- settings -------------------------------------------------------------------------------------

RUN, SERVE, MERGE = "run", "serve", "merge-adapter"  # RUN: `eval` as well
# Values of init_lora_weights that leave the model's own weights as they are.
KEEPING_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")


class Setting(NamedTuple):
    """A field of peft's LoraConfig: its default, its type, and the uses that support other values as PEFT does."""

    default: Any
    kind: Any
    uses: Collection[str]
    plain: Collection[Any] = ()  # values besides the default that all commands compute

    def is_plain(self, value: Any) -> bool:
        """Return whether a value is equivalent to the default, or supported by every use."""
        return not value or value == self.default or value in self.plain


class Harmless(NamedTuple):
    """A field without effect on what a trained adapter computes; it is not read."""

    default: Any = None


Finite = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Names = list[str] | str | None
ALL, UNFOLDED, ALONE, NONE = (RUN, SERVE, MERGE), (RUN, SERVE), (RUN,), ()

# Every field of LoraConfig of the newest PEFT that is supported; tests compare them with those of the installed one.
SETTINGS: Mapping[str, Setting | Harmless] = {
    # the matrices, and the modules that get them
    "r": Setting(8, Rank, ALL),
    "lora_alpha": Setting(8, Finite, ALL),
    "use_rslora": Setting(False, bool, ALL),
    "rank_pattern": Setting({}, dict[str, Rank] | None, ALL),
    "alpha_pattern": Setting({}, dict[str, Finite] | None, ALL),
    "target_modules": Setting(None, Names, ALL),
    "target_parameters": Setting(None, list[str] | None, ALL),
    "exclude_modules": Setting(None, Names, ALL),
    "layers_to_transform": Setting(None, list[int] | int | None, ALL),
    "layers_pattern": Setting(None, Names, ALL),
    # terms in addition to B A x
    "use_dora": Setting(False, bool, UNFOLDED),
    "lora_bias": Setting(False, bool, UNFOLDED),
    "modules_to_save": Setting(None, list[str] | None, UNFOLDED),
    "trainable_token_indices": Setting(None, list[int] | dict[str, list[int]] | None, UNFOLDED),
    "ensure_weight_tying": Setting(False, bool, UNFOLDED),
    "fan_in_fan_out": Setting(False, bool, UNFOLDED),
    # changes of the model's own weights
    "bias": Setting("none", Literal["none", "all", "lora_only"], ALONE),
    "init_lora_weights": Setting(True, bool | str, ALONE, KEEPING_BASE),
    "loftq_config": Setting({}, dict[str, Any] | None, ALL),  # used by init_lora_weights "loftq", which is ALONE
    "corda_config": Setting(None, dict[str, Any] | None, ALL),
    # other computations
    "alora_invocation_tokens": Setting(None, Any, NONE),
    "layer_replication": Setting(None, Any, NONE),
    "use_qalora": Setting(False, Any, NONE),
    "monteclora_config": Setting(None, Any, NONE),
    "use_bdlora": Setting(None, Any, NONE),
    "arrow_config": Setting(None, Any, NONE),
    "kasa_config": Setting(None, Any, NONE),
    "megatron_config": Setting(None, Any, NONE),
    # notes, and settings of training
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"), Harmless()),
    **dict.fromkeys(("runtime_config", "eva_config", "lora_ga_config", "velora_config"), Harmless()),
    "inference_mode": Harmless(False),
    "lora_dropout": Harmless(0.0),
    "megatron_core": Harmless("megatron.core"),
    "qalora_group_size": Harmless(16),
}


@dataclass(frozen=True)
class Settings:
    """Settings of adapter_config.json.

    values  the given ones that change what is computed
    """

    file: Path
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        setting = SETTINGS[name]
        return self.values.get(name, setting.default)

    @functools.cached_property
    def _patterns(self) -> dict[str, NamePatterns]:
        return {name: NamePatterns(self[name] or {}, self.file) for name in ("rank_pattern", "alpha_pattern")}

    def rank(self, *names: str) -> int:
        """Return the rank of a module with these names."""
        rank: int = self._patterns["rank_pattern"].find(names, self["r"])
        return rank

    def scale_factor(self, *names: str) -> float:
        """Return the factor of B A for a module with these names."""
        alpha: float = self._patterns["alpha_pattern"].find(names, self["lora_alpha"])
        rank = self.rank(*names)
        return alpha / (math.sqrt(rank) if self["use_rslora"] else rank)

    def target_names(self, module: str, parameters: Iterable[str]) -> list[str]:
        """Return the parameters of a module that target_parameters names."""
        return [name for name in parameters if is_named(f"{module}.{name}", self["target_parameters"] or ())]

    def name_module(self, module: str) -> bool:
        """Return whether target_modules or target_parameters name a module, or an expert's projection."""
        targets, names = self["target_modules"], [module]
        parameters = self.target_names(module, ["weight"])
        if match := OF_EXPERT.fullmatch(module):
            names += [match["experts"], f"{match['experts']}.{match['name']}"]
        if match := match or OF_STACK.fullmatch(module):
            parameters = self.target_names(match["experts"], (GATE_UP, UP, DOWN))
        if isinstance(targets, str) and targets != "all-linear":
            return bool(parameters) or any(map(self._target.fullmatch, names))
        return bool(parameters) or not isinstance(targets, list) or any(is_named(name, targets) for name in names)

    @functools.cached_property
    def _target(self) -> patterns.Pattern:
        return patterns.compile(self["target_modules"], self.file)


class NamePatterns:
    """rank_pattern or alpha_pattern: values by regular expressions for the ends of module names."""

    def __init__(self, values: Mapping[str, Any], file: Path | str) -> None:
        compiled = patterns.compile_all((rf"(.*\.)?({text})$" for text in values), file)
        self._values = list(zip(compiled, values.values(), strict=True))

    def find(self, names: Sequence[str], default: V) -> V:
        """Return the value of the first pattern that matches one of a module's names, as PEFT does."""
        for pattern, value in self._values:
            if any(pattern.match(name) for name in names):
                found: V = value
                return found
        return default


def is_named(name: str, targets: Collection[str]) -> bool:
    """Return whether PEFT's lists of targets contain this name, or an end of it that begins after a dot."""
    return name in targets or any(name.endswith(f".{target}") for target in targets)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a LoRA adapter and no model; releases of merged models may have both configs."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def require_adapter(folder: Path) -> None:
    """Raise InputError for a folder without an adapter."""
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing and not (missing == [WEIGHTS] and (folder / FUSED).is_file()):
        raise InputError(
            f"{folder}: has no {missing[0]}; give the directory of an adapter of `ktconvert train`, PEFT or kt-kernel"
        )


def read_settings(folder: Path, use: str) -> Settings:
    """Read adapter_config.json for one of RUN, SERVE and MERGE.

    Raises InputError for a damaged file, UnsupportedError for a setting that this use does not compute.
    """
    require_adapter(folder)
    file, values = folder / CONFIG, {}
    try:
        config = documents.parse_json(file.read_bytes())
        documents.require_plain(config)
    except ValueError as error:
        raise InputError(f"not a LoRA configuration ({error})", SAVE_AGAIN, path=file) from error
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise InputError("not a LoRA configuration (it has no peft_type)", SAVE_AGAIN, path=file)
    if config.pop("peft_type") != "LORA":
        raise UnsupportedError("not a LoRA adapter", "give an adapter of PEFT's LoraConfig", path=file)
    if config.get("use_dora"):
        _refuse_dora_of_experts(folder)
    for name, value in config.items():
        setting = SETTINGS.get(name, UNKNOWN)
        if value is None or isinstance(setting, Harmless):
            continue
        if not setting.is_plain(value) and use not in setting.uses:
            raise _make_refusal(name, value, use, setting).with_path(file)
        if value == setting.default or not setting.uses:
            continue
        try:
            values[name] = documents.as_type(value, setting.kind)
        except msgspec.ValidationError as error:
            raise InputError(f"its {name} is {_short(value)} ({error})", SAVE_AGAIN, path=file) from error
    for name in ("modules_to_save", "layers_pattern"):  # PEFT treats them as regular expressions
        given = values.get(name) or ()
        for text in [given] if isinstance(given, str) else given:
            if not re.fullmatch(r"[\w.]+", text):
                raise InputError(f"its {name} has {_short(text)}, which is not a module name", SAVE_AGAIN, path=file)
    return Settings(file, values)


UNKNOWN = Setting(None, Any, NONE)


def _refuse_dora_of_experts(folder: Path) -> None:
    """Raise UnsupportedError if an adapter with use_dora has matrices for experts."""
    file = folder / WEIGHTS
    for info in read_header(file).entries if file.is_file() else ():
        match = MATRIX.fullmatch(info.name)
        if match and (OF_EXPERT.fullmatch(match["module"]) or OF_STACK.fullmatch(match["module"])):
            remedy = "train an adapter without use_dora, or without target modules in experts"
            problem = f"is for experts, and {CONFIG} has use_dora, which ktconvert does not compute for experts"
            raise UnsupportedError.from_tensor(info.name, problem, remedy, file)


def _make_refusal(name: str, value: Any, use: str, setting: Setting) -> UnsupportedError:
    if setting is UNKNOWN:
        problem = f"its {_short(name)} is {_short(value)}, which is a setting of a newer PEFT or a different program"
        return UnsupportedError(f"{problem} and may change the results", "save the adapter as plain LoRA")
    if not setting.uses:
        remedy = "train an adapter without it, or use this one with PEFT"
        return UnsupportedError(f"its {name} is {_short(value)}, which ktconvert does not compute", remedy)
    if use == SERVE:
        problem = f"its {name} changes the model's own weights, which requests without this adapter use, too"
        return UnsupportedError(problem, "save the adapter as plain LoRA")
    remedy = "use the adapter with `ktconvert run`"
    return UnsupportedError(f"its {name} is {_short(value)}, which merge-adapter does not fold into weights", remedy)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- matrices -------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Matrices A [rows, in] and B [out, columns] of a module, or of a parameter of all experts.

    names  its names for patterns
    file   the file of A and B
    """

    a: TensorInfo
    b: TensorInfo
    names: tuple[str, ...]
    file: Path


@dataclass(frozen=True)
class Delta:
    """Addition of an adapter to a weight [out, in]: scaling * B A, with A [r, in], B [out, r].

    For one expert's projection the matrices may be parts of larger ones: rows of A [E r, in]; every E-th column of B
    [out, r E] from `expert` on, and `rows` of B.

    transposed  whether the weight is stored as [in, out]
    """

    file: Path
    a: TensorInfo
    b: TensorInfo
    scaling: float
    rank: int
    rows: range
    expert: int = 0
    experts: int = 1
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.a.shape[1]

    def matrices(self) -> tuple[F32, F32]:
        """Return two matrices; the addition is the second times the first: A and scaling * B, or transposed."""
        first = self.expert * self.rank
        a = _read(self.file, self.a, range(first, first + self.rank))
        b = _read(self.file, self.b, self.rows)[:, self.expert :: self.experts]
        b *= np.float32(self.scaling)
        return (b.T, a.T) if self.transposed else (a, b)


def read_pairs(
    folder: Path, settings: Settings, names: Mapping[int, ExpertNames] | None = None, *, others: bool = False
) -> dict[str, Pair]:
    """Read the pairs of an adapter's matrices, by module name.

    names   names of the model's experts by layer, for an adapter of kt-kernel
    others  whether other tensors are allowed

    Raises InputError for matrices that do not match, that do not have the rank in the settings, or whose experts are
    not numbered from 0; UnsupportedError for other tensors.
    """
    file = folder / WEIGHTS
    found: dict[str, dict[str, TensorInfo]] = {}
    for info in read_header(file).entries if file.is_file() else ():
        match = MATRIX.fullmatch(info.name)
        if match is not None and info.dtype in DTYPES and len(info.shape) == 2:
            found.setdefault(match["module"], {})[match["side"]] = info
        elif not others:
            problem = f"({info.dtype} {list(info.shape)}) is not a matrix of plain LoRA"
            raise UnsupportedError.from_tensor(info.name, problem, "use the adapter with `ktconvert run`", file)
    pairs = {}
    for module, sides in found.items():
        if len(sides) < 2:
            missing = f"{module}.lora_{'B' if 'A' in sides else 'A'}.weight"
            raise InputError(f"lacks tensor {missing!r} of a pair of matrices", SAVE_AGAIN, path=file)
        pairs[module] = Pair(sides["A"], sides["B"], _find_names(module, found, settings), file)
        _require_rank(pairs[module], settings, file)
    _require_numbers(pairs, file)
    for module, (a, b) in read_fused(folder, settings["r"], names or {}).items():
        pairs[module] = Pair(a, b, (module,), folder / FUSED)
    return pairs


def require_finite(pairs: Iterable[Pair]) -> None:
    """Raise InputError for a matrix with a number that is not finite."""
    for pair in pairs:
        for info in (pair.a, pair.b):
            _read(pair.file, info, range(info.shape[0]))


def _find_names(module: str, modules: Collection[str], settings: Settings) -> tuple[str, ...]:
    """Return the names that patterns may use for a module; for an expert, also its projection in all experts."""
    if match := OF_EXPERT.fullmatch(module):
        return module, f"{match['experts']}.{match['name']}"
    if match := OF_STACK.fullmatch(module):
        experts = match["experts"]
        first = UP if settings.target_names(experts, [UP]) else GATE_UP
        targeted = settings.target_names(experts, (first, DOWN))
        both = f"{experts}.base_layer" in modules or len(targeted) != 1
        name = first if match["inner"] or not (both or targeted[0] == DOWN) else DOWN
        return (f"{experts}.{name}",)
    return (f"{module}.weight" if settings.target_names(module, ["weight"]) else module,)


def _require_rank(pair: Pair, settings: Settings, file: Path) -> None:
    """Raise InputError if A and B do not have the rank in the settings, or a multiple of it for stacked experts."""
    a, b, rank = pair.a.shape[0], pair.b.shape[1], settings.rank(*pair.names)
    stacked = OF_STACK.fullmatch(pair.names[0].rpartition(".")[0]) is not None
    if a != b or not a or (a % rank if stacked else a != rank):
        problem = f"and {pair.b.name} is {list(pair.b.shape)}, but their rank in {CONFIG} is {rank}"
        raise InputError.from_tensor(pair.a.name, f"is {list(pair.a.shape)}, {problem}", SAVE_AGAIN, file)


def _require_numbers(pairs: Iterable[str], file: Path) -> None:
    """Raise InputError for matrices of experts that are not numbered from 0."""
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(OF_EXPERT.fullmatch, pairs)):
        numbers.setdefault(f"{match['experts']}.*.{match['name']}", set()).add(int(match["expert"]))
    for name, found in numbers.items():
        if found != set(range(len(found))):
            missing = next(number for number in range(len(found)) if number not in found)
            problem = (
                f"has matrices of {name} for {len(found)} experts up to {max(found)}, but not for expert {missing}"
            )
            raise InputError(problem, SAVE_AGAIN, path=file)


def read_adapter(folder: Path, names: Mapping[int, ExpertNames] | None = None) -> dict[str, Delta]:
    """Return the additions of an adapter by module; stacked experts become one entry per expert and parameter.

    names  as for read_pairs

    Raises InputError for a damaged adapter, UnsupportedError for one that is not plain LoRA.
    """
    settings = read_settings(folder, MERGE)
    deltas: dict[str, Delta] = {}
    for module, (a, b, aliases, file) in read_pairs(folder, settings, names).items():
        if file.name != FUSED and not settings.name_module(module):
            raise InputError.from_tensor(a.name, f"belongs to a module that {CONFIG} does not name", SAVE_AGAIN, file)
        rank, scaling, rows = settings.rank(*aliases), settings.scale_factor(*aliases), b.shape[0]
        experts, _, parameter = aliases[0].rpartition(".")
        if OF_STACK.fullmatch(experts) is None or OF_EXPERT.fullmatch(module):
            deltas[module] = Delta(file, a, b, scaling, rank, range(rows))
            continue
        count = a.shape[0] // rank
        for number in range(count):
            deltas[f"{experts}.{number}.{parameter}"] = Delta(file, a, b, scaling, rank, range(rows), number, count)
    if not deltas:
        raise InputError("has no matrices", SAVE_AGAIN, path=folder / WEIGHTS)
    return deltas


def write_peft_adapter(folder: Path, output: Path, names: Mapping[int, ExpertNames]) -> int:
    """Write an adapter of kt-kernel as PEFT's into a new folder, and return the number of matrices. No number changes.

    names  names of the model's experts by layer

    Raises InputError for a damaged adapter, UnsupportedError for settings that `serve` does not compute.
    """
    settings = read_settings(folder, SERVE)
    tensors = {}
    for module, pair in read_pairs(folder, settings, names).items():
        for side, info in zip("AB", pair[:2], strict=True):
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = info, pair.file
    config = documents.parse_json((folder / CONFIG).read_bytes())
    targets = config.get("target_modules") or []
    projections = sorted({projection for layer in names.values() for projection in layer.projections})
    experts = [f"experts.{projection}" for projection in projections]
    if isinstance(targets, str):
        config["target_modules"] = "|".join([f"(?:{targets})", *(rf".*\.{re.escape(name)}" for name in experts)])
    else:
        config["target_modules"] = [*targets, *experts]
    config["lora_dropout"] = 0.0  # only needed for training; PEFT rejects it for stacked experts
    plan = plan_shard(
        (msgspec.structs.replace(info, name=name) for name, (info, _) in tensors.items()), {"format": "pt"}
    )
    partial = output.with_name(f".{output.name}.partial")
    publish.remove_tree(partial)  # of an interrupted call
    publish.make_folder(partial)
    with DirectFile(partial / WEIGHTS, plan.size) as out:
        out.append(plan.header)
        for info, file in tensors.values():
            data = np.fromfile(file, np.uint8, info.nbytes, offset=info.start)
            if data.size < info.nbytes:
                raise InputError("became shorter while it was read", SAVE_AGAIN, path=file)
            out.append(data)
        out.close()
    publish.write_file(partial / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    publish.publish_path(partial, output)
    return len(tensors)


def _read(file: Path, info: TensorInfo, rows: range) -> F32:
    """Read these rows of a matrix as float32."""
    dtype, columns = np.dtype(DTYPES[info.dtype]), info.shape[1]
    start, count = info.start + rows.start * columns * dtype.itemsize, rows[-1] + 1 - rows.start
    data: Array = np.fromfile(file, dtype, count * columns, offset=start)
    if data.size < count * columns:
        raise InputError("became shorter while it was read", SAVE_AGAIN, path=file)
    values = bf16_to_f32(data) if info.dtype == "BF16" else data.astype(np.float32)
    if not np.isfinite(values).all():
        raise InputError.from_tensor(info.name, "holds numbers that are not finite", "train again", file)
    return values.reshape(count, columns)[:: rows.step]
