"""Link the packages into build/ns, where they have the names under which they are imported (`ktconvert.layouts`).

An editable installation and mypy read them there.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARENT = ROOT / "build" / "ns"
API = ROOT / "pipeline" / "api"  # ktconvert itself
PACKAGES = ("pipeline", "quantizers", "layouts", "native_quant")


def link_packages() -> None:
    """Make the links, or make them again."""
    package = PARENT / "ktconvert"
    package.mkdir(parents=True, exist_ok=True)
    public = [path for path in API.iterdir() if path.name != "__pycache__"]
    for target in (*public, *(ROOT / name for name in PACKAGES)):
        link = package / target.name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(target, package))


if __name__ == "__main__":
    link_packages()
