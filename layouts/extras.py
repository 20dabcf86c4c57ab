"""Optional packages, which the extras of pyproject.toml list, and the command that installs an extra."""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from ktconvert.layouts.errors import MissingPackageError

PACKAGE = "ktconvert"
NEED_TORCH = frozenset({"torch", "run", "serve", "train", "gpu"})  # extras
# pip's own index has torch with CUDA, several GB
INSTALL_CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
OWN_PACKAGES = {PACKAGE, "__main__", "None", *sys.stdlib_module_names}  # never reported as broken
NVIDIA_DRIVER = Path("/proc/driver/nvidia")


def require_packages(feature: str, packages: Sequence[str], extra: str) -> None:
    """Raise MissingPackageError, with the command that installs the extra, if `feature` lacks one of the packages."""
    if missing := find_missing(packages):
        problem = f"{feature} needs {', '.join(missing)}, not installed here"
        raise MissingPackageError(f"{problem}: `{install_command(extra)}`")


def find_missing(packages: Sequence[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in packages if find_spec(name) is None]


def explain_broken_package(error: BaseException) -> MissingPackageError | None:
    """Return the error for an installed package that cannot be imported or lacks a name; None for a different error.

    That package is the one that lacks a name, or the innermost one whose module was being imported. Errors of the
    system, such as a lack of memory, do not count.
    """
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
        return None
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    if isinstance(error, ImportError):
        modules.append(str(error.name))
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        modules.append(error.obj.__name__)
    others = [package for name in modules if (package := name.partition(".")[0]) not in OWN_PACKAGES]
    if not others:
        return None
    said = next((line for line in str(error).splitlines() if line.strip()), "no message").strip()
    problem = f"{others[-1]} cannot be imported ({type(error).__name__}: {said})"
    return MissingPackageError(f"{problem}; reinstall it: `{_reinstall_command(others[-1])}`")


def _reinstall_command(package: str) -> str:
    """Return the command that replaces an importable package by a version that ktconvert supports."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, requires

    name = packages_distributions().get(package, [package])[0]
    try:
        known = requires(PACKAGE) or []
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        known = []
    pattern = re.compile(rf"{re.sub('[-_.]', '[-_.]', name)}(?![\w.-])[^;\[]*(?=;|$)", re.IGNORECASE)
    requirement = next((found[0].strip() for text in known if (found := pattern.match(text))), name)
    install = f"pip install {shlex.quote(requirement)}"
    if name == "torch" and not NVIDIA_DRIVER.exists():
        install = INSTALL_CPU_TORCH
    installer = _find_installer()
    before, pip, after = installer.partition("pip install")
    uninstaller = f"{before}{pip.replace('install', 'uninstall')}{after or ' -y'}"
    return f"{uninstaller} {name} && {install.replace('pip install', installer, 1)}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra, or several with commas, from where ktconvert itself was installed.

    Without an NVIDIA GPU, it installs torch for the CPU first, if torch is missing and the extra needs it.
    """
    commands = [f"pip install {_requirement(extra, _read_origin())}"]
    if NEED_TORCH.intersection(extra.split(",")) and find_spec("torch") is None and not NVIDIA_DRIVER.exists():
        commands.insert(0, INSTALL_CPU_TORCH)
    installer = _find_installer()
    return " && ".join(command.replace("pip install", installer, 1) for command in commands)


def _find_installer() -> str:
    """Return the command that installs into this environment, even if another pip is the first on PATH."""
    python = shlex.quote(sys.executable)
    if find_spec("pip") is None:  # environments of uv
        return f"uv pip install --python {python}"
    first = shutil.which("pip")
    is_own = first is not None and Path(first).parent == Path(sys.executable).parent
    return "pip install" if is_own else f"{python} -m pip install"


def _requirement(extra: str, origin: dict[str, Any]) -> str:
    """Return the arguments of pip for ktconvert with an extra.

    origin  what pip recorded (direct_url.json); empty if an index had the package.
            Source: https://packaging.python.org/en/latest/specifications/direct-url-data-structure/
    """
    url = origin.get("url", "")
    path = unquote(urlsplit(url).path)
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return editable + shlex.quote(f"{path}[{extra}]")
    if url.startswith("file:"):
        return shlex.quote(f"{path}[{extra}]")
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return shlex.quote(f"{PACKAGE}[{extra}]" + (f" @ {url}" if url else ""))


def _read_origin() -> dict[str, Any]:
    """Return what pip recorded about the origin; a source tree on PYTHONPATH has no record."""
    from importlib.metadata import distributions  # takes 50 ms, and only errors need it

    # A build leaves a second description, without the record, in the source tree.
    records = (found.read_text("direct_url.json") for found in distributions(name=PACKAGE))
    return dict(json.loads(next(filter(None, records), "{}")))
