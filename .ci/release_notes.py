"""Prints the section of CHANGELOG.md for a version, and ends with an error unless everything names that version.

python3 .ci/release_notes.py [VERSION]     default: that of pipeline/__init__.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def declared() -> str:
    """Return the version that the package declares."""
    return re.findall(r'^__version__ = "(.+)"$', (ROOT / "pipeline" / "__init__.py").read_text(), re.M)[0]


def notes(version: str) -> str:
    """Return the entry of a version in CHANGELOG.md.

    Raises SystemExit, naming the file, if the version is declared differently elsewhere.
    """
    if version != declared():
        raise SystemExit(f"pipeline/__init__.py: the version is {declared()}, not {version}")
    if not re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M):
        raise SystemExit(f"CITATION.cff: has no line 'version: {version}'")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    section = re.search(rf"{heading}(.*?)(?=^## \[|^\[Unreleased\]:|\Z)", changelog, re.M | re.S)
    if section is None:
        raise SystemExit(f"CHANGELOG.md: has no section '## [{version}] - YYYY-MM-DD'")
    return section[1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1] if len(sys.argv) > 1 else declared()))
