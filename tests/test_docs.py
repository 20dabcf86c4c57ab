"""The documentation says what the program does: every command, option, table row, link and example is checked against
the real thing.

`python tests/test_docs.py` writes what follows from code: the tables of options, architectures and events.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest

from ktconvert.layouts import errors
from ktconvert.layouts.checkpoints import archs
from ktconvert.layouts.checkpoints.arch_file import NO_KEYS, parse_arch
from ktconvert.layouts.checkpoints.archs import ACTIVATIONS, ARCHS, Arch, Style
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import FORMATS, Format, formats_by_option
from ktconvert.native_quant.matrix import KINDS
from ktconvert.pipeline.cli import COMMANDS, group
from ktconvert.pipeline.cli.command import Command, click_parameters
from ktconvert.pipeline.options.declare import REQUIRED, Option, OptionField, option_fields
from ktconvert.pipeline.report import events as report_events
from ktconvert.quantizers import ROW_GRIDS
from rig import conversion, reference
from rig.safetensors import write_file

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {".venv", ".git", "build", "dist"}
PAGES = sorted(p for p in ROOT.rglob("*.md") if not LEFT_OUT & {*p.relative_to(ROOT).parts})
README = ROOT / "README.md"
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
FORMATS_PAGE = REFERENCE / "formats.md"
FROM_KT_KERNEL_PAGE = DOCS / "how-to" / "from-kt-kernel.md"
ARCHITECTURES_PAGE = REFERENCE / "architectures.md"
BYTES_PAGE = REFERENCE / "bytes.md"
JSON_PAGE = REFERENCE / "json.md"
SCHEMA = REFERENCE / "events.schema.json"
NUMBERS_PAGE = DOCS / "explanation" / "numerics.md"
DESIGN_PAGE = DOCS / "explanation" / "design.md"

FENCE = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Paths on a writer's machine, which readers do not have.
OWN_PATHS = re.compile(r"(?<![\w.])/(?:work|opt|root|tmp|var|private|Users|home/(?!you/))\b[\w./-]*")


def named(path: Path) -> str:
    """The id of a page in test names."""
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def page_of(name: str) -> Path:
    """The page of a command."""
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


def rows_of_options(name: str) -> dict[str, str]:
    """Flags -> the row of an option on its command's page up to the <br>, behind which a page says what it likes."""
    rows = {}
    for option_field in option_fields(command(name).settings):
        option = option_field.declaration
        if not isinstance(option, Option):
            continue
        text = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
        default = _default(option_field, option)
        for parameter in click_parameters(option_field):
            spellings = [*parameter.opts, *parameter.secondary_opts]
            if isinstance(parameter, click.Argument):
                spellings, default = [spelling.upper() for spelling in spellings], "required"
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
    """The first cell of a row of options; "" of any other line."""
    return re.split(r"(?<!\\)\|", line)[1].strip() if line.startswith("| `") else ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_table_of_its_command(name: str) -> None:
    page = text_of(page_of(name))
    assert with_rows_of_options(name) == page, "run `python tests/test_docs.py`"
    rows = {flags: line for line in page.splitlines() if (flags := flags_of_row(line))}
    assert rows.keys() == rows_of_options(name).keys(), f"ktconvert {name}: rows for what does not exist"
    for parameter in command(name).params:
        if isinstance(parameter.type, click.Choice):
            row = next(row for flags, row in rows.items() if f"`{parameter.opts[0]}`" in flags)
            missing = [choice for choice in parameter.type.choices if not re.search(rf"\b{choice}\b", row)]
            assert missing == [], f"ktconvert {name}: no word on these"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_an_option_is_one_short_sentence(name: str) -> None:
    for option_field in option_fields(command(name).settings):
        if isinstance(option := option_field.declaration, Option):
            text = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
            assert len(text) <= 100 and re.fullmatch(r"[A-Z](?:[^.]|\.(?! [A-Z]))+\.", text), option_field.flag


