"""The documentation matches the program: every command, option, table row, link and example is checked.

`python tests/test_docs.py` writes the generated tables of options, architectures and events, the list of commands, and the
docstrings in python.md.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest

import ktconvert
from ktconvert.layouts import errors
from ktconvert.layouts.checkpoints import archs
from ktconvert.layouts.checkpoints.arch_file import NO_KEYS, parse_arch
from ktconvert.layouts.checkpoints.archs import ARCHS, Arch, Style
from ktconvert.layouts.checkpoints.expert_function import ACTIVATIONS, PLAIN
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import FORMATS, Format, formats_by_option
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.native_quant.matrix import KINDS
from ktconvert.pipeline.cli import COMMANDS, HEADINGS, group
from ktconvert.pipeline.cli.command import Command, click_parameters
from ktconvert.pipeline.cli.config_file import OTHER_VARIABLES, PREFIX
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.declare import REQUIRED, Effect, Option, OptionField, option_fields
from ktconvert.pipeline.report import events as report_events
from ktconvert.quantizers import ROW_GRIDS
from rig import conversion, python_page, reference
from rig.adapters import write_kt_adapter
from rig.hub_server import serve_hub
from rig.safetensors import write_file

ROOT = Path(__file__).resolve().parents[1]
EXCLUDED = {".venv", ".git", "build", "dist"}
PAGES = sorted(p for p in ROOT.rglob("*.md") if not EXCLUDED & {*p.relative_to(ROOT).parts})
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FIRST_CONVERSION = DOCS / "start" / "first-conversion.md"
FIT_PAGE = DOCS / "how-to" / "fit.md"
REFERENCE = DOCS / "reference"
COMMANDS_PAGE = REFERENCE / "commands" / "index.md"
FORMATS_PAGE = REFERENCE / "formats.md"
FROM_KT_KERNEL_PAGE = DOCS / "how-to" / "from-kt-kernel.md"
ARCHITECTURES_PAGE = REFERENCE / "architectures.md"
BYTES_PAGE = REFERENCE / "bytes.md"
PYTHON_PAGE = REFERENCE / "python.md"
JSON_PAGE = REFERENCE / "json.md"
SCHEMA = REFERENCE / "events.schema.json"
NUMBERS_PAGE = DOCS / "explanation" / "numerics.md"
DESIGN_PAGE = DOCS / "explanation" / "design.md"

FENCE = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```", re.M | re.S)
# The output, in the current folder, of a command that converts the bundled model
CLONE_OUTPUT = re.compile(r"examples/qwen3-moe-small\b[^\n`]* (?:-o|--output) (?!/)([\w./-]+)")
SHAPES_OUTPUT = re.compile(r"python benchmarks/shapes\.py ([\w.-]+)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Paths of a writer's machine, which mean nothing to readers.
OWN_PATHS = re.compile(r"(?<![\w.])/(?:work|opt|root|tmp|var|private|Users|home/(?!you/))\b[\w./-]*")


def page_id(path: Path) -> str:
    """Return the name of a page for test ids."""
    return path.relative_to(ROOT).as_posix()


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def page_of(name: str) -> Path:
    """Return the page of a command."""
    return REFERENCE / "commands" / f"{name}.md"


def blocks(text: str, language: str) -> Iterator[str]:
    for match in FENCE.finditer(text):
        if match[2] == language:
            yield "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())


def command(name: str) -> Command:
    result = group.get_command(click.Context(group), name)
    assert isinstance(result, Command)
    return result


# ---- commands and options -------------------------------------------------------------------------------------------


# The heading of an option's section, and the first paragraph below it.
SECTION = re.compile(r"^### `(--[\w-]+)`\n\n(?:.+\n)+", re.MULTILINE)


def rows_of_options(name: str) -> dict[str, str]:
    """Return flags -> row of each option on its command's page, up to the link to its section and <br>.

    The text after <br> is written by hand.
    """
    rows = {}
    for option_field in option_fields(command(name).settings):
        option = option_field.declaration
        if not isinstance(option, Option):
            continue
        text = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
        default = _default(option_field, option)
        for parameter in click_parameters(option_field, name):
            spellings = [*parameter.opts, *parameter.secondary_opts]
            if isinstance(parameter, click.Argument):
                spellings = [spelling.upper() for spelling in spellings]
                default = "required" if parameter.nargs == 1 else default
            elif option.argument is not None:
                text, default = f"Same as {option.argument.upper()}.", ""
            flags = ", ".join(f"`{spelling}`" for spelling in spellings)
            rows[flags] = f"| {flags} | {default} | {text}"
    return rows


def _default(option_field: OptionField, option: Option) -> str:
    if option.unset is not None:
        return option.unset
    if option_field.default is REQUIRED:
        return "required"
    if option.ignored is not None or option_field.default in (None, ()):
        return ""
    if option_field.value_type is bool:
        return "on" if option_field.default else "off"
    if isinstance(option_field.default, tuple):
        return ", ".join(map(str, option_field.default))
    return f"`{option_field.default}`" if isinstance(option_field.default, str | Path) else str(option_field.default)


def flags_of_row(line: str) -> str:
    """Return the first cell of a row of options, or "" for any other line."""
    return re.split(r"(?<!\\)\|", line)[1].strip() if line.startswith("| `") else ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_table_of_its_command(name: str) -> None:
    page = read_text(page_of(name))
    assert with_rows_of_options(name) == page, "run `python tests/test_docs.py`"
    rows = {flags: line for line in page.splitlines() if (flags := flags_of_row(line))}
    assert rows.keys() == rows_of_options(name).keys(), f"ktconvert {name}: rows of options that do not exist"
    for parameter in command(name).params:
        if isinstance(parameter.type, click.Choice):
            row = next(row for flags, row in rows.items() if f"`{parameter.opts[0]}`" in flags)
            row += "".join(match[0] for match in SECTION.finditer(page) if match[1] in parameter.opts)
            missing = [choice for choice in parameter.type.choices if not re.search(rf"\b{choice}\b", row)]
            assert missing == [], f"ktconvert {name}: choices that the page does not name"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_an_option_is_one_short_sentence(name: str) -> None:
    for option_field in option_fields(command(name).settings):
        if isinstance(option := option_field.declaration, Option):
            text = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
            assert len(text) <= 100 and re.fullmatch(r"[A-Z](?:[^.]|\.(?! [A-Z]))+\.", text), option_field.flag


def with_rows_of_options(name: str) -> str:
    """Return a command's page with generated rows, and with the generated first paragraph of each option's section.

    Rows keep the hand-written text after <br>, and link to the section if there is one. New options come last.
    """
    rows = rows_of_options(name)
    page, end = read_text(page_of(name)), 0
    sections = {flag for flag in SECTION.findall(page) if any(f"`{flag}`" in flags for flags in rows)}
    page = SECTION.sub(lambda match: f"### `{match[1]}`\n\n{values_of_option(name, match[1])}\n", page)
    lines = []
    for line in page.splitlines():
        flags = flags_of_row(line)
        if (start := rows.pop(flags, None)) is not None:
            link = next((f" [More](#{flag})" for flag in sorted(sections) if f"`{flag}`" in flags), "")
            line = start + link + (line[line.find("<br>") :] if "<br>" in line else " |")
            end = len(lines) + 1
        lines.append(line)
    lines[end:end] = [f"{row} |" for row in rows.values()]
    return "\n".join(lines) + "\n"


def values_of_option(name: str, flag: str) -> str:
    """Return the first paragraph of an option's section: its default and its values."""
    parameter = next(each for each in command(name).params if flag in each.opts)
    row = next(row for flags, row in rows_of_options(name).items() if f"`{flag}`" in flags)
    default = re.split(r"(?<!\\)\|", row)[2].strip() or "none"
    choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
    values = f" Values: {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    return textwrap.fill(f"*Default: {default}.{values}*", 120, break_long_words=False, break_on_hyphens=False)


