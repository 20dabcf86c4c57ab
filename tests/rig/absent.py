"""Processes that cannot see an installed package."""

from __future__ import annotations

from pathlib import Path


def hide_package(package: str, folder: Path) -> dict[str, str]:
    """Return the environment of a process whose module finder skips this package."""
    (folder / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find_spec = PathFinder.find_spec\n"
        f"PathFinder.find_spec = lambda name, *rest: None if name == {package!r} else find_spec(name, *rest)\n"
    )
    return {"PYTHONPATH": str(folder)}


def break_package(package: str, folder: Path, code: str) -> dict[str, str]:
    """Return the environment of a process in which importing this package runs this code instead."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(code)
    return {"PYTHONPATH": str(folder)}
