"""Fields of ktq_moe, with which C computes a layer: addresses of the weights, the function, and missing experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.expert_function import ExpertFunction
from ktconvert.native_quant import kernels
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.expert_source import Skip


class MissingExperts:
    """The experts of a layer that are not loaded, for C, which lets Python load them when a forward needs them."""

    def __init__(self, packed: weights.LayerWeights, order: list[int]) -> None:
        self._packed, self._order = packed, order
        self._marks = np.array([expert in packed.missing for expert in order], np.uint8)

    def make_fields(self) -> dict[str, Any]:
        """Return fields of ktq_moe, which keep this object alive."""
        if not self._packed.missing:
            return {}
        marks = ffi.from_buffer("uint8_t[]", self._marks)
        return {"missing": marks, "load": lib.ktq_load_experts, "context": ffi.new_handle(self)}

    def load(self, numbers: Sequence[int]) -> None:
        """Load experts. Raises errors of LayerWeights.load."""
        self._packed.load([self._order[number] for number in numbers])
        self._marks[numbers] = 0  # last, because C reads the weights of an expert without a mark

    def load_unskipped(self, skip: Skip) -> None:
        """Load all experts except those that are marked in skip."""
        if self._packed.missing:
            needed = self._marks if skip is None else self._marks & (skip == 0)
            if numbers := np.flatnonzero(needed).tolist():
                self.load(numbers)

    def load_for_c(self, numbers: Sequence[int]) -> None:
        """Load experts for a forward that is running; keep an error for the caller of the forward."""
        try:
            self.load(numbers)
        except BaseException as error:  # also an interrupt: C computes with zeros, so the caller must see it
            self._packed.record_failure(error)


@ffi.def_extern()  # type: ignore[untyped-decorator]
def ktq_load_experts(context: Any, count: int, experts: Any) -> None:
    """Load experts for C (ktq_moe)."""
    ffi.from_handle(context).load_for_c(ffi.unpack(experts, count))


_weight_bytes = functools.cache(kernels.weight_bytes)


def make_address_table(packed: weights.LayerWeights, order: list[int], transposed: bool = False) -> Any:
    """Return ktq_expert [slices][E], the addresses of matrices or transposes. Raises ValueError for wrong sizes."""
    rows = ffi.new("ktq_expert[]", packed.slicing.numa * packed.experts)
    numbers: dict[int, list[int]] = {expert: [] for expert in range(packed.experts)}  # file's expert -> our numbers
    for number, expert in enumerate(order):
        numbers[expert].append(number)
    for numa_slice, stored in packed.arrays.items():
        if numa_slice.backward != transposed:
            continue
        projection, n, k = numa_slice.projection, numa_slice.n, numa_slice.k
        actual = sum(data.nbytes for data in stored)
        expected = sum(_weight_bytes(packed.methods[projection].number, n, k))
        if actual != expected:
            raise ValueError(f"a slice [{n}, {k}] of {packed.method} has {expected} bytes, not {actual}")
        addresses = [ffi.cast("void *", data.__array_interface__["data"][0]) for data in stored]
        for number in numbers[numa_slice.expert]:
            row = rows[numa_slice.node * packed.experts + number]
            for name, address in zip((projection, f"{projection}_scale"), addresses, strict=False):
                setattr(row, name, address)  # a format without scales has one tensor
            if not transposed and (bias := packed.biases.get(numa_slice)) is not None:
                setattr(row, f"{projection}_bias", ffi.cast("float *", bias.__array_interface__["data"][0]))
    return rows


def make_function_fields(function: ExpertFunction) -> dict[str, Any]:
    """Return the fields of ktq_function."""
    return {
        "activation": getattr(lib, f"KTQ_{function.activation.upper()}"),
        "limit": function.limit,
        "alpha": function.alpha,
        "beta": function.beta,
        "ungated": not function.gated,
        "weights_on_input": function.weights_on == "input",
    }
