"""The machine that the checks run on, and which of them it is for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from numa.variants import VARIANTS, Variant


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on(*variants): a check for these guests only")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name = os.environ.get("VARIANT")  # not set outside a guest, where no check is collected
    marks = ((item, item.get_closest_marker("on")) for item in items)
    items[:] = [item for item, mark in marks if mark is None or name in mark.args]


@pytest.fixture
def variant() -> Variant:
    """The guest that this is."""
    return VARIANTS[os.environ["VARIANT"]]


@pytest.fixture
def model() -> Path:
    """24 layers of AMXINT8 in two NUMA slices of 150 MiB, which the host made (model.py)."""
    return Path(os.environ["MODEL"])


@pytest.fixture
def hole() -> Path:
    """A file of 600 MiB, all zeros."""
    return Path(os.environ["HOLE"])