def list_of_commands() -> str:
    """Return the commands in the groups of `ktconvert --help`, for docs/reference/commands/index.md."""
    lines = []
    for heading, commands in HEADINGS.items():
        lines += [f"**{heading}**", ""]
        for name, text in commands.items():
            item = f"- [{name}]({name}.md): {text}"
            lines += textwrap.wrap(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines.append("")
    return "\n".join(lines)


def with_commands(page: str) -> str:
    pattern = r"(?<=<!-- commands -->\n).*(?=<!-- end of commands -->)"
    return re.sub(pattern, lambda _: f"\n{list_of_commands()}\n", page, flags=re.S)


def test_list_of_commands_and_menu_have_the_groups_of_the_help() -> None:
    page = read_text(COMMANDS_PAGE)
    assert with_commands(page) == page, "run `python tests/test_docs.py`"
    menu = read_text(ROOT / "mkdocs.yml")
    assert re.findall(r"^ +- ([\w-]+): reference/commands/", menu, re.M) == [*COMMANDS]


def examples() -> list[tuple[str, str]]:
    """Return (page, line) of every line that calls ktconvert, in bash blocks and in the help of commands.

    In the help, text after the command begins after several blanks.
    """
    texts = ((page_id(page), "\n".join(blocks(read_text(page), "bash")).replace("\\\n", " ")) for page in PAGES)
    lines = ((page, line.strip()) for page, text in texts for line in text.splitlines())
    helped = ((f"{name} --help", command(name).epilog or "") for name in COMMANDS)
    in_help = [(name, re.split(r" {3,}", line.strip())[0]) for name, text in helped for line in text.splitlines()]
    return [(page, line) for page, line in [*lines, *in_help] if line.startswith("ktconvert ")]


@pytest.mark.parametrize(("page", "line"), examples())
def test_every_example_parses(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    name, arguments = words[0], words[1:]
    assert name in COMMANDS, f"{page}: {line}"
    parent = click.Context(group, info_name="ktconvert", **group.context_settings)
    try:  # parses the line and checks types and choices; runs nothing
        command(name).make_context(name, arguments, parent=parent)
    except click.exceptions.UsageError as error:
        if not isinstance(error, click.BadParameter) or "does not exist" not in error.message:
            raise AssertionError(f"{page}: {line}: {error.format_message()}") from error


def test_commands_of_kt_kernel_only_change_the_name_of_the_program() -> None:
    """The page lists pairs of commands, theirs and ours, which differ only in the program's name."""
    scripts = {"convert_cpu_weights": "cpu", "convert_cpu_weights_ds4": "cpu", "merge_cpu_weights": "merge"}
    scripts |= {"convert_gpu_weights": "gpu", "convert_moe_to_bf16": "dequantize"}
    scripts["convert_kimi_k2_fp8_to_bf16_cpu"] = "dequantize"
    text = "\n".join(blocks(read_text(FROM_KT_KERNEL_PAGE), "bash"))
    lines = [line for line in map(str.split, text.splitlines()) if line and not line[0].startswith("#")]
    assert len(lines) == 2 * (10 + 3 + 2)
    for theirs, ours in zip(lines[::2], lines[1::2], strict=True):
        assert theirs[0] == "python" and ours == ["ktconvert", scripts[Path(theirs[1]).stem], *theirs[2:]]


# ---- exit codes, JSON, environment ----------------------------------------------------------------------------------


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_git_ignores_the_outputs_of_commands_in_a_clone() -> None:
    outputs = {f"{name}/" for page in PAGES for name in CLONE_OUTPUT.findall(read_text(page))}
    outputs |= {f"{name}/" for page in PAGES for name in SHAPES_OUTPUT.findall(read_text(page))}
    outputs |= {
        f"{name}/" for name in re.findall(r"""ktconvert\.convert\("cpu", model, "([\w-]+)\"""", ktconvert.__doc__ or "")
    }
    assert {"small-INT8/", "tutorial-INT8/", "small-W4A16/", "int8/", "adapter/"} <= outputs
    assert {"Qwen3-235B-A22B/", "model-int8/"} <= outputs
    command = ["git", "check-ignore", "--no-index", *sorted(outputs)]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert outputs == {*ignored}


def test_pages_have_no_attributes_that_only_the_site_understands() -> None:
    """GitHub would print `{ .class }`; docs/site/hooks.py adds such attributes."""
    assert [page.name for page in PAGES if re.search(r"\{ ?[.#][\w-]+[^}`]*\}", page.read_text())] == []


def test_every_exit_code_is_documented() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.KTConvertError)]
    rows = [rf"{error.exit_code} \| `{error.__name__}`" for error in classes]
    page = read_text(REFERENCE / "exit-codes.md")
    for row in (*rows, "130, 143 \\|"):  # the last two cells: meaning and remedy
        assert re.search(rf"^\| {row}.*\| \w.* \| \S.* \|$", page, re.M), row
    assert "\n| 0 |" in page and len(rows) > 5


