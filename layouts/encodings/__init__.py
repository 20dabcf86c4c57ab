"""Encodings of weights, one module per family, for reading checkpoints and for writing outputs.

To add an encoding of checkpoints, write its module in this package and list its rows here: no other code knows the
names of a weight's tensors or their contents. The table in layouts/outputs lists the encodings that ktconvert writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ktconvert.layouts.encodings import fp4, fp8, ggml, plain, words
from ktconvert.layouts.encodings.checkpoint import CheckpointEncoding as CheckpointEncoding
from ktconvert.layouts.encodings.checkpoint import Tensors as Tensors
from ktconvert.layouts.encodings.checkpoint import Weight as Weight
from ktconvert.layouts.encodings.words import narrow_to_weight as narrow_to_weight
from ktconvert.layouts.errors import INCOMPLETE, InputError, bad_tensor
from ktconvert.layouts.sources.config import Quantization
from ktconvert.layouts.sources.containers import CONTAINERS
from ktconvert.layouts.tensors import TensorInfo

CHECKPOINT_ENCODINGS: tuple[CheckpointEncoding, ...] = (
    *(*plain.IN_CHECKPOINTS, *fp8.IN_CHECKPOINTS, *fp4.IN_CHECKPOINTS),
    *(*words.PACK_QUANTIZED, fp8.W8A8, *words.GPTQ_AWQ, *ggml.IN_CHECKPOINTS),
)


def tensor_roles() -> dict[str, str]:
    """Map every name pattern of a weight's tensors to the tensor's role."""
    return {
        pattern: role
        for row in CHECKPOINT_ENCODINGS
        for role, patterns in row.tensor_names.items()
        for pattern in patterns
    }


def input_types() -> list[str]:
    """Return the values of --input-type: encodings, and kinds of files."""
    encoding_types = (name for row in CHECKPOINT_ENCODINGS for name in row.input_types)
    file_types = (container.input_type for container in CONTAINERS if container.input_type is not None)
    return list(dict.fromkeys((*encoding_types, *file_types)))


def expand_pattern(pattern: str, template: str) -> str:
    """Return the name of a tensor of the weight whose name in BF16 is `template`."""
    return pattern.replace("{t}", template).replace("{s}", template.removesuffix(".weight"))


def find_encoding(tensors: Tensors, quantization: Quantization) -> CheckpointEncoding | None:
    """Return the row of a weight that is stored in these tensors; None if no row reads them."""
    return next((row for row in CHECKPOINT_ENCODINGS if row.matches(tensors, quantization)), None)


def list_quantized_titles(names: Iterable[str]) -> list[str]:
    """Return the titles of the quantized rows among these names; for them a BF16 release is the better source."""
    return list(dict.fromkeys(row.title for row in CHECKPOINT_ENCODINGS if row.quantized and row.name in names))


def make_weight(row: CheckpointEncoding, template: str, tensors: Tensors, quantization: Quantization) -> Weight:
    """Return the weight in these tensors, which match the row.

    Raises InputError for a missing or superfluous tensor.
    """
    values = tensors[row.values_role]
    for role, info in tensors.items():
        if role not in row.tensor_names:
            raise InputError.from_tensor(info.name, f"scales {values.name!r}, which is {row.title} and needs none")
    for role, patterns in row.tensor_names.items():
        if role not in tensors and role not in row.optional:
            missing = expand_pattern(patterns[0], template)
            raise bad_tensor(values.name, f"is {row.title} but {missing} is missing", INCOMPLETE)
    ordered = {role: tensors[role] for role in row.tensor_names if role in tensors}
    return Weight(row, ordered, row.infer_shape(ordered, quantization), quantization)


def find_weight_candidates(
    values: TensorInfo, tensors: Mapping[str, TensorInfo], roles: Mapping[str, str]
) -> Iterable[tuple[str, dict[str, list[TensorInfo]]]]:
    """Yield the BF16 name and the existing tensors, by role, of each weight whose values a tensor may hold."""
    seen: set[str] = set()
    for row in CHECKPOINT_ENCODINGS:
        for pattern in row.tensor_names[row.values_role] if values.dtype in row.dtypes else ():
            template = _match_template(values.name, pattern)
            if template is None or template in seen:
                continue
            seen.add(template)
            existing: dict[str, list[TensorInfo]] = {}
            for role_pattern, role in roles.items():
                info = tensors.get(expand_pattern(role_pattern, template))
                if info is not None and info not in existing.get(role, []):
                    existing.setdefault(role, []).append(info)
            yield template, existing


def _match_template(name: str, pattern: str) -> str | None:
    """Return the BF16 name of a weight by one tensor's name and pattern; None if the pattern does not match."""
    suffix = pattern.removeprefix("{t}").removeprefix("{s}")
    if not name.endswith(suffix):
        return None
    stem = name.removesuffix(suffix)
    return stem if pattern.startswith("{t}") else f"{stem}.weight"
