"""How a weight is stored: a file per family of encodings, in and out.

To add a way in which a checkpoint may store a linear, write its file beside these and name its rows here: nothing else
knows the names of a weight's tensors or their contents. What we write is named by the table of layouts/outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.containers import CONTAINERS
from ktconvert.layouts.encodings import fp4, fp8, ggml, plain, words
from ktconvert.layouts.encodings.checkpoint import CheckpointEncoding as CheckpointEncoding
from ktconvert.layouts.encodings.checkpoint import Tensors as Tensors
from ktconvert.layouts.encodings.checkpoint import Weight as Weight
from ktconvert.layouts.encodings.words import narrow_to_weight as narrow_to_weight
from ktconvert.layouts.errors import INCOMPLETE, InputError, damaged_tensor
from ktconvert.layouts.tensors import TensorInfo

CHECKPOINT_ENCODINGS: tuple[CheckpointEncoding, ...] = (
    *(*plain.IN_CHECKPOINTS, *fp8.IN_CHECKPOINTS, *fp4.IN_CHECKPOINTS),
    *(*words.PACK_QUANTIZED, fp8.W8A8, *words.GPTQ_AWQ, *ggml.IN_CHECKPOINTS),
)


def roles() -> dict[str, str]:
    """Every name that a tensor of a weight may have, as a pattern, and its role."""
    return {
        pattern: role for row in CHECKPOINT_ENCODINGS for role, patterns in row.tensors.items() for pattern in patterns
    }


def input_types() -> list[str]:
    """What --input-type may claim: encodings, and kinds of files."""
    of_rows = (name for row in CHECKPOINT_ENCODINGS for name in row.input_types)
    of_files = (container.input_type for container in CONTAINERS if container.input_type is not None)
    return list(dict.fromkeys((*of_rows, *of_files)))


def spelled(pattern: str, template: str) -> str:
    """The pattern filled in for the weight with the name `template` in BF16."""
    return pattern.replace("{t}", template).replace("{s}", template.removesuffix(".weight"))


def of_tensors(tensors: Tensors, quantization: Quantization) -> CheckpointEncoding | None:
    """The row of a weight that is stored in these tensors; None if no row reads them."""
    return next((row for row in CHECKPOINT_ENCODINGS if row.holds(tensors, quantization)), None)


def quantized(names: Iterable[str]) -> list[str]:
    """The titles of those of these rows that are quantized, so that a BF16 release would be the better source."""
    return list(dict.fromkeys(row.title for row in CHECKPOINT_ENCODINGS if row.quantized and row.name in names))


def weight(row: CheckpointEncoding, template: str, tensors: Tensors, quantization: Quantization) -> Weight:
    """The weight that the tensors make up by a row that holds them. InputError where one is missing or one too many."""
    values = tensors[row.values]
    for role, info in tensors.items():
        if role not in row.tensors:
            raise InputError.of_tensor(info.name, f"scales {values.name!r}, which is {row.title} and needs none")
    for role, patterns in row.tensors.items():
        if role not in tensors and role not in row.optional:
            lost = spelled(patterns[0], template)
            raise damaged_tensor(values.name, f"is {row.title} but {lost} is missing", INCOMPLETE)
    ordered = {role: tensors[role] for role in row.tensors if role in tensors}
    return Weight(row, ordered, row.shape(ordered, quantization), quantization)


def tensors_of_weight(
    values: TensorInfo, tensors: Mapping[str, TensorInfo], roles: Mapping[str, str]
) -> Iterable[tuple[str, dict[str, list[TensorInfo]]]]:
    """For each row whose values this may be: the weight's name in BF16, and the tensors stored beside it, by role."""
    seen: set[str] = set()
    for row in CHECKPOINT_ENCODINGS:
        for pattern in row.tensors[row.values] if values.dtype in row.dtypes else ():
            template = _template(values.name, pattern)
            if template is None or template in seen:
                continue
            seen.add(template)
            stored: dict[str, list[TensorInfo]] = {}
            for other, role in roles.items():
                if (info := tensors.get(spelled(other, template))) is not None and info not in stored.get(role, []):
                    stored.setdefault(role, []).append(info)
            yield template, stored


def _template(name: str, pattern: str) -> str | None:
    """The BF16 name of the weight whose tensor of this pattern has this name; None if the pattern does not fit."""
    suffix = pattern.removeprefix("{t}").removeprefix("{s}")
    if not name.endswith(suffix):
        return None
    stem = name.removesuffix(suffix)
    return stem if pattern.startswith("{t}") else f"{stem}.weight"
