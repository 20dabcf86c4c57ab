"""What `import ktconvert` offers: each example of its docstring is run, and nothing is imported early."""

from __future__ import annotations

import doctest
import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest

import ktconvert

PROGRAM = """
import sys
from ktconvert.pipeline.cli import main
try:
    main()
finally:
    early = {"numpy", "torch", "msgspec", "ktconvert.layouts"} & sys.modules.keys()
    assert not early, early
"""


def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Path) -> None:
    """With the bundled model as `model`."""
    (tmp_path / "model").symlink_to(example)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(ktconvert, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0 and tried > 10


def test_every_name_is_documented() -> None:
    assert ktconvert.__all__ == sorted(ktconvert.__all__)
    assert set(ktconvert.__all__) <= set(dir(ktconvert))
    for name in set(ktconvert.__all__) - {"__version__"}:
        assert getattr(ktconvert, name).__doc__, name


def test_a_wrong_name_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no command 'convert': choose one of cpu, "):
        ktconvert.plan("convert")
    with pytest.raises(ValueError, match="there is no option ouput"):
        ktconvert.plan("cpu", input="model", ouput="out")
    with pytest.raises(ValueError, match="there is no method 'int3': choose one of int4, "):
        ktconvert.verify(tmp_path, quant_method="int3")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ktconvert.nothing  # noqa: B018


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_no_numpy(argument: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_types_are_declared() -> None:
    """PEP 561: one marker for all; tests/test_wheel.py has mypy read them."""
    assert importlib.resources.files(ktconvert).joinpath("py.typed").is_file()
