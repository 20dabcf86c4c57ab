"""The generated parts of docs/reference/python.md: signatures and docstrings of the public names, and their options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import ktconvert
from ktconvert._functions import group_options, write_default
from ktconvert.native_quant.runtime.converted_experts import MEMORY
from ktconvert.native_quant.runtime.experts import ACTIVATIONS
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.queries import VerifyOptions

OPTIONS = "\nOptions ("  # begins the part of a docstring that the page has as tables
TABLES = re.compile(r"^(<!-- options -->\n).*?(?=^<!-- end -->$)", re.DOTALL | re.MULTILINE)
SECTION = re.compile(r"^(#{3,4} `(ktconvert[\w.]*)`\n).*?(?=^<!-- end -->$)", re.DOTALL | re.MULTILINE)
TRAINING = re.compile(r"^(<!-- training -->\n).*?(?=^<!-- end -->$)", re.DOTALL | re.MULTILINE)
CONSTRUCTED = {"KTConvertConfig", "KTMoEWrapper"}  # classes that programs call; functions return the others
ALIASES = {"Memory": MEMORY, "Activations": ACTIVATIONS}
WIDTH = 110  # of a signature; a longer one has a line for each parameter
DUNDER = re.compile(r"(?<![`\w/])[\w/.]*__\w+__[\w.]*")  # would be bold
NAMES = re.compile(r"^((?:[a-z_]\w*)(?:, [a-z_]\w*)*)\n {6,}(?=\S)", re.MULTILINE)  # their meaning is in the next line
TERM = re.compile(r"((?:[a-z_]\w*|\*\w+)(?:, [a-z_]\w*)*) {2,}(\S.*)")


def convert_docstring(text: str) -> str:
    """Return a docstring as Markdown: arguments as a list, examples as code."""
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
            out.append(f"  {line.strip()}" if inside == "list" and line else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*out, "```"] if inside == "code" else out))


def write_signature(name: str, function: Callable[..., Any]) -> str:
    """Return a call with its parameters, on one line if it fits."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    words: list[str] = []
    for index, parameter in enumerate(parameters):
        before, after = parameters[:index], parameters[index + 1 :]
        if parameter.kind is parameter.KEYWORD_ONLY and all(each.kind is not parameter.kind for each in before):
            words.append("*")
        words.append(str(parameter.replace(annotation=_Text(_spell_aliases(parameter.annotation)))))
        if parameter.kind is parameter.POSITIONAL_ONLY and all(each.kind is not parameter.kind for each in after):
            words.append("/")
    result = "" if isinstance(function, type) else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){result}"])


def _spell_aliases(annotation: str) -> str:
    """Return an annotation with the words of each alias of ours in its place."""
    return re.sub("|".join(ALIASES), lambda match: f"Literal{list(ALIASES[match[0]])}", annotation)


class _Text(str):
    """An annotation that is written without quotes."""

    __repr__ = str.__str__


def write_section(path: str) -> str:
    """Return signature and docstring of a public name, such as ktconvert.KTExperts.load."""
    value: Any = ktconvert
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    is_called = inspect.isroutine(value) or value.__name__ in CONSTRUCTED
    docstring = inspect.getdoc(value) or ""
    signature = f"```python\n{write_signature(path, value)}\n```\n\n" if is_called else ""
    return f"\n{signature}{convert_docstring(docstring.partition(OPTIONS)[0]).strip()}\n\n"


def write_training() -> str:
    """Return the docstring, and the signatures and docstrings of the public methods, of KTMoEWrapper(mode="sft")."""
    from ktconvert.native_quant.runtime.sft import SftMoEWrapper

    parts = [f"\n{convert_docstring(inspect.getdoc(SftMoEWrapper) or '').strip()}\n"]
    for name, function in vars(SftMoEWrapper).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            docstring = convert_docstring(inspect.getdoc(function) or "").strip()
            parts.append(f"#### `{name}`\n\n```python\n{write_signature(name, function)}\n```\n")
            parts += [f"{docstring}\n"] * bool(docstring)
    return "\n".join([*parts, ""])


def write_tables() -> str:
    """Return a table of the options of each command, and one of those that all conversions share."""
    parts = []
    groups = group_options(CONVERSION_OPTIONS) | group_options({"verify": VerifyOptions})
    for title, rows in groups.items():
        heading = f"[`{title}`](commands/{title}.md)" if title in {*CONVERSION_OPTIONS, "verify"} else title
        lines = [write_row(parameter, meaning) for parameter, meaning in rows.values()]
        head = ["| name | default | meaning |", "|---|---|---|"]
        parts.append("\n".join(["", f"Options of {heading}:", "", *head, *lines]))
    return "\n".join([*parts, "", ""])


def write_row(parameter: inspect.Parameter, meaning: str) -> str:
    """Return the row of an option. Types would fill the page, and editors show them."""
    default = write_default(parameter)
    return f"| `{parameter.name}` | {f'`{default}`' if default else 'required'} | {meaning} |"


def write_page(page: str) -> str:
    """Return the page with a generated section below the heading of each public name, up to <!-- end -->."""
    page = SECTION.sub(lambda match: match[1] + write_section(match[2]), page)
    page = TRAINING.sub(lambda match: match[1] + write_training(), page)
    return TABLES.sub(lambda match: match[1] + write_tables(), page)
