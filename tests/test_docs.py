"""The documentation says what the program does. `python tests/test_docs.py` writes the tables of docs/commands.md and
docs/architectures.md as they must be.
"""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from ktconvert.layouts import errors
from ktconvert.layouts.checkpoints import archs
from ktconvert.layouts.checkpoints.arch_file import NO_KEYS, parse_arch
from ktconvert.layouts.checkpoints.archs import ACTIVATIONS, ARCHS, Arch, Style
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import FORMATS, formats_of
from ktconvert.native_quant.matrix import KINDS
from ktconvert.pipeline.cli import COMMANDS, group
from ktconvert.pipeline.cli.command import Command, parameters
from ktconvert.pipeline.options.declare import NONE, Leaf, Option, leaves
from ktconvert.quantizers import ROW_GRIDS, reference

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {".venv", ".git", "build", "dist"}
PAGES = sorted(p for p in ROOT.rglob("*.md") if not LEFT_OUT & {*p.relative_to(ROOT).parts})
README = ROOT / "README.md"
COMMANDS_PAGE = ROOT / "docs" / "commands.md"
FORMATS_PAGE = ROOT / "docs" / "formats.md"
FROM_KT_KERNEL_PAGE = ROOT / "docs" / "from-kt-kernel.md"
TUTORIAL_PAGE = ROOT / "docs" / "tutorial.md"
ARCHITECTURES_PAGE = ROOT / "docs" / "architectures.md"
FORMAT_PAGE = ROOT / "layouts" / "FORMAT.md"
NUMBERS_PAGE = ROOT / "quantizers" / "NUMERICS.md"
DESIGN_PAGE = ROOT / "docs" / "design.md"

FENCE = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Paths on a writer's machine, which readers do not have.
OWN_PATHS = re.compile(r"(?<![\w.])/(?:work|opt|root|tmp|var|private|Users|home/(?!you/))\b[\w./-]*")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands below a heading of level 2, to the next one."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert match is not None, f"there is no section '## {title}'"
    return match[1]


def blocks(text: str, language: str) -> Iterator[str]:
    for match in FENCE.finditer(text):
        if match[2] == language:
            yield "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())


def command(name: str) -> Command:
    result = group.get_command(click.Context(group), name)
    assert isinstance(result, Command)
    return result


def rows_of_options(name: str) -> dict[str, str]:
    """Flags -> the row of an option in docs/commands.md up to the <br>, behind which a page says what it likes."""
    rows = {}
    for leaf in leaves(command(name).settings):
        option = leaf.declared
        if not isinstance(option, Option):
            continue
        text = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
        default = _default(leaf, option)
        for parameter in parameters(leaf):
            spellings = [*parameter.opts, *parameter.secondary_opts]
            if isinstance(parameter, click.Argument):
                spellings, default = [spelling.upper() for spelling in spellings], "required"
            elif option.argument is not None:
                text, default = f"Other ways to give {option.argument.upper()}.", ""
            flags = ", ".join(f"`{spelling}`" for spelling in spellings)
            rows[flags] = f"| {flags} | {default} | {text}"
    return rows


def _default(leaf: Leaf, option: Option) -> str:
    if option.unset is not None:
        return option.unset
    if leaf.default is NONE:
        return "required"
    if option.ignored is not None or leaf.default in (None, ()):
        return ""
    if leaf.kind is bool:
        return "on" if leaf.default else "off"
    if isinstance(leaf.default, tuple):
        return ", ".join(map(str, leaf.default))
    return f"`{leaf.default}`" if isinstance(leaf.default, str | Path) else str(leaf.default)


def flags_of_row(line: str) -> str:
    """The first cell of a row of options; "" of any other line."""
    return re.split(r"(?<!\\)\|", line)[1].strip() if line.startswith("| `") else ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_table_of_its_command(name: str) -> None:
    lines = section(text_of(COMMANDS_PAGE), f"`ktconvert {name}`").splitlines()
    rows = {flags: line for line in lines if (flags := flags_of_row(line))}
    expected = rows_of_options(name)
    assert rows.keys() == expected.keys(), f"docs/commands.md, ktconvert {name}: rows for what does not exist, or none"
    for flags, start in expected.items():
        assert rows[flags].startswith((f"{start} |", f"{start}<br>")), f"{flags}: run `python tests/test_docs.py`"
    for parameter in [each for each in command(name).params if isinstance(each.type, click.Choice)]:
        row = next(row for flags, row in rows.items() if f"`{parameter.opts[0]}`" in flags)
        missing = [choice for choice in parameter.type.choices if not re.search(rf"\b{choice}\b", row)]
        assert not missing, f"docs/commands.md, ktconvert {name}: no word on {missing}"


