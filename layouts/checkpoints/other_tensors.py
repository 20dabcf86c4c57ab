"""The tensors of a checkpoint, or those outside its routed experts, and which of them become BF16."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.match import UNUSED, is_of_mtp, unread_formats
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Weight, fp8
from ktconvert.layouts.errors import InputError, KtconvertError, UnsupportedError
from ktconvert.layouts.tensors import TensorInfo


@dataclass(frozen=True)
class OtherTensors:
    """Tensors that are copied, weights that become BF16, by names in a BF16 release; dropped: scales of these; notes:
    sentences on weights that need one.
    """

    tensors: Mapping[str, TensorInfo | Weight]
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = ()


def other_tensors(source: TensorSource, taken: Collection[str], quantization: Quantization) -> OtherTensors:
    """All tensors but `taken`, the routed experts: quantized weights are decoded, their scales dropped, others copied.

    Raises UnsupportedError for a tensor that cannot be read, InputError for a weight without scales.
    """
    names = [name for name in source.tensors if name not in taken]
    decoded: dict[str, tuple[str, Weight]] = {}  # by the name of the tensor that holds the values
    dropped: set[str] = set()
    dtypes = {dtype for row in encodings.CHECKPOINT_ENCODINGS if row.quantized for dtype in row.dtypes}
    roles = encodings.roles()
    failed: dict[str, KtconvertError] = {}  # a scale may look like values without scales until its weight is seen
    for name in names:
        info = source.tensors[name]
        try:
            weight = _weight(source, info, quantization, roles) if info.dtype in dtypes else None
        except (InputError, UnsupportedError) as error:
            failed[name] = error.at(source.path(info))
            continue
        if weight is not None:
            decoded[name] = weight
            aside = (encodings.spelled(pattern, weight[0]) for pattern in UNUSED)
            dropped |= {t.name for t in weight[1].tensors.values()} | {n for n in aside if n in source.tensors}
    for name, failure in failed.items():
        if name not in dropped:
            raise failure
    for info, what in unread_formats(source.tensors, (name for name in names if name not in dropped)):
        where = ", and stands outside the routed experts" if taken else ""
        path, remedy = source.path(info), "use the model's BF16 or FP8 (E4M3) release."
        raise UnsupportedError(f"{path}: tensor {info.name!r} is {what}{where}; that is not an input yet: {remedy}")
    tensors: dict[str, TensorInfo | Weight] = {}
    for name in names:
        if name not in dropped or name in decoded:
            key, stored = decoded.get(name, (name, source.tensors[name]))
            if key in tensors:
                what = f"is stored twice, also as {name!r}"
                raise InputError.of_tensor(key, what, "use a release that stores it once", source.root)
            tensors[key] = stored
    notes = [
        f"{name} is FP8 of the MTP part and has no scale: its values are taken as they are"
        for name, (_, weight) in decoded.items()
        if weight.encoding == fp8.UNSCALED
    ]
    return OtherTensors(tensors, tuple(sorted(dropped - decoded.keys())), tuple(notes))


def _weight(
    source: TensorSource, info: TensorInfo, said: Quantization, roles: Mapping[str, str]
) -> tuple[str, Weight] | None:
    """The quantized weight whose values this tensor holds, with its name in BF16; None for any other tensor."""
    for template, candidates in encodings.tensors_of_weight(info, source.tensors, roles):
        tensors = {role: infos[0] for role, infos in candidates.items()}
        quantization = encodings.narrow_to_weight(source, tensors, said)
        row = encodings.of_tensors(tensors, quantization)
        if row is None or not row.quantized or tensors[row.values] is not info:
            continue
        if tensors.keys() == {row.values} and info.dtype in fp8.UNSCALED.dtypes and len(info.shape) == 2:
            limit = claims.num_layers(source.config)
            # Loaders of the MTP part copy such a weight into one of BF16.
            row = fp8.UNSCALED if is_of_mtp(info.name, limit and limit[1]) else row
        for role in row.tensors:
            several = candidates.get(role, [])
            if len(several) > 1:
                two = f"{several[0].name!r} and {several[1].name!r}"
                raise InputError(f"tensors {two} both claim to be the {role} of one weight")
        weight = encodings.weight(row, template, {r: t for r, t in tensors.items() if r in row.tensors}, quantization)
        weight.fit()
        return template, weight
    return None
