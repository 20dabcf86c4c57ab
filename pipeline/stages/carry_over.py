"""Tensors outside the routed experts: streamed and copied bit for bit; in a GPU output, quantized ones are decoded to
BF16.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.beside import Beside
from ktconvert.layouts.checkpoints.encodings import Weight
from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.shards import Entry, group_by_limit, plan_shard
from ktconvert.layouts.outputs import merged
from ktconvert.native_quant import kernels
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written

NAME = "carry_over"
VERSION = 1
DEFAULT_SHARD = 5 * 10**9  # bytes; what transformers writes


@dataclass(frozen=True)
class Carried:
    """One tensor of the output: its name there, and the stored one, or the weight that is to be decoded to BF16."""

    key: str
    stored: TensorInfo | Weight

    @property
    def entry(self) -> Entry:
        """The tensor as it is in the output."""
        if isinstance(self.stored, Weight):
            return Entry(self.key, "BF16", self.stored.shape, 2 * math.prod(self.stored.shape))
        return Entry(self.key, self.stored.dtype, self.stored.shape, self.stored.nbytes)

    @property
    def reads(self) -> tuple[TensorInfo, ...]:
        """The stored tensors that it is read from."""
        return tuple(self.stored.tensors.values()) if isinstance(self.stored, Weight) else (self.stored,)


@dataclass(frozen=True)
class CarryOverWork:
    """The tensors of one shard."""

    source: TensorSource
    tensors: tuple[Carried, ...]
    metadata: Mapping[str, str]


def renamed(model: MoeModel) -> tuple[Carried, ...]:
    """Everything but routed experts, under kt-kernel's names. Raises InputError where two
    tensors would get one name.
    """
    source = model.source
    taken = model.expert_tensor_names() | model.mtp_tensors
    by_key: dict[str, Carried] = {}
    for name, info in source.tensors.items():
        if name in taken:
            continue
        key = merged.rename_non_expert(name)
        if key in by_key:
            raise InputError(
                f"{source.root}: tensors {by_key[key].reads[0].name} and {name} would both be called {key}; use "
                "--non-experts skip."
            )
        by_key[key] = Carried(key, info)
    return tuple(by_key.values())


def carried(rest: Beside) -> tuple[Carried, ...]:
    """Everything but routed experts, under its own name; quantized weights are decoded."""
    return tuple(Carried(name, stored) for name, stored in rest.tensors.items())


def stage(
    source: TensorSource, tensors: Collection[Carried], max_shard_size: int | None, metadata: Mapping[str, str]
) -> Stage[CarryOverWork]:
    """The stage that copies these tensors."""
    tensors = tuple(tensors)
    shards = [(s.header_sha256, s.size, s.blob) for s in source.shards]
    units = []
    for number, (start, stop) in enumerate(
        group_by_limit([t.entry.nbytes for t in tensors], max_shard_size or DEFAULT_SHARD)
    ):
        group = tensors[start:stop]
        params: list[tuple[str, object]] = [
            ("metadata", tuple(sorted(metadata.items()))),
            ("names", tuple(t.key for t in group)),
        ]
        decoded = tuple((t.key, t.stored.fit()) for t in group if isinstance(t.stored, Weight))
        params += [("decoded", decoded)] if decoded else []
        units.append(
            Unit(
                stage=NAME,
                key=f"{number:03d}",
                versions=(VERSION,),
                params=tuple(params),
                inputs=tuple((i.name, i.dtype, i.shape, shards[i.shard]) for t in group for i in t.reads),
                final="",
                bytes_in=sum(i.nbytes for t in group for i in t.reads),
                bytes_out=sum(t.entry.nbytes for t in group),
                work=CarryOverWork(source, group, metadata),
            )
        )
    return Stage(NAME, "copy tensors that are no routed experts", ("source",), tuple(units), write_shard)


def write_shard(unit: Unit[CarryOverWork], partial: Path, context: Context) -> Result:
    """One shard of copied tensors."""
    work = unit.work
    plan = plan_shard([t.entry for t in work.tensors], work.metadata)
    with publish.DirectFile(partial, plan.size) as file:
        file.append(plan.header)
        for tensor in work.tensors:
            for piece in pieces(work.source, tensor):
                file.append(piece)
            for info in tensor.reads:
                work.source.release(info)
            context.reporter.advance(sum(info.nbytes for info in tensor.reads))
        digest = file.close()
    return Result((Written("", plan.size, digest),), len(plan.entries))


def pieces(source: TensorSource, tensor: Carried) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of an output tensor, a few MiB at a time."""
    stored = tensor.stored
    if not isinstance(stored, Weight):
        data = source.view(replace(stored, dtype="U8", shape=(stored.nbytes,)))
        for start in range(0, data.size, publish.STAGING_BYTES):
            yield np.ascontiguousarray(data[start : start + publish.STAGING_BYTES])
        return
    for expert in range(stored.shape[0] if len(stored.shape) == 3 else 1):
        linear = stored.matrix(source, expert)
        rows = max(1, publish.STAGING_BYTES // (2 * linear.shape[1]))
        for start in range(0, linear.shape[0], rows):
            bits = kernels.decode(linear.rows(start, min(start + rows, linear.shape[0])))
            yield bits.reshape(-1).view(np.uint8)