def with_rows_of_options(name: str) -> str:
    """A command's page with the rows that are declared, and its own words behind them. New options are put last."""
    lines, rows, end = [], rows_of_options(name), 0
    for line in text_of(page_of(name)).splitlines():
        start = rows.pop(flags_of_row(line), None)
        lines.append(line if start is None else start + (line[line.find("<br>") :] if "<br>" in line else " |"))
        end = len(lines) if line.startswith("| ") else end
    lines[end:end] = [f"{row} |" for row in rows.values()]
    return "\n".join(lines) + "\n"


def examples() -> list[tuple[str, str]]:
    """Every line of a bash block that calls ktconvert: (page, line)."""
    texts = ((named(page), "\n".join(blocks(text_of(page), "bash")).replace("\\\n", " ")) for page in PAGES)
    lines = ((page, line.strip()) for page, text in texts for line in text.splitlines())
    return [(page, line) for page, line in lines if line.startswith("ktconvert ")]


@pytest.mark.parametrize(("page", "line"), examples())
def test_every_example_parses(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    name, arguments = words[0], words[1:]
    assert name in COMMANDS, f"{page}: {line}"
    parent = click.Context(group, info_name="ktconvert", **group.context_settings)
    try:  # parses, checks types and choices, calls nothing
        command(name).make_context(name, arguments, parent=parent)
    except click.exceptions.UsageError as error:
        if not isinstance(error, click.BadParameter) or "does not exist" not in error.message:
            raise AssertionError(f"{page}: {line}: {error.format_message()}") from error


def test_the_move_from_kt_kernel_changes_the_program_and_nothing_else() -> None:
    """Their commands and ours stand in pairs; only the program's name differs."""
    scripts = {"convert_cpu_weights": "cpu", "convert_cpu_weights_ds4": "cpu", "merge_cpu_weights": "merge"}
    scripts |= {"convert_gpu_weights": "gpu", "convert_moe_to_bf16": "dequantize"}
    scripts["convert_kimi_k2_fp8_to_bf16_cpu"] = "dequantize"
    text = "\n".join(blocks(text_of(FROM_KT_KERNEL_PAGE), "bash"))
    lines = [line for line in map(str.split, text.splitlines()) if line and not line[0].startswith("#")]
    assert len(lines) == 2 * (10 + 3 + 2)
    for theirs, ours in zip(lines[::2], lines[1::2], strict=True):
        assert theirs[0] == "python" and ours == ["ktconvert", scripts[Path(theirs[1]).stem], *theirs[2:]]


# ---- exit codes, JSON, environment ----------------------------------------------------------------------------------


def test_every_exit_code_is_documented() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.KtconvertError)]
    rows = [rf"{error.exit_code} \| `{error.__name__}`" for error in classes]
    page = text_of(REFERENCE / "exit-codes.md")
    for row in (*rows, "130, 143 \\|"):  # the last two cells: what it means, and what to do
        assert re.search(rf"^\| {row}.*\| \w.* \| \S.* \|$", page, re.M), row
    assert "\n| 0 |" in page and len(rows) > 5


def schema() -> str:
    """docs/reference/events.schema.json."""
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "an event of ktconvert --json"}
    return json.dumps(draft | msgspec.json.schema(report_events.Event), indent=2) + "\n"


def tables_of_events() -> str:
    """What docs/reference/json.md says of each event."""
    definitions = msgspec.json.schema(report_events.Event)["$defs"]
    parts = []
    for kind, event in report_events.EVENTS.items():
        about = definitions[event.__name__]
        parts.append(f"### `{kind}`\n\n{about['description']}\n\n| field | type | |\n|---|---|---|\n")
        for name, field in about["properties"].items():
            if name != "event":
                kinds = [each["type"] for each in field.get("anyOf", [field]) if each["type"] != "null"]
                parts[-1] += f"| `{name}` | {' or '.join(kinds)} | {field['description']} |\n"
    return "\n".join(parts)


def with_events(page: str) -> str:
    return re.sub(
        r"(?<=<!-- events -->\n).*(?=<!-- end of events -->)", lambda _: f"\n{tables_of_events()}\n", page, flags=re.S
    )


def test_the_events_are_those_of_the_code() -> None:
    page = text_of(JSON_PAGE)
    assert with_events(page) == page and text_of(SCHEMA) == schema(), "run `python tests/test_docs.py`"


JSON_TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict, "null": None}


