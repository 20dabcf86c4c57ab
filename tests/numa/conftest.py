"""Fixtures of the checks, and the selection of checks for the guest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from numa.variants import VARIANTS, Variant


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on(*variants): a check only for these guests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name = os.environ.get("VARIANT")  # not set outside a guest, so that no check is collected there
    marks = ((item, item.get_closest_marker("on")) for item in items)
    items[:] = [item for item, mark in marks if mark is None or name in mark.args]


@pytest.fixture
def variant() -> Variant:
    """The guest that runs these checks."""
    return VARIANTS[os.environ["VARIANT"]]


@pytest.fixture
def model() -> Path:
    """24 layers of AMXINT8 in two NUMA slices of 150 MiB, which the host has written (model.py)."""
    return Path(os.environ["MODEL"])


@pytest.fixture
def hole() -> Path:
    """A sparse file of 600 MiB of zeros."""
    return Path(os.environ["HOLE"])