def with_rows_of_options(page: str) -> str:
    """docs/commands.md with the rows that are declared, and its own words behind them. New options are put last."""
    for name in COMMANDS:
        old, rows = section(page, f"`ktconvert {name}`"), rows_of_options(name)
        lines, end = [], 0
        for line in old.splitlines():
            start = rows.pop(flags_of_row(line), None)
            lines.append(line if start is None else start + (line[line.find("<br>") :] if "<br>" in line else " |"))
            end = len(lines) if line.startswith("| ") else end
        lines[end:end] = [f"{row} |" for row in rows.values()]
        page = page.replace(old, "\n".join(lines) + "\n")
    return page


def examples() -> list[tuple[str, str]]:
    """Every line of a bash block that calls ktconvert: (page, line)."""
    found = [(named(page), block) for page in PAGES for block in blocks(text_of(page), "bash")]
    lines = [(page, line.strip()) for page, block in found for line in block.replace("\\\n", " ").splitlines()]
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
    scripts = {"cpu_weights": "cpu", "cpu_weights_ds4": "cpu", "gpu_weights": "gpu", "moe_to_bf16": "dequantize"}
    scripts = {f"scripts/convert_{name}.py": ours for name, ours in scripts.items()}
    scripts["scripts/convert_kimi_k2_fp8_to_bf16_cpu.py"] = "dequantize"
    scripts["scripts/merge_cpu_weights.py"] = "merge"
    text = "\n".join(blocks(text_of(FROM_KT_KERNEL_PAGE), "bash"))
    lines = [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 2 * (10 + 3 + 2)
    for theirs, ours in zip(lines[::2], lines[1::2], strict=True):
        assert theirs[0] == "python" and ours == ["ktconvert", scripts[theirs[1]], *theirs[2:]]


def test_every_exit_code_is_documented() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.KtconvertError)]
    assert len(classes) > 5
    page = section(text_of(COMMANDS_PAGE), "Exit codes")
    for error in classes:  # the last two cells: what it means, and what to do
        assert re.search(rf"^\| {error.exit_code} \| `{error.__name__}`.*\| \w.* \| \S.* \|$", page, re.M), error
    assert "\n| 0 |" in page
    assert re.search(r"^\| 130, 143 \|.*\| \w.* \| \S.* \|$", page, re.M)


