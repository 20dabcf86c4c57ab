"""The versions of transformers that are used: one place for the bounds, and a sentence for any other version before
the model is loaded.

A version is claimed by a directory of package metadata on the path, before the real one's.
"""

import re
import tomllib
from pathlib import Path

import pytest

from ktconvert import native_quant
from ktconvert.layouts.errors import KTConvertError
from ktconvert.native_quant.runtime.transformers_version import (
    BOUNDS,
    NEWEST,
    OLDEST,
    TESTED,
    explain_too_new,
    explain_too_old,
)
from ktconvert.pipeline.cli.conversion import gpu
from rig.verifying import invoke, run_verify

ROOT = Path(__file__).resolve().parents[1]
TOO_OLD = f"transformers 5.16.1 is too old: ktconvert was tested with {TESTED}; pip install 'transformers{BOUNDS}'"


def claim(folder: Path, version: str) -> Path:
    """Return a folder for the path in which transformers claims this version."""
    about = folder / f"transformers-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    return folder


def test_the_extras_have_the_same_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = {
        extra: [needed for needed in packages if needed.startswith("transformers")]
        for extra, packages in project["optional-dependencies"].items()
    }
    assert expected["run"] == [f"transformers{BOUNDS}"]
    assert expected["serve"] == [f"transformers[serving]{BOUNDS}"]
    (of_gpu,) = expected["gpu"]  # llmcompressor's: within ours
    first, beyond = ((int(a), int(b)) for a, b in re.findall(r"(\d+)\.(\d+)", of_gpu))
    assert OLDEST <= first < beyond <= (NEWEST[0], NEWEST[1] + 1)


@pytest.mark.parametrize("page", ["docs/start/install.md", "docs/how-to/use-from-python.md"])
def test_the_pages_name_the_tested_versions(page):
    assert f"transformers {TESTED}" in (ROOT / page).read_text()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        *((old, explain_too_old) for old in ("4.57.6", "5.16.1")),
        *((good, None) for good in ("5.17.0rc1", "5.17.0", f"{NEWEST[0]}.{NEWEST[1]}.9", "unknown")),
        *((new, explain_too_new) for new in (f"{NEWEST[0]}.{NEWEST[1] + 1}.0.dev0", "10.0")),
    ],
)
def test_messages_name_the_remedy(version, said, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(claim(tmp_path, version))
    for sentence in (explain_too_old, explain_too_new):
        assert (sentence() is not None) == (sentence is said)
    if said is not None:
        reported = said() or ""
        assert reported.startswith(f"transformers {version} is ")
        assert TESTED in reported and f"'transformers{BOUNDS}'" in reported


@pytest.mark.parametrize(
    "command", [("run", "--prompt", "x"), ("serve",), ("eval", "--cpu-weights", __file__, "--text", __file__)]
)
def test_an_older_version_is_rejected_before_its_import(command, cli, example, tmp_path):
    claim(tmp_path, "5.16.1")
    (tmp_path / "transformers.py").write_text("raise SystemExit('transformers was imported')\n")
    name, *options = command
    result = cli(name, example, *options, code=1, env={"PYTHONPATH": str(tmp_path)})
    assert (result.stdout, result.stderr) == ("", f"ktconvert: {TOO_OLD}.\n")


def test_a_newer_version_causes_a_warning(cli, tmp_path):
    claim(tmp_path / "path", "10.0")
    nowhere = tmp_path / "nowhere"
    result = cli("run", nowhere, "--prompt", "x", code=5, env={"PYTHONPATH": str(tmp_path / "path")})
    warning, error = result.stderr.splitlines()
    assert warning.startswith(f"warning: transformers 10.0 is newer than the tested versions, {TESTED}; if ")
    assert error == f"ktconvert: {nowhere}: does not exist; check the path, or give a hub id such as org/name."


def test_python_imports_check_the_version(tmp_path, monkeypatch):
    """Without KTConvertConfig no model is loaded with our experts."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(claim(tmp_path / "older", "5.16.1"))
    with pytest.raises(KTConvertError, match=re.escape(TOO_OLD)):
        _ = native_quant.KTConvertConfig
    monkeypatch.syspath_prepend(claim(tmp_path / "newer", "10.0"))
    with pytest.warns(UserWarning, match="transformers 10.0 is newer") as warned:
        assert native_quant.KTConvertConfig.__name__ == "KTConvertConfig"
    assert [warning.filename for warning in warned] == [__file__]  # where it was asked for


def test_verify_works_without_transformers(example, tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors")
    invoke(gpu, "-i", example, "-o", tmp_path / "w4", "--quant-method", "RTN", "--quant-type", "W4A16")
    monkeypatch.syspath_prepend(claim(tmp_path / "path", "5.16.1"))
    assert f"not loaded: {TOO_OLD}" in run_verify(tmp_path / "w4")["notes"]