PLANS = ("plan", "plans")  # lines of --dry-run, whose fields only the page lists


def schema() -> str:
    """Return the text of docs/reference/events.schema.json."""
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "a line of ktconvert --json"}
    events = msgspec.json.schema(report_events.Event)
    for kind in PLANS:
        name = f"{kind.capitalize()}Event"
        events["anyOf"].append({"$ref": f"#/$defs/{name}"})
        events["discriminator"]["mapping"][kind] = f"#/$defs/{name}"
        definition = schema_of_rows(rows_of_page(kind))
        definition["properties"]["event"] = {"enum": [kind]}
        events["$defs"][name] = {"title": name, **definition, "required": ["event"]}
    return json.dumps(draft | events, indent=2) + "\n"


def rows_of_page(title: str) -> dict[str, str]:
    """Return field -> type of a document, from the table of docs/reference/json.md."""
    text = read_text(JSON_PAGE).partition(f"\n### `{title}`\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, re.M))


def schema_of_rows(rows: dict[str, str], path: str = "") -> dict[str, Any]:
    """Return the JSON schema of an object whose fields are the rows below a path."""
    properties: dict[str, Any] = {}
    for row, words in rows.items():
        name = row.removeprefix(path)
        if not row.startswith(path) or re.search(r"[.\[]", name):
            continue
        singular = words.removeprefix("list of ").removesuffix("s")
        is_list = words.startswith("list of ")
        types = singular.split(" or ")
        inner: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
        below = f"{row}{'[]' if is_list else ''}."
        if any(other.startswith(below) for other in rows):
            inner = schema_of_rows(rows, below)
        properties[name] = {"type": "array", "items": inner} if is_list else inner
    return {"type": "object", "properties": properties}


def tables_of_events() -> str:
    """Return the descriptions of all events for docs/reference/json.md."""
    definitions = msgspec.json.schema(report_events.Event)["$defs"]
    parts = []
    for kind, event in report_events.EVENTS.items():
        definition = definitions[event.__name__]
        parts.append(f"### `{kind}`\n\n{definition['description']}\n\n| field | type | |\n|---|---|---|\n")
        for name, field in definition["properties"].items():
            if name != "event":
                types = [each["type"] for each in field.get("anyOf", [field]) if each["type"] != "null"]
                parts[-1] += f"| `{name}` | {' or '.join(types)} | {field['description']} |\n"
    return "\n".join(parts)


def with_events(page: str) -> str:
    return re.sub(
        r"(?<=<!-- events -->\n).*(?=<!-- end of events -->)", lambda _: f"\n{tables_of_events()}\n", page, flags=re.S
    )


def test_events_of_the_page_and_schema_equal_those_of_the_code() -> None:
    page = read_text(JSON_PAGE)
    assert with_events(page) == page and read_text(SCHEMA) == schema(), "run `python tests/test_docs.py`"


JSON_TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict, "null": None}


