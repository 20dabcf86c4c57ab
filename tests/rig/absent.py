"""Packages that are not installed, as far as a process can see."""

from __future__ import annotations

from pathlib import Path


def without(package: str, folder: Path) -> dict[str, str]:
    """The environment of a process whose own finder of modules passes over this package."""
    (folder / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "found = PathFinder.find_spec\n"
        f"PathFinder.find_spec = lambda name, *rest: None if name == {package!r} else found(name, *rest)\n"
    )
    return {"PYTHONPATH": str(folder)}
