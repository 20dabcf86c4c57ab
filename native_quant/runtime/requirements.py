"""What a caller expects of a layer's experts, compared with what its files hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.runtime.swiglu import PLAIN, Swiglu


@dataclass(frozen=True)
class Requirements:
    """None: whatever the files have.

    method, num_experts, hidden, intermediate   must agree with the files
    parts    NUMA parts that a checkpoint is cut into; converted files have their own number
    memory   one of weights.MEMORY; a checkpoint is always copied
    swiglu   what the experts are to compute
    """

    method: str | None = None
    num_experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    parts: int | None = None
    memory: str = "auto"
    swiglu: Swiglu = PLAIN

    def require_sizes(self, path: Path, layer: int, shape: tuple[int, int, int], by: str) -> None:
        """Raises UnsupportedError where the files' sizes (E, H, I) are others. by: how these are known."""
        experts, hidden, intermediate = shape
        actual = {"num_experts": experts, "hidden_size": hidden, "moe_intermediate_size": intermediate}
        wishes = {
            "num_experts": self.num_experts,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
        }
        require(path, layer, actual, wishes, by)

    def require_method(self, path: Path, layer: int, method: str, by: str) -> None:
        """Raises UnsupportedError where the files are of another method."""
        require(path, layer, {"method": method}, {"method": self.method}, by)


def require(
    path: Path, layer: int, actual: Mapping[str, str | int], required: Mapping[str, str | int | None], by: str
) -> None:
    """Raises UnsupportedError where a wanted value, unless None, is not the actual one."""
    for name, value in required.items():
        if value is not None and value != actual[name]:
            raise UnsupportedError(
                f"{path}: layer {layer} has {name} {actual[name]} by its {by}, not {value}; "
                f"give the directory that belongs to this model, or {name}={actual[name]}."
            )