def fits(value: Any, type_name: str) -> bool:
    """Return whether a value has a type, as docs/reference/json.md writes it."""
    if " or " in type_name:
        return any(fits(value, each) for each in type_name.split(" or "))
    if type_name.startswith("list of "):
        return isinstance(value, list) and all(fits(each, type_name[8:].removesuffix("s")) for each in value)
    if type_name == "null":
        return value is None
    return isinstance(value, JSON_TYPES[type_name]) and (type_name == "boolean" or not isinstance(value, bool))


def leaves_of(value: Any, rows: dict[str, str], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each field, and of fields inside it that the page describes."""
    for name, inner in value.items():
        yield path + name, inner
        for infix, objects in ((".", [inner]), ("[].", inner)):
            if any(row.startswith(path + name + infix) for row in rows):
                for each in objects:
                    yield from leaves_of(each, rows, path + name + infix)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return heading of docs/reference/json.md -> documents that real commands print."""
    folder, example = tmp_path_factory.mktemp("json"), ROOT / "examples" / "qwen3-moe-small"
    out = folder / "out"
    (folder / "counts").mkdir()
    counts = {"counts": ("I64", np.array([[5, 1, 5, 9], [2, 0, 7, 1]], np.int64))}
    write_file(folder / "counts" / "counts.safetensors", counts)

    def run_json(*arguments: object) -> list[Any]:
        done = conversion.ktconvert(*map(str, arguments), "--json")
        return [json.loads(line) for line in done.stdout.splitlines()]

    kt = write_kt_adapter(folder / "kt", dict.fromkeys(range(2), (8, 256, 256)))
    lines = [*run_json("cpu", "-i", example, "-o", out), *run_json("cpu", "-i", example, "-o", out)]
    lines += run_json("cpu", "-i", example, "-o", out, "--quant-method", "int8")  # refused
    lines += run_json("cpu", "-i", example, "-o", folder / "part", "--part", "0/2")
    lines += run_json("cpu", "-i", example, "-o", folder / "part", "--verify-inputs")
    plans = run_json("cpu", "-i", example, "-o", out, "--overwrite", "--dry-run")
    plans += run_json("cpu", "-i", example, "-o", out, "--quant-method", "int4,int8", "--dry-run")
    run_json("cpu", "-i", example, "-o", folder / "begun", "--part", "0/2")

    with serve_hub({"org/tiny": example}) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}
        check = ("models", "--check", folder / "counts", "--against", "org/tiny", "--json")
        checked = json.loads(conversion.ktconvert(*check, env=env).stdout)
        streamed = ("cpu", "-i", "org/tiny", "-o", folder / "streamed", "--stream", "--dry-run", "--json")
        plans.append(json.loads(conversion.ktconvert(*streamed, env=env).stdout.splitlines()[-1]))

    text = ("--text", ROOT / "examples" / "heldout.txt", "--sequence-length", 64, "--max-sequences", 1)
    return {
        "events": [line for line in lines if line["event"] not in PLANS],
        **{kind: [plan for plan in plans if plan["event"] == kind] for kind in PLANS},
        "ktconvert status": run_json("status", out) + run_json("status", folder / "begun"),
        "ktconvert verify": run_json("verify", out, "--against", example),
        "ktconvert inspect": [run_json("inspect", *w)[0] for w in ([out], [folder / "begun"], [example, "--columns"])],
        "ktconvert fit": run_json("fit", example, "--vram", "24GB", "--bandwidth", "100GB"),
        "ktconvert models": run_json("models", folder),
        "ktconvert models --check": [checked],
        "ktconvert bench": run_json("bench", out, "--tokens", 1),
        "ktconvert experts": run_json("experts", folder / "counts", "--output", folder / "m.safetensors", "--total", 4),
        "ktconvert convert-adapter": run_json("convert-adapter", kt, "--model", example, "-o", folder / "peft"),
        "ktconvert eval": run_json("eval", example, "--cpu-weights", out, *text),
        "ktconvert doctor": run_json("doctor", "--disk", folder),
        "ktconvert version": run_json("version"),
    }


