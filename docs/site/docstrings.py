"""Our docstrings as Markdown, for mkdocstrings: `name  what it is` becomes a list, >>> becomes code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DUNDER = re.compile(r"(?<![`\w/])[\w/.]*__\w+__[\w.]*")  # which would be bold
NAMES = re.compile(r"^((?:[a-z_]\w*)(?:, [a-z_]\w*)*)\n {6,}(?=\S)", re.MULTILINE)  # what they are is in the next line
TERM = re.compile(r"((?:[a-z_]\w*|\*\w+)(?:, [a-z_]\w*)*) {2,}(\S.*)")


def markdown(text: str) -> str:
    """A docstring without indentation as Markdown."""
    out: list[str] = []
    inside = ""  # "list" or "code"
    for line in NAMES.sub(r"\1  ", text).splitlines():
        term = TERM.fullmatch(line)
        if inside == "list" and not line.startswith(" ") and not term:
            inside = ""
            out.append("")
        if inside == "code" and not line:
            inside = ""
            out.append("```")
        if line.startswith(">>>") and inside != "code":
            inside = "code"
            out += ["", "```pycon"]
        if inside != "code":
            line = DUNDER.sub(r"`\g<0>`", line)
        if inside != "code" and term:
            if inside != "list":
                out.append("")
            inside = "list"
            out.append(f"- {', '.join(f'`{name}`' for name in term[1].split(', '))}: {term[2]}")
        else:
            out.append(f"    {line.strip()}" if inside == "list" and line else line)
    return "\n".join([*out, "```"] if inside == "code" else out)


class HouseStyle(Extension):
    """Rewrites every docstring when it is read."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