def events() -> dict[str, set[str]]:
    """Every JSON event that the pipeline gives, with its fields, as the source says."""
    kinds: dict[str, set[str]] = {"error": {"message", "exit_code"}}
    for path in (ROOT / "pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                kind = ast.literal_eval(node.args[0])
                kinds.setdefault(kind, set()).update(keyword.arg for keyword in node.keywords if keyword.arg)
    return kinds


def test_every_event_and_its_fields_are_documented(tmp_path: Path, cli: Any, example: Path) -> None:
    text = section(text_of(COMMANDS_PAGE), "JSON")
    kinds = events()
    done = cli("cpu", "-i", example, "-o", tmp_path / "out", "--dry-run", "--json")
    plan = json.loads(done.stdout.splitlines()[-1])
    kinds["plan"] = {*plan, *plan["stages"][0], *plan["units"][0]} - {"event"}
    assert {"begin", "start", "done", "progress", "finished"} <= kinds.keys()
    for kind, names in kinds.items():
        row = next((line for line in text.splitlines() if line.startswith(f"| `{kind}` |")), None)
        assert row is not None, f"docs/commands.md, JSON: no row for the event {kind}"
        for name in names:
            assert f"`{name}`" in row, f"docs/commands.md, JSON: the event {kind} has a field {name}"


def test_every_environment_variable_is_documented() -> None:
    text = section(text_of(COMMANDS_PAGE), "Environment variables")
    read = re.compile(r"environ(?:\.get\(|\[)\s*\"(\w+)\"")
    sources = [path for folder in ("pipeline", "layouts", "native_quant") for path in (ROOT / folder).rglob("*.py")]
    variables = {name for path in sources for name in read.findall(text_of(path))}
    assert "KTCONVERT_ISA" in variables
    for name in {*variables, "NO_COLOR", "_KTCONVERT_COMPLETE"}:
        assert f"`{name}`" in text, name


def additions() -> dict[str, tuple[str, str]]:
    """Subject -> (what to touch, what holds it), from the table of docs/design.md."""
    page = text_of(DESIGN_PAGE).partition("## Where to add what")[2].partition("\nWhoever")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    return {subject.removeprefix("| "): (touch, held.rstrip(" |")) for subject, touch, held in cells[2:]}


@pytest.mark.parametrize("subject", additions())
def test_what_to_touch_is_there(subject: str) -> None:
    touch, held = additions()[subject]
    link = r"\[[^]]+\]\(([^)#]+)\)"
    for name, target in re.findall(rf"`(\w+)` (?:row )?in {link}", touch):
        text = text_of((DESIGN_PAGE.parent / target).resolve())
        found = re.search(rf"^(?:static const .*)?{name}\b.*[=(]|^def {name}|^class {name}", text, re.MULTILINE)
        assert found, (name, target)
    for target in re.findall(link, touch + held):
        assert (DESIGN_PAGE.parent / target).resolve().exists(), target
    assert held == "the same" or re.search(r"\(\.\./tests/test_\w+\.py\)", held), f"no test holds {subject}"


def test_the_design_page_names_every_toy() -> None:
    held = " ".join(held for _, held in additions().values())
    toys = [path.name for path in (ROOT / "tests").glob("test_toy_*.py")]
    assert [name for name in toys if f"(../tests/{name})" not in held] == []


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda x: x.name)
def test_every_form_is_in_format(form: Any) -> None:
    page = text_of(FORMAT_PAGE)
    assert f"{form.name} version {form.encoding.version}" in page, "a new version? describe its bytes"
    assert (form.loose or "") in page
    if form.name in formats_of("cpu"):  # legal sizes
        row = re.search(rf"^\| `{form.option}` \|.*\| {form.encoding.multiple} \|$", page, re.MULTILINE)
        assert row or f"{form.encoding.multiple} ({form.name})" in page


def test_every_quantizer_and_decoder_is_in_numerics() -> None:
    page = text_of(NUMBERS_PAGE).lower()
    for name in ROW_GRIDS:
        assert name in page, name
    for kind in KINDS:
        for text in (page, text_of(FORMATS_PAGE).lower()):
            assert kind in text or kind.replace("_", " ") in text, kind


def test_the_formula_of_a_tile_is_that_of_the_reference() -> None:
    """The Python in FORMAT.md says where a code lies; the NumPy reference puts it there."""
    scope: dict[str, Any] = {}
    exec(next(blocks(text_of(FORMAT_PAGE), "python")), scope)
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
    """Every key of the manifest, of a shard's metadata and of quantization_config stands in FORMAT.md."""
    out = tmp_path / "out"
    cli("cpu", "-i", example, "-o", out, "--verify-inputs")
    page = text_of(FORMAT_PAGE)
    document = json.loads((out / manifest.NAME).read_text())
    names = {*document, *document["settings"], *document["model"], *document["source"][0], *document["files"][0]}
    names |= read_header(next(out.glob("*.safetensors"))).metadata.keys()
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert [name for name in quantization if f'"{name}"' not in page] == []
    cli("gpu", "-i", example, "-o", tmp_path / "gpu", "--quant-method", "RTN")
    document = json.loads((tmp_path / "gpu" / manifest.NAME).read_text())
    names |= {*document["settings"], *document["model"]}
    names |= read_header(next((tmp_path / "gpu").glob("*.safetensors"))).metadata.keys()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def _short(style: Style) -> str:
    """How a table cell shows a style: what its tensor names differ in, in braces; N is the expert."""
    names = [getattr(style, part) for part in style.parts]
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
    where = ", weights on the input" if arch.weights_on == "input" else ""
    computes = f"`{arch.activation}`{where}" if arch.stored else ""
    return f"| {arch.name} | {', '.join(f'`{m}`' for m in arch.matches)} | {stored} | {computes} | {verdict} |"


