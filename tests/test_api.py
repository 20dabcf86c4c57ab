"""Tests of the public names of `import ktconvert`. Each example of its docstring runs."""

from __future__ import annotations

import doctest
import importlib.metadata
import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest

import ktconvert


def test_docstring_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Path) -> None:
    """The bundled model is linked as `model`."""
    (tmp_path / "model").symlink_to(example)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(ktconvert, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0 and tried > 10


def test_every_name_is_documented() -> None:
    assert ktconvert.__all__ == sorted(ktconvert.__all__)
    assert set(ktconvert.__all__) <= set(dir(ktconvert))
    for name in set(ktconvert.__all__) - {"__version__"}:
        assert getattr(ktconvert, name).__doc__, name


def test_wrong_names_raise_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown command 'convert'; choose one of cpu, "):
        ktconvert.plan("convert")
    with pytest.raises(ValueError, match="unknown option ouput"):
        ktconvert.plan("cpu", input="model", ouput="out")
    with pytest.raises(ValueError, match="unknown method 'int3'; choose one of "):
        ktconvert.verify(tmp_path, quant_method="int3")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ktconvert.nothing  # noqa: B018


def test_version_is_the_same_everywhere() -> None:
    """pipeline/__init__.py defines the version; CITATION.cff and CHANGELOG.md must have the same."""
    root = Path(__file__).resolve().parents[1]
    assert importlib.metadata.version("ktconvert") == ktconvert.__version__
    notes = [sys.executable, root / ".ci" / "release_notes.py"]
    result = subprocess.run([*notes, ktconvert.__version__], capture_output=True, text=True)
    assert result.returncode == 0 and "### Added" in result.stdout, result.stderr
    assert "## [" not in result.stdout
    result = subprocess.run([*notes, "9.9.9"], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("pipeline/__init__.py: the version is ")