def fits(value: Any, words: str) -> bool:
    """Whether a value is of a type as docs/reference/json.md says it."""
    if " or " in words:
        return any(fits(value, each) for each in words.split(" or "))
    if words.startswith("list of "):
        return isinstance(value, list) and all(fits(each, words[8:].removesuffix("s")) for each in value)
    if words == "null":
        return value is None
    return isinstance(value, JSON_TYPES[words]) and (words == "boolean" or not isinstance(value, bool))


def leaves_of(value: Any, rows: dict[str, str], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each field, and of those inside it, if the page describes them."""
    for name, inner in value.items():
        yield path + name, inner
        for infix, objects in ((".", [inner]), ("[].", inner)):
            if any(row.startswith(path + name + infix) for row in rows):
                for each in objects:
                    yield from leaves_of(each, rows, path + name + infix)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Heading of docs/reference/json.md -> what real commands print."""
    folder, example = tmp_path_factory.mktemp("json"), ROOT / "examples" / "qwen3-moe-small"
    out = folder / "out"
    (folder / "counts").mkdir()
    counts = {"counts": ("I64", np.array([[5, 1, 5, 9], [2, 0, 7, 1]], np.int64))}
    write_file(folder / "counts" / "counts.safetensors", counts)

    def printed(*arguments: object) -> list[Any]:
        done = conversion.ktconvert(*map(str, arguments), "--json")
        return [json.loads(line) for line in done.stdout.splitlines()]

    lines = [*printed("cpu", "-i", example, "-o", out), *printed("cpu", "-i", example, "-o", out)]
    lines += printed("cpu", "-i", example, "-o", out, "--quant-method", "int8")  # refused
    lines += printed("cpu", "-i", example, "-o", folder / "part", "--part", "0/2")
    lines += printed("cpu", "-i", example, "-o", folder / "part", "--verify-inputs")
    plans = printed("cpu", "-i", example, "-o", out, "--overwrite", "--dry-run")
    plans += printed("cpu", "-i", example, "-o", out, "--quant-method", "int4,int8", "--dry-run")
    printed("cpu", "-i", example, "-o", folder / "begun", "--part", "0/2")
    text = ("--text", ROOT / "examples" / "heldout.txt", "--window", 64, "--max-windows", 1)
    return {
        "events": [line for line in lines if line["event"] not in ("plan", "plans")],
        "plan": [plan for plan in plans if plan["event"] == "plan"],
        "plans": [plan for plan in plans if plan["event"] == "plans"],
        "ktconvert status": printed("status", out) + printed("status", folder / "begun"),
        "ktconvert verify": printed("verify", out, "--against", example),
        "ktconvert inspect": [printed("inspect", *w)[0] for w in ([out], [folder / "begun"], [example, "--columns"])],
        "ktconvert bench": printed("bench", out, "--tokens", 1),
        "ktconvert experts": printed("experts", folder / "counts", "--output", folder / "m.safetensors", "--total", 4),
        "ktconvert eval": printed("eval", example, "--cpu-weights", out, *text),
        "ktconvert doctor": printed("doctor", "--disk", folder),
        "ktconvert version": printed("version"),
    }


def test_events_are_of_their_types(documents: dict[str, list[Any]]) -> None:
    kinds = {line["event"] for line in documents["events"]}
    assert {"note", "begin", "start", "done", "part", "finished", "hashed", "error"} <= kinds
    for line in documents["events"]:
        event = msgspec.convert(line, report_events.Event)
        assert {*line} - {"event"} <= {*event.__struct_fields__}, line


# Of checkpoints that cannot be converted as usual, and of conversions that run.
RARE = {"dequantize", "dequantized_bytes", "refused", "source_problem"}
RARE |= {f"making[].{name}" for name in ("unit", "host", "pid", "since", "alive")}


def test_documents_are_as_documented(documents: dict[str, list[Any]]) -> None:
    page = text_of(JSON_PAGE)
    for title, found in documents.items():
        if title == "events":
            continue
        text = page.partition(f"\n### `{title}`\n")[2].partition("\n#")[0]
        rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, re.M))
        assert found and rows, title
        seen = [pair for document in found for pair in leaves_of(document, rows)]
        assert {path for path, _ in seen} - {*rows} == set(), title
        assert {*rows} - {path for path, _ in seen} - RARE == set(), title
        assert [(path, value) for path, value in seen if not fits(value, rows[path])] == [], title