def table() -> str:
    head = "| family | `model_type` or `architectures` | experts | activation | |\n|---|---|---|---|---|"
    return "\n".join([head, *map(_row, ARCHS)])


def test_the_table_of_architectures_is_that_of_the_code() -> None:
    if table() not in text_of(ARCHITECTURES_PAGE):
        pytest.fail("docs/architectures.md differs from archs.py: run `python tests/test_docs.py`")


def test_activations_prefixes_and_config_keys_are_documented() -> None:
    page = text_of(ARCHITECTURES_PAGE)
    keys = {*archs.NUM_LAYERS, *archs.NUM_EXPERTS, *archs.MOE_WIDTH, *archs.DENSE_WIDTH, *archs.HIDDEN, *archs.PREFIXES}
    assert [key for key in {*keys, *ACTIVATIONS} - {""} if f"`{key}`" not in page] == []
    assert [formula for formula in ACTIVATIONS.values() if formula not in page] == []


def test_the_example_of_an_own_row_can_be_read_and_every_key_is_named() -> None:
    page = text_of(ARCHITECTURES_PAGE)
    assert parse_arch(next(blocks(page, "toml"))).name
    assert [f.name for f in fields(Arch) if f.name not in NO_KEYS and f"`{f.name}`" not in page] == []


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get (as GitHub makes them)."""
    plain = FENCE.sub("", text)
    titles = re.findall(r"^#{1,6} (.+)$", plain, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere_and_nothing_into_the_writers_machine(page: Path) -> None:
    match = OWN_PATHS.search(text_of(page))
    assert match is None, f"{named(page)}: {match[0]}"
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


def test_the_transcript_is_what_the_program_prints(tmp_path: Path, cli: Any, example: Path) -> None:
    """Every line of inspect's and verify's report on the bundled model, but for paths and advice for this machine."""
    out = tmp_path / "out"
    cli("cpu", "-i", example, "-o", out, "--quant-method", "int4", "--threadpool-count", 2)
    inspected, verified = cli("inspect", example).stdout, cli("verify", out, "--against", example, "--full").stdout
    inspect_section = section(text_of(COMMANDS_PAGE), "`ktconvert inspect`")
    for page, text, output in ((COMMANDS_PAGE, inspect_section, inspected), (README, text_of(README), verified)):
        lines = text.splitlines()
        for line in output.splitlines():
            if not line.startswith(("checkpoint ", "output ", "ktconvert cpu ", "ktconvert gpu ")):
                assert line in lines, f"{named(page)}, transcript: {line!r} is missing; paste `make demo` again"


def test_figures_of_one_machine_are_marked() -> None:
    """The transcripts of the README and of docs/commands.md: speeds, and what comes from torch's sums."""
    machine = re.compile(r"(tokens|MiB)/s|^(perplexity|KL divergence|top-1 agreement) |this machine|^\d+ +0\.\d+$")
    for page in (README, COMMANDS_PAGE):
        lines = [line for block in blocks(text_of(page), "text") for line in block.splitlines()]
        figures = [line for line in lines if machine.search(line.removesuffix("  †"))]
        assert len(figures) > 5, named(page)
        assert [line for line in figures if not line.endswith("  †")] == []
        assert [line for line in lines if line.endswith("†") and line not in figures] == []


def test_every_page_is_in_the_index_and_every_command_in_a_short_readme() -> None:
    assert len(text_of(README).splitlines()) <= 200, "README.md: more than 200 lines; move details to docs/"
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", text_of(README))] == []
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(text_of(index))}
    assert {*index.parent.glob("*.md")} - {index} <= linked


if __name__ == "__main__":
    COMMANDS_PAGE.write_text(with_rows_of_options(text_of(COMMANDS_PAGE)))
    old = re.compile(r"^\| family \|.*(?:\n\|.*)*", re.M)
    ARCHITECTURES_PAGE.write_text(old.sub(lambda _: table(), text_of(ARCHITECTURES_PAGE), count=1))
