"""Conversions and `ktconvert verify` in this process, and what verify reports."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner


def made(command: click.Command, *arguments: object) -> None:
    done = CliRunner().invoke(command, [*map(str, arguments), "-q"])
    assert done.exception is None, done.output


def in_forms(packed_example: Callable[..., Path], names: Sequence[str]) -> dict[str, Path]:
    """The bundled model for two NUMA nodes, as "int4-merged", "int8-loose"."""
    more = {"merged": [], "loose": ["--no-merge-safetensor"]}
    return {name: packed_example(name[:4], 2, *more[name[5:]]) for name in names}


def verified(output: Path, *options: object) -> dict[str, Any]:
    """The JSON report, or {"message"} of an error that came before one; and the exit code."""
    from ktconvert.pipeline.cli.verify import verify

    done = CliRunner().invoke(verify, [str(output), "--json", *map(str, options)])
    code = getattr(done.exception, "exit_code", done.exit_code)
    if isinstance(done.exception, Exception) and not hasattr(done.exception, "exit_code"):
        raise done.exception  # what a user would see as a traceback
    if not done.stdout:
        return {"message": str(done.exception), "code": code}
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["message"] is None or report["message"] in done.stderr
    return report | {"code": code}


def accepted(output: Path, *options: object) -> dict[str, Any]:
    """Verify and expect success."""
    report = verified(output, *options)
    assert report["code"] == 0 and report["ok"] and report["message"] is None, report["message"]
    return report


def refused(output: Path, *options: object) -> str:
    """Verify and expect exit code 6; the first problem with the remedy."""
    report = verified(output, *options)
    sentence = str(report["message"])
    assert report["code"] == 6 and sentence.startswith(str(output)) and sentence.endswith("."), report
    return sentence


def row(report: dict[str, Any], check: str) -> dict[str, Any]:
    found: dict[str, Any] = next(found for found in report["checks"] if found["name"] == check)
    return found


def problems(report: dict[str, Any], check: str) -> list[str]:
    return list(row(report, check)["problems"])


def failed(report: dict[str, Any]) -> list[str]:
    return [found["name"] for found in report["checks"] if not found["ok"]]
