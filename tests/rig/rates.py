"""The table at the end of a long run of test_fuzz.py: how fast documents were read, and how many were refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from ktconvert.pipeline.report.text import format_table

PROPERTY = "rates"  # property of a test: the document's name, and the result of fuzzing.fuzz


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    reports = terminalreporter.stats.get("passed", [])
    if rates := [value for report in reports for name, value in report.user_properties if name == PROPERTY]:
        terminalreporter.section("damaged documents")
        for line in format_rates(rates):
            terminalreporter.line(line)


def format_rates(numbers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the results of `fuzz`: a line per document, and one for all."""
    rows = [("document", "mutations", "per second", "refused", "accepted")]
    total = {key: sum(row[key] for row in numbers) for key in ("accepted", "refused", "seconds")}
    for row in (*numbers, {"document": "all", **total}):
        count = row["accepted"] + row["refused"]
        shares = (f"{row[key] / max(count, 1):.1%}" for key in ("refused", "accepted"))
        rows.append((row["document"], str(count), f"{count / max(row['seconds'], 1e-9):.0f}", *shares))
    return format_table(rows)
