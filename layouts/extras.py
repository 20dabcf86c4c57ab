"""Optional packages, which the extras of pyproject.toml list, and the command that installs an extra."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote, urlsplit

from ktconvert.layouts.errors import KTConvertError

PACKAGE = "ktconvert"


def require_packages(feature: str, packages: Sequence[str], extra: str) -> None:
    """Raise KTConvertError, which names the command that installs the extra, if `feature` lacks one of the packages."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise KTConvertError(f"{feature} needs {', '.join(missing)}, not installed here: `{install_command(extra)}`")


def install_command(extra: str) -> str:
    """Return the command that installs an extra from where ktconvert itself was installed."""
    return f"pip install {_requirement(extra, _read_origin())}"


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
    from importlib.metadata import PackageNotFoundError, distribution  # takes 50 ms, and only errors need it

    try:
        text = distribution(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    return dict(json.loads(text)) if text else {}
