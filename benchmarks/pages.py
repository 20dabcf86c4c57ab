"""Puts measured tables into pages of docs/, between marks that name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def write(page: Path, name: str, body: str) -> None:
    """Put a text between its marks in a page. Raises SystemExit where the page has no place for it."""
    text = page.read_text()
    marks = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    if not re.search(marks, text, re.S):
        raise SystemExit(f"{page}: has no place for {name}")
    page.write_text(re.sub(marks, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.S))