def test_every_environment_variable_is_documented() -> None:
    text = text_of(REFERENCE / "environment.md")
    read = re.compile(r"environ(?:\.get\(|\[)\s*\"(\w+)\"")
    sources = [path for folder in ("pipeline", "layouts", "native_quant") for path in (ROOT / folder).rglob("*.py")]
    variables = {name for path in sources for name in read.findall(text_of(path))}
    assert "KTCONVERT_ISA" in variables
    for name in {*variables, "NO_COLOR", "_KTCONVERT_COMPLETE"}:
        assert f"`{name}`" in text, name


# ---- where to add what --------------------------------------------------------------------------------------------


def additions() -> dict[str, tuple[str, str]]:
    """Subject -> (what to touch, what holds it), from the table of docs/explanation/design.md."""
    page = text_of(DESIGN_PAGE).partition("## Where to add what")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    return {subject.removeprefix("| "): (touch, held.rstrip(" |")) for subject, touch, held in cells[2:]}


@pytest.mark.parametrize("subject", additions())
def test_what_to_touch_is_there(subject: str) -> None:
    touch, held = additions()[subject]
    link = r"\[[^]]+\]\(([^)#]+)\)"
    for name, target in re.findall(rf"`(\w+)` (?:row )?in {link}", touch):
        text = text_of((DESIGN_PAGE.parent / target).resolve())
        stands = rf"^(?:static const .*)?{name}\b.*[=(]|^def {name}|^class {name}"
        assert re.search(stands, text, re.MULTILINE), (name, target)
    for target in re.findall(link, touch + held):
        assert (DESIGN_PAGE.parent / target).resolve().exists(), target
    assert held == "the same" or re.search(r"\(\.\./\.\./tests/test_\w+\.py\)", held), f"no test holds {subject}"


