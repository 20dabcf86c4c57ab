"""Optional packages that the public classes need, and the extras that install them."""

from __future__ import annotations

from collections.abc import Callable

from ktconvert.layouts.extras import find_missing, require_packages
from ktconvert.native_quant.runtime import transformers_version

RUN_PACKAGES = ("torch", "transformers", "accelerate")  # packages that load and run a model
# Class -> its packages, and the extra of pyproject.toml with them.
PACKAGES = {"KTMoEWrapper": (("torch",), "torch"), "KTConvertConfig": (RUN_PACKAGES, "run")}


def has_packages_of(name: str) -> bool:
    """Return whether the packages that a public class needs are installed."""
    return name not in PACKAGES or not find_missing(PACKAGES[name][0])


def require_packages_of(name: str, warn: Callable[[str], None]) -> None:
    """Raise MissingPackageError if a public class lacks a package; check the version of transformers if it needs that.

    warn  is called with a sentence about a newer version
    """
    packages, extra = PACKAGES.get(name, ((), ""))
    require_packages(f"ktconvert.{name}", packages, extra)
    if "transformers" in packages:  # an older one lacks what our classes subclass
        transformers_version.check_version(warn)