def test_printed_events_have_documented_types(documents: dict[str, list[Any]]) -> None:
    kinds = {line["event"] for line in documents["events"]}
    assert {"note", "begin", "start", "done", "part", "finished", "hashed", "error"} <= kinds
    for line in documents["events"]:
        event = msgspec.convert(line, report_events.Event)
        assert {*line} - {"event"} <= {*event.__struct_fields__}, line


def test_printed_lines_match_the_schema(documents: dict[str, list[Any]]) -> None:
    """Also those of --dry-run; reports are no lines of events."""
    validator = pytest.importorskip("jsonschema").Draft202012Validator(json.loads(read_text(SCHEMA)))
    for title in ("events", *PLANS):
        for line in documents[title]:
            assert [error.message for error in validator.iter_errors(line)] == [], line
            assert not validator.is_valid({**line, "event": "unknown"})
        assert not all(validator.is_valid({**line, "output": 1, "outputs": 1}) for line in documents[title])


# Fields of checkpoints that cannot be converted, and of running conversions.
RARE = {"dequantize", "dequantized_bytes", "refused", "source_problem"}
RARE |= {f"making[].{name}" for name in ("unit", "host", "pid", "since", "alive")}


def test_json_documents_have_the_documented_fields_and_types(documents: dict[str, list[Any]]) -> None:
    for title, printed in documents.items():
        if title == "events":
            continue
        rows = rows_of_page(title)
        assert printed and rows, title
        fields_printed = [pair for document in printed for pair in leaves_of(document, rows)]
        assert {path for path, _ in fields_printed} - {*rows} == set(), title
        assert {*rows} - {path for path, _ in fields_printed} - RARE == set(), title
        assert [(path, value) for path, value in fields_printed if not fits(value, rows[path])] == [], title


def test_every_environment_variable_is_documented() -> None:
    text = read_text(REFERENCE / "environment.md")
    read = re.compile(r"environ(?:\.get\(|\[)\s*\"(\w+)\"")
    sources = [path for folder in ("pipeline", "layouts", "native_quant") for path in (ROOT / folder).rglob("*.py")]
    variables = {name for path in sources for name in read.findall(read_text(path))}
    assert "KTCONVERT_ISA" in variables
    for name in {*variables, *OTHER_VARIABLES, "NO_COLOR", "_KTCONVERT_COMPLETE"}:
        assert f"`{name}`" in text, name
    assert {name for name in variables if name.startswith(PREFIX)} <= {*OTHER_VARIABLES}


# ---- where to add what --------------------------------------------------------------------------------------------


def additions() -> dict[str, tuple[str, str]]:
    """Return subject -> (what to change, its test), from the table of docs/explanation/design.md."""
    page = read_text(DESIGN_PAGE).partition("## Where to add what")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    return {subject.removeprefix("| "): (changes, tests.rstrip(" |")) for subject, changes, tests in cells[2:]}


@pytest.mark.parametrize("subject", additions())
def test_names_and_files_of_each_addition_exist(subject: str) -> None:
    changes, tests = additions()[subject]
    link = r"\[[^]]+\]\(([^)#]+)\)"
    for name, target in re.findall(rf"`(\w+)` (?:row )?in {link}", changes):
        text = read_text((DESIGN_PAGE.parent / target).resolve())
        definition = rf"^(?:static const .*)?{name}\b.*[=(]|^def {name}|^class {name}"
        assert re.search(definition, text, re.MULTILINE), (name, target)
    for target in re.findall(link, changes + tests):
        assert (DESIGN_PAGE.parent / target).resolve().exists(), target
    assert tests == "the same" or re.search(r"\(\.\./\.\./tests/test_\w+\.py\)", tests), f"no test guards {subject}"


