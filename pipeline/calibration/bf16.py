"""BF16 between NumPy, which knows it as bits, and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bits = npt.NDArray[np.uint16]


def to_tensor(bits: Bits, device: Any = "cpu") -> torch.Tensor:
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16).to(device)


def to_bits(tensor: torch.Tensor) -> Bits:
    import torch

    return tensor.contiguous().cpu().view(torch.uint16).numpy()