def test_functions_of_the_walk_exist() -> None:
    """Each function that design.md lists for a file is defined there."""
    section = text_of(DESIGN_PAGE).partition("## The walk of a weight")[2].partition("\n## ")[0]
    listed = re.findall(r"\[[^]]+\]\((\S+?)\): (`\w+`(?:, `\w+`)*)", section)
    assert len(listed) > 20
    for target, names in listed:
        text = text_of((DESIGN_PAGE.parent / target).resolve())
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b(?:def|class) {name}\b|^[a-z].*\b{name}\(", text, re.MULTILINE), (target, name)


# ---- the tables of the code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda x: x.name)
def test_the_bytes_of_every_form_are_documented(form: Format) -> None:
    page, multiple = text_of(BYTES_PAGE), form.encoding.multiple
    assert f"{form.name} version {form.encoding.version}" in " ".join(page.split()), "a new version? describe its bytes"
    assert form.loose is None or form.loose in page
    row = re.search(rf"^\| `{form.option}` \|.*\| {multiple} \|$", page, re.MULTILINE)
    assert row or f"{multiple} ({form.name})" in page or form not in formats_by_option("cpu").values()


def test_every_quantizer_and_decoder_is_in_numerics() -> None:
    page = text_of(NUMBERS_PAGE).lower()
    for name in ROW_GRIDS:
        assert name in page, name
    for kind in KINDS:
        for text in (page, text_of(FORMATS_PAGE).lower()):
            assert kind in text or kind.replace("_", " ") in text, kind


def test_the_formula_of_a_tile_is_that_of_the_reference() -> None:
    """The Python in bytes.md says where a code lies; the NumPy reference puts it there."""
    scope: dict[str, Any] = {}
    exec(next(blocks(text_of(BYTES_PAGE), "python")), scope)
    rng = np.random.default_rng(0)
    for bits, n, k in ((8, 128, 3712), (4, 256, 3712), (8, 64, 192), (4, 128, 128)):
        codes = rng.integers(-7, 8, (n, k)).astype(np.int8)
        packed = reference.pack(bits, codes)
        mask = (1 << bits) - 1
        positions = [(int(rng.integers(n)), int(rng.integers(k))) for _ in range(2000)]
        for row, column in [*positions, (0, 0), (n - 1, k - 1)]:
            byte, bit = scope["offset"](bits, n, k, row, column)
            assert packed[byte] >> bit & mask == int(codes[row, column]) & mask, (bits, n, k, row, column)


def test_the_manifest_of_an_output_is_the_documented_one(tmp_path: Path, cli: Any, example: Path) -> None:
    """Every key of the manifest, of a shard's metadata and of quantization_config stands in bytes.md."""
    out = tmp_path / "out"
    cli("cpu", "-i", example, "-o", out, "--verify-inputs")
    page = text_of(BYTES_PAGE)
    cli("gpu", "-i", example, "-o", tmp_path / "gpu", "--quant-method", "RTN")
    names = set[str]()
    for output in (out, tmp_path / "gpu"):
        document = json.loads((output / manifest.NAME).read_text())
        names |= {*document, *document["settings"], *document["model"], *document["source"][0], *document["files"][0]}
        names |= read_header(next(output.glob("*.safetensors"))).metadata.keys()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
    config = json.loads((out / "config.json").read_text())
    assert [name for name in config["quantization_config"] if f'"{name}"' not in page] == []


# ---- architectures --------------------------------------------------------------------------------------------------


def _short(style: Style) -> str:
    """How a table cell shows a style: what its tensor names differ in, in braces; N is the expert."""
    names = [getattr(style, part) for part in style.matrices]
    names = [re.sub(r"^\{prefix\}layers\.\{layer\}\.", "", name).removesuffix(".weight") for name in names]
    names = [name.replace("{expert}", "N") for name in names]
    base = names[0][: names[0].rfind(".") + 1]
    ends = [name.removeprefix(base) for name in names]
    tail = "_proj" if all(end.endswith("_proj") for end in ends) else ""
    return f"`{base}{{{','.join(end.removesuffix(tail) for end in ends)}}}{tail}`"


def _row(arch: Arch) -> str:
    stored = ", ".join(_short(style) for style in arch.stored)
    if arch.refusal is not None:
        verdict = f"**refused**: {arch.refusal}"
    elif arch.activation != "silu" or arch.weights_on != "output":
        verdict = f"converted with a warning: {arch.instead}"
    else:
        verdict = "converted"
    inputs = ", weights on the input" if arch.weights_on == "input" else ""
    computes = f"`{arch.activation}`{inputs}" if arch.stored else ""
    return f"| {arch.name} | {', '.join(f'`{m}`' for m in arch.matches)} | {stored} | {computes} | {verdict} |"


def table() -> str:
    """The table of docs/reference/architectures.md."""
    head = "| family | `model_type` or `architectures` | experts | activation | |\n|---|---|---|---|---|"
    return "\n".join([head, *map(_row, ARCHS)])


def test_the_table_of_architectures_is_that_of_the_code() -> None:
    if table() not in text_of(ARCHITECTURES_PAGE):
        pytest.fail("docs/reference/architectures.md differs from archs.py: run `python tests/test_docs.py`")


def test_activations_prefixes_and_config_keys_are_documented() -> None:
    page = text_of(ARCHITECTURES_PAGE)
    for name, formula in ACTIVATIONS.items():
        assert f"`{name}`" in page
        assert formula in page
    keys = {*archs.NUM_LAYERS, *archs.NUM_EXPERTS, *archs.MOE_WIDTH, *archs.DENSE_WIDTH, *archs.HIDDEN, *archs.PREFIXES}
    for key in keys - {""}:
        assert f"`{key}`" in page, key


def test_the_example_of_an_own_row_can_be_read_and_every_key_is_named() -> None:
    page = text_of(ARCHITECTURES_PAGE)
    arch = parse_arch(next(blocks(page, "toml")))
    assert arch.name
    for field in fields(Arch):
        if field.name not in NO_KEYS:
            assert f"`{field.name}`" in page, field.name


# ---- every page -----------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get (as GitHub makes them)."""
    plain = FENCE.sub("", text)
    titles = re.findall(r"^#{1,6} (.+)$", plain, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", text_of(page))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{named(page)}: {target} leads nowhere"
        assert file.is_relative_to(ROOT), f"{named(page)}: {target} leads out of the project"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(text_of(file)), f"{named(page)}: {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_page_names_a_path_of_its_writers(page: Path) -> None:
    match = OWN_PATHS.search(text_of(page))
    assert match is None, f"{named(page)}: {match[0]}"


def test_the_transcript_is_what_the_program_prints(tmp_path: Path, cli: Any, example: Path) -> None:
    """Every line of inspect's and verify's report on the bundled model, but for paths and advice for this machine."""
    out = tmp_path / "out"
    cli("cpu", "-i", example, "-o", out, "--quant-method", "int4", "--threadpool-count", 2)
    inspected, verified = cli("inspect", example).stdout, cli("verify", out, "--against", example, "--full").stdout
    for page, output in ((page_of("inspect"), inspected), (README, verified)):
        lines = text_of(page).splitlines()
        for line in output.splitlines():
            if not line.startswith(("checkpoint ", "output ", "ktconvert cpu ", "ktconvert gpu ")):
                assert line in lines, f"{named(page)}, transcript: {line!r} is missing; paste `make demo` again"


def test_figures_of_one_machine_are_marked() -> None:
    """The transcripts of the README and of commands: speeds, and what comes from torch's sums."""
    machine = re.compile(r"(tokens|MiB)/s|^(perplexity|KL divergence|top-1 agreement) |this machine|^\d+ +0\.\d+$")
    for page in (README, *map(page_of, COMMANDS)):
        lines = [line for block in blocks(text_of(page), "text") for line in block.splitlines()]
        figures = [line for line in lines if machine.search(line.removesuffix("  †"))]
        assert [line for line in figures if not line.endswith("  †")] == []
        assert [line for line in lines if line.endswith("†") and line not in figures] == []


def test_the_readme_is_short_and_names_every_command() -> None:
    text = text_of(README)
    assert len(text.splitlines()) <= 200, "README.md: more than 200 lines; move details to docs/"
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", text)] == []


def texts_of_code() -> str:
    """Every string of the program, a line each, with … for what is put into it."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    paths = [path for folder in ("pipeline", "layouts", "native_quant") for path in (ROOT / folder).rglob("*.py")]
    return "\n".join({repr(text(node)) for path in paths for node in ast.walk(ast.parse(text_of(path)))})


def test_the_messages_are_those_of_the_program() -> None:
    """The headings with … of the page by messages: each piece between two … stands in the code."""
    page = text_of(DOCS / "how-to" / "troubleshoot.md")
    code = texts_of_code().replace("\\'", "'")
    messages = [line[4:] for line in page.splitlines() if line.startswith("### ") and "…" in line]
    assert len(messages) > 10
    pieces = [piece.strip(" .") for message in messages for piece in message.split("…")]
    assert [piece for piece in pieces if piece not in code] == []


@pytest.mark.parametrize("name", ["accuracy", "gguf", "decode"])
def test_figures_are_drawn_from_what_the_pages_print(name: str) -> None:
    """Each row of a figure's data is a row of a table."""
    data = json.loads(text_of(DOCS / "figures" / f"{name}.json"))
    lines = {line for page in (DOCS / "explanation").glob("*.md") for line in text_of(page).splitlines()}
    rows = [f"| {' | '.join(row)} |".replace("|  |", "| |") for key in {*data} - {"bandwidth"} for row in data[key]]
    assert rows and [row for row in rows if row.replace("|  |", "| |") not in lines] == []


def test_every_page_is_in_the_menu() -> None:
    """mkdocs.yml lists each page of docs/ once."""
    listed = re.findall(r"[\w/-]+\.md$", text_of(ROOT / "mkdocs.yml").partition("\nnav:\n")[2], re.M)
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


if __name__ == "__main__":
    for each in COMMANDS:
        page_of(each).write_text(with_rows_of_options(each))
    JSON_PAGE.write_text(with_events(text_of(JSON_PAGE)))
    SCHEMA.write_text(schema())
    old = re.compile(r"^\| family \|.*(?:\n\|.*)*", re.M)
    ARCHITECTURES_PAGE.write_text(old.sub(lambda _: table(), text_of(ARCHITECTURES_PAGE), count=1))