def test_functions_of_the_path_exist() -> None:
    """Each function that design.md lists for a file is defined there."""
    section = read_text(DESIGN_PAGE).partition("## The path of a weight")[2].partition("\n## ")[0]
    listed = re.findall(r"\[[^]]+\]\((\S+?)\): (`\w+`(?:, `\w+`)*)", section)
    assert len(listed) > 20
    for target, names in listed:
        text = read_text((DESIGN_PAGE.parent / target).resolve())
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b(?:def|class) {name}\b|^[a-z].*\b{name}\(", text, re.MULTILINE), (target, name)


# ---- the tables of the code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_format", FORMATS.values(), ids=lambda x: x.name)
def test_bytes_of_every_format_are_documented(output_format: Format) -> None:
    page, multiple = read_text(BYTES_PAGE), output_format.encoding.multiple
    assert f"{output_format.name} version {output_format.encoding.version}" in " ".join(page.split()), (
        "a new version? describe its bytes"
    )
    assert output_format.loose is None or output_format.loose in page
    row = re.search(rf"^\| `{output_format.option}` \|.*\| {multiple} \|$", page, re.MULTILINE)
    assert row or f"{multiple} ({output_format.name})" in page or output_format not in formats_by_option("cpu").values()


def test_numerics_describes_every_quantizer_and_decoder() -> None:
    page = read_text(NUMBERS_PAGE).lower()
    for name in ROW_GRIDS:
        assert name in page, name
    for kind in KINDS:
        for text in (page, read_text(FORMATS_PAGE).lower()):
            assert kind in text or kind.replace("_", " ") in text, kind


def test_documented_offset_equals_that_of_the_reference() -> None:
    """The Python code in bytes.md gives the position of a code in the bytes of the NumPy reference."""
    scope: dict[str, Any] = {}
    exec(next(blocks(read_text(BYTES_PAGE), "python")), scope)
    rng = np.random.default_rng(0)
    for bits, n, k in ((8, 128, 3712), (4, 256, 3712), (8, 64, 192), (4, 128, 128)):
        codes = rng.integers(-7, 8, (n, k)).astype(np.int8)
        packed = reference.pack(bits, codes)
        mask = (1 << bits) - 1
        positions = [(int(rng.integers(n)), int(rng.integers(k))) for _ in range(2000)]
        for row, column in [*positions, (0, 0), (n - 1, k - 1)]:
            byte, bit = scope["offset"](bits, n, k, row, column)
            assert packed[byte] >> bit & mask == int(codes[row, column]) & mask, (bits, n, k, row, column)


def test_every_key_of_manifest_and_metadata_is_documented(tmp_path: Path, cli: Any, example: Path) -> None:
    """bytes.md names every key of the manifest, of a shard's metadata and of quantization_config."""
    out = tmp_path / "out"
    cli("cpu", "-i", example, "-o", out, "--verify-inputs")
    page = read_text(BYTES_PAGE)
    cli("gpu", "-i", example, "-o", tmp_path / "gpu", "--quant-method", "RTN")
    names = set[str]()
    for output in (out, tmp_path / "gpu"):
        document = json.loads((output / manifest.NAME).read_text())
        names |= {*document, *document["settings"], *document["model"], *document["source"][0], *document["files"][0]}
        names |= read_header(min(output.glob("*.safetensors"))).metadata.keys()
    for cls in CONVERSION_OPTIONS.values():
        names |= {each.name for each in option_fields(cls) if each.declaration.effect in (Effect.FILES, Effect.WEIGHTS)}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
    assert [command for command in CONVERSION_OPTIONS if f"`{command}`" not in page] == []
    config = json.loads((out / "config.json").read_text())
    assert [name for name in config["quantization_config"] if f'"{name}"' not in page] == []


# ---- architectures --------------------------------------------------------------------------------------------------


def _style_cell(style: Style) -> str:
    """Return the table cell of a style: the differences of its tensor names in braces; N is the expert."""
    names = [getattr(style, part) for part in style.matrices]
    names = [re.sub(r"^\{prefix\}layers\.\{layer\}\.", "", name).removesuffix(".weight") for name in names]
    names = [name.replace("{expert}", "N") for name in names]
    base = names[0][: names[0].rfind(".") + 1]
    ends = [name.removeprefix(base) for name in names]
    tail = "_proj" if all(end.endswith("_proj") for end in ends) else ""
    return f"`{base}{{{','.join(end.removesuffix(tail) for end in ends)}}}{tail}`"


def _stored_cell(arch: Arch) -> str:
    """Return the styles of a stack, without those of GGUFs."""
    styles = (style for style in arch.stored if not style.down.startswith("blk."))
    return ", ".join(map(_style_cell, styles))


def _row(arch: Arch) -> str:
    stored = "; ".join(
        f"{stack.stack}: {_stored_cell(stack)}" if arch.more else _stored_cell(stack) for stack in arch.stacks
    )
    if arch.refusal is not None:
        result = f"**refused**: {arch.refusal}"
    elif arch.function != PLAIN:
        result = "converted, for ktconvert's runtime"
    else:
        result = "converted"
    inputs = ", weights on the input" if arch.function.weights_on == "input" else ""
    computes = f"`{arch.function.activation}`{inputs}" if arch.stored else ""
    return f"| {arch.name} | {', '.join(f'`{m}`' for m in arch.matches)} | {stored} | {computes} | {result} |"


def architecture_table() -> str:
    """Return the table of docs/reference/architectures.md."""
    head = "| family | `model_type` or `architectures` | experts | activation | |\n|---|---|---|---|---|"
    return "\n".join([head, *map(_row, ARCHS)])


def test_documented_architectures_equal_the_table() -> None:
    if architecture_table() not in read_text(ARCHITECTURES_PAGE):
        pytest.fail("docs/reference/architectures.md differs from archs.py: run `python tests/test_docs.py`")


def test_activations_prefixes_and_config_keys_are_documented() -> None:
    page = read_text(ARCHITECTURES_PAGE)
    for name, activation in ACTIVATIONS.items():
        assert f"`{name}`" in page
        assert activation.formula.format(alpha="alpha", beta="beta") in page
        for constant in activation.constants:
            assert all(f"`{key}`" in page for key in constant.keys)
    keys = {*archs.NUM_LAYERS, *archs.NUM_EXPERTS, *archs.MOE_WIDTH, *archs.DENSE_WIDTH, *archs.HIDDEN, *archs.PREFIXES}
    for key in keys - {""}:
        assert f"`{key}`" in page, key


def test_documented_arch_file_can_be_read_and_every_key_is_named() -> None:
    page = read_text(ARCHITECTURES_PAGE)
    arch = parse_arch(next(blocks(page, "toml")))
    assert arch.name
    for field in fields(Arch):
        if field.name not in NO_KEYS:
            assert f"`{field.name}`" in page, field.name


# ---- every page -----------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    plain = FENCE.sub("", text)
    titles = re.findall(r"^#{1,6} (.+)$", plain, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_have_a_target(page: Path) -> None:
    text = FENCE.sub("", read_text(page))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_id(page)}: {target} does not exist"
        assert file.is_relative_to(ROOT), f"{page_id(page)}: {target} is outside the project"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(read_text(file)), f"{page_id(page)}: {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_page_names_a_path_of_the_writers_machine(page: Path) -> None:
    match = OWN_PATHS.search(read_text(page))
    assert match is None, f"{page_id(page)}: {match[0]}"


def test_transcripts_equal_the_output_of_the_program(tmp_path: Path, cli: Any, example: Path) -> None:
    """Transcripts of inspect and verify are complete (in the README and in the steps of the tutorial: abridged), except
    paths and advice for this machine."""
    verified = {}
    for method in ("int4", "int8"):
        out = tmp_path / method
        cli("cpu", "-i", example, "-o", out, "--quant-method", method, "--numa", 1)
        verified[method] = cli("verify", out, "--against", example, "--full").stdout
    inspected = cli("inspect", example).stdout
    planned = cli(
        "cpu", "-i", example, "-o", tmp_path / "new", "--quant-method", "int8", "--numa", 1, "--dry-run"
    ).stdout
    for page, output in ((page_of("inspect"), inspected), (FIRST_CONVERSION, verified["int4"])):
        lines = read_text(page).splitlines()
        for line in output.splitlines():
            if not line.startswith(("checkpoint ", "output ", "ktconvert cpu ", "ktconvert gpu ")):
                assert line in lines, f"{page_id(page)}, transcript: {line!r} is missing; paste `make demo` again"
    shown = read_text(README).partition("check        result\n")[2].partition("\nverified\n")[0].splitlines()
    assert shown and [line for line in shown if line not in [*verified["int8"].splitlines(), "..."]] == []
    list_sizes = "du -h --apparent-size * | expand -t 8"  # as in the Makefile
    sizes = subprocess.run(list_sizes, cwd=tmp_path / "int4", shell=True, capture_output=True, text=True, check=True)
    assert sizes.stdout in read_text(FIRST_CONVERSION)
    inspect_step, plan_step, _, verify_step = list(blocks(read_text(FIRST_CONVERSION), "text"))[:4]
    for step, output in ((inspect_step, inspected), (plan_step, planned), (verify_step, verified["int8"])):
        stable = [line for line in step.splitlines() if not line.startswith("checkpoint ") and line[-1:] != "†"]
        assert [line for line in stable if line not in [*output.splitlines(), "..."]] == []


def test_transcripts_of_fit_equal_its_output(tmp_path: Path) -> None:
    """The page shows `fit` for headers in the shape of a released model, the second time abridged."""
    page = read_text(FIT_PAGE)
    script, name = re.findall(r"^python (benchmarks/\w+\.py) (\S+)", page, re.MULTILINE)[0]
    subprocess.run([sys.executable, ROOT / script, name], cwd=tmp_path, check=True)
    commands = [line for line in "\n".join(blocks(page, "bash")).splitlines() if line.startswith("ktconvert fit ")]
    for line, transcript in zip(commands, blocks(page, "text"), strict=True):
        printed = conversion.ktconvert(*shlex.split(line)[1:], cwd=tmp_path).stdout.splitlines()
        shown = transcript.splitlines()
        assert [each for each in shown if each not in [*printed, "..."]] == []
        assert shown == printed or "..." in shown


def test_figures_that_depend_on_the_machine_are_marked() -> None:
    """Speeds and results of torch in the transcripts of the README, the tutorial and commands differ between machines."""
    machine = re.compile(
        r"(tokens|MiB)/s|^(perplexity|KL divergence|top-1 agreement) |this machine|more notes|^\d+ +0\.\d+$|^memory "
    )
    for page in (README, FIRST_CONVERSION, *map(page_of, COMMANDS)):
        lines = [line for block in blocks(read_text(page), "text") for line in block.splitlines()]
        figures = [line for line in lines if machine.search(line.removesuffix("  †"))]
        assert [line for line in figures if not line.endswith("  †")] == []
        assert [line for line in lines if line.endswith("†") and line not in figures] == []


def test_the_readme_is_short_and_names_every_command() -> None:
    text = read_text(README)
    assert len(text.splitlines()) <= 160, "README.md: more than 160 lines; move details to docs/"
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", text)] == []


def strings_of_code() -> str:
    """Return every string of the program, one per line, with … for inserted values."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    paths = [path for folder in ("pipeline", "layouts", "native_quant") for path in (ROOT / folder).rglob("*.py")]
    return "\n".join({repr(text(node)) for path in paths for node in ast.walk(ast.parse(read_text(path)))})


def test_messages_of_the_troubleshooting_page_exist() -> None:
    """Each part of a heading between two … is in a string of the program."""
    page = read_text(DOCS / "how-to" / "troubleshoot.md")
    code = strings_of_code().replace("\\'", "'")
    messages = [line[4:] for line in page.splitlines() if line.startswith("### ") and "…" in line]
    assert len(messages) > 10
    pieces = [piece.strip(" .") for message in messages for piece in message.split("…")]
    assert [piece for piece in pieces if piece not in code] == []


@pytest.mark.parametrize("name", ["accuracy", "gguf", "decode"])
def test_data_of_figures_equals_the_tables_of_the_pages(name: str) -> None:
    """Each row of a figure's data is a row of a table."""
    data = json.loads(read_text(DOCS / "figures" / f"{name}.json"))
    lines = {line for page in (DOCS / "explanation").glob("*.md") for line in read_text(page).splitlines()}
    rows = [f"| {' | '.join(row)} |".replace("|  |", "| |") for key in {*data} - {"bandwidth"} for row in data[key]]
    assert rows and [row for row in rows if row.replace("|  |", "| |") not in lines] == []


def test_the_page_of_python_has_the_docstrings_of_every_public_name() -> None:
    pytest.importorskip("transformers")
    page = read_text(PYTHON_PAGE)
    assert python_page.write_page(page) == page, "run `python tests/test_docs.py`"
    public = {*ktconvert.__all__} - {"__version__"}
    assert {*re.findall(r"^### `ktconvert\.(\w+)`$", page, re.MULTILINE)} == public


def test_every_page_is_in_the_menu() -> None:
    """mkdocs.yml lists each page of docs/ once, and the changelog, which docs/site/hooks.py adds."""
    listed = re.findall(r"[\w/-]+\.md$", read_text(ROOT / "mkdocs.yml").partition("\nnav:\n")[2], re.M)
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted([*pages, "changelog.md"])


if __name__ == "__main__":
    for each in COMMANDS:
        page_of(each).write_text(with_rows_of_options(each))
    COMMANDS_PAGE.write_text(with_commands(read_text(COMMANDS_PAGE)))
    JSON_PAGE.write_text(with_events(read_text(JSON_PAGE)))
    SCHEMA.write_text(schema())
    PYTHON_PAGE.write_text(python_page.write_page(read_text(PYTHON_PAGE)))
    old = re.compile(r"^\| family \|.*(?:\n\|.*)*", re.M)
    ARCHITECTURES_PAGE.write_text(old.sub(lambda _: architecture_table(), read_text(ARCHITECTURES_PAGE), count=1))
