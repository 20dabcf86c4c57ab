"""The editable installation is found from every directory, and extras are installed from where ktconvert came."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ktconvert.layouts import extras

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = "file:///srv/my%20wheels/ktconvert-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ORIGINS = {
    "an index": ({}, ["ktconvert[run]"]),
    "a directory": ({"url": "file:///srv/my%20clone", "dir_info": {}}, ["/srv/my clone[run]"]),
    "an editable directory": ({"url": "file:///srv/clone", "dir_info": {"editable": True}}, ["-e", "/srv/clone[run]"]),
    "a wheel": (
        {"url": WHEEL, "archive_info": {}},
        ["/srv/my wheels/ktconvert-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl[run]"],
    ),
    "a wheel on a server": (
        {"url": "https://example.org/ktconvert-0.1.0.whl", "archive_info": {}},
        ["ktconvert[run] @ https://example.org/ktconvert-0.1.0.whl"],
    ),
    "a repository": (
        {"url": "https://example.org/k.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
        [f"ktconvert[run] @ git+https://example.org/k.git@{COMMIT}"],
    ),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_an_extra_is_installed_from_where_ktconvert_came(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, requirement = ORIGINS[name]
    monkeypatch.setattr(extras, "_read_origin", lambda: origin)
    monkeypatch.setattr(extras, "find_spec", lambda name: True)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert shlex.split(extras.install_command("run")) == ["pip", "install", *requirement]
    if " @ " in requirement[0]:
        assert Requirement(requirement[0]).extras == {"run"}


def test_the_origin_is_found_behind_the_description_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """setup.py leaves ktconvert.egg-info in the source tree, where `python -m ktconvert` looks first."""
    for name in ("tree/ktconvert.egg-info/PKG-INFO", "site/ktconvert-0.1.0.dist-info/METADATA"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("Metadata-Version: 2.1\nName: ktconvert\nVersion: 0.1.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "tree"), str(tmp_path / "site")])
    assert extras._read_origin() == {}
    origin = ORIGINS["an editable directory"][0]
    (tmp_path / "site" / "ktconvert-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    assert extras._read_origin() == origin


def test_an_environment_without_pip_gets_the_command_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_read_origin", dict)
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "pip" else True)
    command = ["uv", "pip", "install", "--python", sys.executable, "ktconvert[run]"]
    assert shlex.split(extras.install_command("run")) == command


REINSTALLED = {
    "transformers": "'transformers<5.25,>=5.17'",
    "huggingface_hub": "'huggingface_hub>=0.34'",
    "torch": "torch --index-url https://download.pytorch.org/whl/cpu",
    "unknown": "unknown",
}


@pytest.mark.parametrize("package", REINSTALLED)
@pytest.mark.parametrize("has_pip", [True, False])
def test_a_broken_package_is_replaced_in_this_environment(
    has_pip: bool, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: has_pip or None)
    monkeypatch.setattr(extras, "NVIDIA_DRIVER", tmp_path / "missing")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    error = extras.explain_broken_package(ImportError("why", name=f"{package}.part"))
    uv = f"--python {shlex.quote(sys.executable)}"
    before, after = (
        (f"uv pip uninstall {uv}", f"uv pip install {uv}") if not has_pip else ("pip uninstall -y", "pip install")
    )
    assert str(error) == (
        f"{package} cannot be imported (ImportError: why); reinstall it: "
        f"`{before} {package} && {after} {REINSTALLED[package]}`."
    )


@pytest.mark.parametrize(
    "error", [ImportError("x"), ImportError("x", name="ktconvert.x"), OSError(28, "full"), KeyError()]
)
def test_other_errors_are_no_broken_packages(error: Exception) -> None:
    assert extras.explain_broken_package(error) is None


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"].keys() - {"dev"}))
def test_torch_for_the_cpu_is_installed_first(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an extra needs torch, torch is missing, and the machine has no NVIDIA GPU."""
    needs_torch = any(Requirement(text).name == "torch" for text in PROJECT["optional-dependencies"][extra])
    monkeypatch.setattr(extras, "find_spec", lambda name: name == "pip" or None)
    monkeypatch.setattr(extras, "NVIDIA_DRIVER", tmp_path / "missing")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert extras.install_command(extra).startswith(f"{extras.INSTALL_CPU_TORCH} && pip install ") == needs_torch
    assert extras.INSTALL_CPU_TORCH in (ROOT / "docs" / "start" / "install.md").read_text()
    monkeypatch.setattr(extras, "NVIDIA_DRIVER", tmp_path)
    assert "--index-url" not in extras.install_command(extra)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert extras.install_command(extra).startswith(f"{shlex.quote(sys.executable)} -m pip install ")


def test_the_recipe_for_conda_has_the_same_requirements() -> None:
    recipe = (ROOT / "examples" / "deploy" / "meta.yaml").read_text()
    names = re.findall(r"^    - ([a-z][\w-]*) (>=[\d.]+)$", recipe.partition("  run:\n")[2], re.MULTILINE)
    ours = [f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]]
    assert sorted(map("".join, names)) == sorted(ours)


@pytest.mark.parametrize("command", [(), ("-m", "mypy", "--follow-imports=skip")], ids=["python", "mypy"])
def test_a_directory_of_this_name_does_not_hide_the_package(command: tuple[str, ...], tmp_path: Path) -> None:
    """Python takes a directory without __init__.py for a package if no entry of sys.path has a real one."""
    (tmp_path / "ktconvert").symlink_to(ROOT)
    program = tmp_path / "program" / "main.py"
    program.parent.mkdir()
    program.write_text("from ktconvert import convert\nfrom ktconvert.native_quant import kernels\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = (sys.executable, *command, str(program))
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
