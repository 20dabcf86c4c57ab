"""Types of NumPy arrays. BF16 and FP16 are stored as uint16 bits, 8-bit floats as uint8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bool = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]
Bytes = U8  # bytes of stored tensors
I8 = npt.NDArray[np.int8]
U16 = npt.NDArray[np.uint16]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
