"""Synthetic linears whose weights and inputs have the statistics of real ones, to compare quantizers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
SPREAD = 0.02  # standard deviation of the weights


class Layer(NamedTuple):
    """A linear and its inputs: weight [rows, features], calibration and held-out inputs [tokens, features]."""

    weight: F32
    calibration: F32
    held_out: F32


def relative_error(a: F32, b: F32) -> float:
    """Return ||a - b|| / ||b|| with Frobenius norms."""
    return float(np.sqrt(((a - b) ** 2).sum() / (b**2).sum()))


def make_layer(
    weights: str,
    rows: int = 192,
    features: int = 1024,
    alpha: float = 1.0,
    outlier: float = 6.0,
    calibration: int = 16384,
    held_out: int = 2048,
    seed: int = 3,
) -> Layer:
    """Return a linear with Gaussian ("gauss") weights, or Student's t with 5 degrees of freedom ("t5").

    Inputs are correlated: a power-law spectrum (exponent alpha) in a random orthogonal basis, scaled to unit variance,
    with 0.5 % of the channels multiplied by `outlier`.
    """
    rng = np.random.default_rng(seed)
    shape = (rows, features)
    normal = rng.standard_normal(shape) if weights == "gauss" else rng.standard_t(5, shape)
    weight = normal.astype(np.float32) * np.float32(SPREAD)
    inputs = _inputs(rng, calibration + held_out, features, alpha, outlier)
    return Layer(weight, inputs[:calibration], inputs[calibration:])


def _inputs(rng: np.random.Generator, tokens: int, features: int, alpha: float, outlier: float) -> F32:
    basis, _ = np.linalg.qr(rng.standard_normal((features, features)).astype(np.float32))
    spectrum = (np.arange(1, features + 1) ** (-alpha / 2)).astype(np.float32)
    x: F32 = (rng.standard_normal((tokens, features)).astype(np.float32) * spectrum) @ basis.T
    x /= x.std()
    x[:, rng.choice(features, features // 200, replace=False)] *= np.float32(outlier)
    return x
