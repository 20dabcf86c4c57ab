"""The model of the checks: 24 layers of four random experts with H = I = 1024.

`model.py OUTPUT` writes it as AMXINT8 in two NUMA slices of 150 MiB.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from ktconvert.native_quant.runtime.experts import KTExperts

LAYERS, EXPERTS, SIZE = 24, 4, 1024


def write_output(path: Path) -> None:
    """Write converted layers, and merge them."""
    rng, loose = np.random.default_rng(0), path.with_suffix(".loose")
    shutil.rmtree(loose, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
    for layer in range(LAYERS):
        # BF16 bits of numbers between 0.0078 and 0.047, of either sign
        shape = (3, EXPERTS, SIZE, SIZE)
        bits = (rng.integers(0, 2, shape) << 15 | rng.integers(0x3C00, 0x3D40, shape)).astype(np.uint16)
        KTExperts.from_bf16(*bits, method="AMXINT8", parts=2, layer=layer)._save(loose)
    subprocess.run([sys.executable, "-m", "ktconvert.pipeline.cli", "merge", "-i", loose, "-o", path, "-q"], check=True)
    shutil.rmtree(loose)


if __name__ == "__main__":
    write_output(Path(sys.argv[1]))
