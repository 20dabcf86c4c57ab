"""Writes measured tables into pages of docs/, between marks, and data into docs/figures, whose figures it draws."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def write(page: Path, name: str, body: str) -> None:
    """Write a text between its marks in a page. Raises SystemExit if the page has no such marks."""
    text = page.read_text()
    marks = rf"(<!-- {name} -->\n\n).*?(\n<!-- end of {name} -->)"
    if not re.search(marks, text, re.S):
        raise SystemExit(f"{page}: has no place for {name}")
    page.write_text(re.sub(marks, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.S))


def draw(name: str, data: dict[str, Any]) -> None:
    """Write the data of a figure, with a line for each list of plain values, and draw all figures."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", text)
    (FIGURES / f"{name}.json").write_text(text + "\n")
    subprocess.run([sys.executable, FIGURES / "draw.py"], check=True)
