"""Conversions and `ktconvert verify` in this process, and access to the reports of verify."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner


def invoke(command: click.Command, *arguments: object) -> None:
    """Run a command and require that it succeeds."""
    result = CliRunner().invoke(command, [*map(str, arguments), "-q"])
    assert result.exception is None, result.output


def example_outputs(packed_example: Callable[..., Path], names: Sequence[str]) -> dict[str, Path]:
    """Return the bundled model converted for two NUMA nodes, by names such as "int4-merged" and "int8-loose"."""
    more = {"merged": [], "loose": ["--no-merge-safetensor"]}
    return {name: packed_example(name[:4], 2, *more[name[5:]]) for name in names}


def run_verify(output: Path, *options: object) -> dict[str, Any]:
    """Return the JSON report, or {"message"} of an error before the report, with the exit code."""
    from ktconvert.pipeline.cli.verify import verify

    result = CliRunner().invoke(verify, [str(output), "--json", *map(str, options)])
    code = getattr(result.exception, "exit_code", result.exit_code)
    if isinstance(result.exception, Exception) and not hasattr(result.exception, "exit_code"):
        raise result.exception  # what a user would see as a traceback
    if not result.stdout:
        return {"message": str(result.exception), "code": code}
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["message"] is None or report["message"] in result.stderr
    return report | {"code": code}


def require_accepted(output: Path, *options: object) -> dict[str, Any]:
    """Verify an output, require success, and return the report."""
    report = run_verify(output, *options)
    assert report["code"] == 0 and report["ok"] and report["message"] is None, report["message"]
    return report


def require_refused(output: Path, *options: object) -> str:
    """Verify an output, require exit code 6, and return the message."""
    report = run_verify(output, *options)
    message = str(report["message"])
    assert report["code"] == 6 and message.startswith(str(output)) and message.endswith("."), report
    return message


def find_check(report: dict[str, Any], check: str) -> dict[str, Any]:
    """Return the row of a check."""
    row: dict[str, Any] = next(row for row in report["checks"] if row["name"] == check)
    return row


def problems(report: dict[str, Any], check: str) -> list[str]:
    """Return the problems of a check."""
    return list(find_check(report, check)["problems"])


def failed_checks(report: dict[str, Any]) -> list[str]:
    """Return the names of the failed checks."""
    return [row["name"] for row in report["checks"] if not row["ok"]]
