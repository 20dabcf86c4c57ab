"""`ktconvert verify --report`: the page shows the values of the JSON, escapes names, and needs no other files."""

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from ktconvert.layouts.encodings.encoding import unpack_float_scales
from ktconvert.layouts.errors import InputError, OutputError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs import FORMATS
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.pipeline.cli.conversion import cpu, dequantize, gpu
from ktconvert.pipeline.cli.verify import verify
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.verify.checks import LinearError, ProjectionErrors
from ktconvert.pipeline.verify.page import MOST_TITLES, TEMPLATES, format_percent, render_page
from ktconvert.pipeline.verify.page_data import LinearScales, PageData, Scales
from ktconvert.pipeline.verify.verify import Report
from ktconvert.pipeline.verify.verify import verify as verify_output
from rig import reference
from rig.safetensors import Tensor, data_start, header_of, read_folder, write_file
from rig.verifying import invoke

PROJECTIONS = ("gate", "up", "down")
COUNTS = np.array([[5, 900, 20, 300, 0, 70, 80, 412], [101, 202, 303, 404, 505, 606, 707, 800]], np.int64)
FIRST = "model-00001-of-00002.safetensors"


def strip_tags(markup: str) -> str:
    """Return the text of some markup."""
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


class Page:
    """A page: tables by the heading above them, titles of cells by heading and map, and text."""

    def __init__(self, text: str) -> None:
        self.tables: dict[str, list[list[str]]] = {}
        self.maps: dict[tuple[str, str], dict[tuple[int, int], str]] = {}
        self.cells, heading = 0, ""
        body = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
        self.words = strip_tags(body)
        for tag, about, inner in re.findall(r"<(h2|summary|table)([^>]*)>(.*?)</\1>", body, re.DOTALL):
            if tag != "table":
                heading = strip_tags(inner)
            elif "heat" not in about:
                rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", inner))
                self.tables[heading] = [[*map(strip_tags, row)] for row in rows]
            else:
                self.cells += inner.count("<td")
                name = re.search(r"<b>(.*?)</b>", inner)[1]  # type: ignore[index]
                titles = re.findall(r'<td[^>]* title="(\d+)/(\d+): ([^"]*)"', inner)
                self.maps[heading, name] = {(int(layer), int(expert)): value for layer, expert, value in titles}


def report(output: Path, at: Path, *options: object, code: int = 0) -> tuple[Page, dict[str, Any]]:
    """Return the page and the JSON object of one run."""
    result = CliRunner().invoke(verify, [str(output), "--json", "--report", str(at), *map(str, options)])
    assert result.exit_code == code, result.output
    text = at.read_text()
    assert not re.search(r"<(script|img|iframe|object|form)|<[^>]* on\w+=|url\(|@import|https?:", text)
    assert set(re.findall(r"<[^>]* (?:src|href)=\"([^\"]*)", text)) == {"data:,"}
    return Page(text), json.loads(result.stdout)


def refusal_message(error: type[Exception], output: object, *options: object) -> str:
    """Return the message of a verify that fails with this error."""
    result = CliRunner().invoke(verify, [str(output), *map(str, options)])
    assert isinstance(result.exception, error), result.exception
    return str(result.exception)


def numbers(tensor: Tensor, dtype: str) -> npt.NDArray[Any]:
    """Return the elements of a tensor."""
    return np.frombuffer(tensor.data, dtype)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Path:
    """Convert the bundled model."""
    path = tmp_path_factory.mktemp("reported") / "small-INT4"
    invoke(cpu, "-i", example, "-o", path, "--quant-method", "int4")
    return path


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write counts of routed tokens."""
    folder = tmp_path_factory.mktemp("statistics")
    write_file(folder / "counts.safetensors", {"counts": ("I64", COUNTS)})
    return folder


@pytest.fixture(scope="module")
def verify_report(output: Path) -> Report:
    """Return the report of verify."""
    return verify_output(VerifyOptions(output=output, report=Path("report.html")), Reporter(verbosity=-1))


@pytest.fixture(scope="module")
def full_comparison(output: Path, example: Path) -> tuple[Page, dict[str, Any]]:
    """Return the page and the JSON object of the full comparison with the source; a second page has the same bytes."""
    pages = [output.with_name(name) for name in ("a.html", "b.html")]
    *_, last = [report(output, path, "--against", example, "--full") for path in pages]
    assert pages[0].read_bytes() == pages[1].read_bytes()
    return last


def test_page_shows_the_errors_of_the_json(full_comparison):
    found, facts = full_comparison
    assert [r[:1] + r[2:] for r in found.tables["Checks"][1:]] == [[c["name"], c["result"]] for c in facts["checks"]]
    head, *rows = found.tables["Error against the source"]
    for error in facts["errors"]:
        at = head.index(error["projection"])
        row = next(row for row in rows if row[0] == str(error["layer"]))
        assert row[at : at + 3] == [
            format_percent(error["relative_error"]),
            f"{error['cosine']:.5f}",
            f"{error['worst_expert']} ({format_percent(error['worst_relative_error'])})",
        ]
        cells = found.maps["Error against the source", error["projection"]]
        own = [cells[error["layer"], expert] for expert in range(8)]
        assert own[error["worst_expert"]] == format_percent(error["worst_relative_error"])
        assert max(own, key=lambda text: float(text.split(" ")[0])) == own[error["worst_expert"]]
    assert len(rows) == 2
    assert len(facts["errors"]) == 6
    assert found.cells == 2 * 8 * 3
    worst = [[f"layer {w['layer']}, expert {w['expert']}, {w['projection']}", format_percent(w["relative_error"]),
              f"{w['cosine']:.5f}"] for w in facts["worst"]]  # fmt: skip
    assert [row[:3] for row in found.tables["Worst rows"][1:6]] == worst


def test_worst_rows_are_those_of_the_numpy_definition(output, example, full_comparison):
    """Rows are counted within their NUMA slice."""
    found, _ = full_comparison
    source, packed = read_folder(example), read_folder(output)
    head, *rows = found.tables["Worst rows"]
    assert head[3:] == ["NUMA slice", "worst row", "its error"]
    assert len(rows) == 12
    for linear, _, _, part, row, error in rows[:4]:
        layer, expert, projection = re.fullmatch(r"layer (\d+), expert (\d+), (\w+)", linear).groups()  # type: ignore[union-attr]
        bits = numbers(source[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"], "<u2")
        x = reference.bf16_to_f32(bits.reshape(256, 256)).astype(np.float64)
        halves = np.split(x, 2, axis=1 if projection == "down" else 0)
        worst = []
        for numa, half in enumerate(halves):
            base = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{numa}"
            codes, scale = numbers(packed[f"{base}.weight"], "u1"), numbers(packed[f"{base}.scale"], "<f4")
            y = reference.dequantize(4, codes, scale, *half.shape)
            errors = np.linalg.norm(half - y, axis=1) / np.linalg.norm(half, axis=1)
            worst.append((errors.max(), numa, int(errors.argmax())))
        largest, numa, at = max(worst)
        assert (part, row, error) == (str(numa), str(at), format_percent(float(largest)))


def test_page_shows_scales_without_a_source(output, statistics, tmp_path):
    found, facts = report(output, tmp_path / "r.html", "--statistics", statistics)
    assert "Error against the source" not in found.words
    assert facts["errors"] == []
    stored = read_folder(output)
    for expert in range(8):
        for projection in PROJECTIONS:
            base = f"blk.0.ffn_{projection}_exps.{expert}.numa"
            scales = np.concatenate([numbers(stored[f"{base}.{part}.scale"], "<f4") for part in (0, 1)])
            title = found.maps["Median scale of each expert", projection][0, expert]
            assert title == f"{np.median(scales):.4g}"
            assert f"{2 * 8 * scales.size:,} scales" in found.words
    largest = max(numbers(tensor, "<f4").max() for name, tensor in stored.items() if name.endswith(".scale"))
    assert found.tables["largest scales"][1][3] == f"{largest:.4g}"
    for layer, counts in enumerate(COUNTS):
        for expert, count in enumerate(counts):
            title = found.maps["Use of experts", "routed tokens"][layer, expert]
            assert title == format_percent(float(count / counts.sum()))
    assert found.tables["Use of experts"][1] == ["0", "1,787", f"1 ({format_percent(900 / 1787)})", "1"]


@pytest.mark.parametrize(("method", "options"), [("int8", ["--no-merge-safetensor"]), ("bf16", []), ("mxfp4", ["--layout", "kt"]), ("rawint4", []), ("int4", ["--non-experts", "keep"])])  # fmt: skip
def test_page_shows_each_format(method, options, example, tmp_path):
    invoke(cpu, "-i", example, "-o", tmp_path / "out", "--quant-method", method, *options)
    found, _ = report(tmp_path / "out", tmp_path / "r.html", "--against", example)
    assert ("highest bar" in found.words) == (method != "bf16")
    assert len(found.tables["Worst rows"]) == 13
    if method == "bf16":
        assert set(found.maps["Error against the source", "up"].values()) == {"0 %"}


def test_page_shows_gpu_and_dequantized_models(example, tmp_path):
    invoke(gpu, "-i", example, "-o", tmp_path / "gpu", "--quant-method", "RTN", "--quant-type", "W4A16")
    found, facts = report(tmp_path / "gpu", tmp_path / "r.html", "--against", example, "--no-load")
    assert "NUMA slice" not in found.tables["Worst rows"][0]
    assert f"{2 * 8 * 256 * 2:,} scales" in found.words
    assert found.tables["Error against the source"][1][1] == format_percent(facts["errors"][0]["relative_error"])
    invoke(dequantize, tmp_path / "gpu", tmp_path / "bf16")
    found, facts = report(tmp_path / "bf16", tmp_path / "r.html", "--against", tmp_path / "gpu")
    assert len(found.tables["Checks"]) == 1 + len(facts["checks"])
    assert not found.maps


def test_scale_values_bound_the_decoded_weights(random_experts):
    """The number of scales is that of the format, and no decoded weight is larger than its scale allows."""
    bits = random_experts(1, 256, 256)["gate"][0]
    for name in ("AMXINT4", "AMXINT8", "MXFP4", "FP8", "KT_MXFP4", "KT_FP8", "W4A16", "W8A16"):
        form, most = FORMATS[name].encoding, {"MXFP4": 6.0, "FP8": 448.0}.get(name.removeprefix("KT_"))
        stored = [np.zeros(tensor.nbytes, np.uint8) for tensor in form.tensors(256, 256)]
        form.quantize(Matrix(bits, BF16), stored)
        scales = unpack_float_scales(form, stored[-1], 256, 256)
        most = most or form.grid.step * max(-form.grid.low, form.grid.high)
        each = np.repeat(np.repeat(scales, 256 // scales.shape[0], 0), 256 // scales.shape[1], 1)
        steps = np.abs(form.decode(stored, 256, 256)) / each
        assert steps.max() <= most * (1 + 1e-6) and steps.max() > 0.6 * most, name
        assert scales.size * (form.grid.group or 256) ** (2 if "FP8" in name else 1) == 256 * 256, name


def test_names_are_escaped_in_html(output, tmp_path):
    named = tmp_path / "<script>alert(1)<!--\"'&amp;"
    shutil.copytree(output, named)
    (named / "<img src=x onerror=alert(2)>.safetensors").touch()
    found, facts = report(named, tmp_path / "r.html", code=6)
    assert f"{named.name}NOT verified" in found.words
    assert str(named) in found.words
    problems = [problem for problem in facts["checks"][0]["problems"] if "<img src=x onerror=alert(2)>" in problem]
    assert problems
    assert all(problem in found.words for problem in problems)
    assert facts["message"] in found.words


def test_invalid_scales_are_counted(output, example, tmp_path):
    damaged = Path(shutil.copytree(output, tmp_path / "damaged"))
    header, start = header_of(damaged / FIRST), data_start(damaged / FIRST)
    with (damaged / FIRST).open("r+b") as shard:
        for tensor, values in (("3.numa.0", [np.nan, -1]), ("5.numa.0", [0] * 128), ("5.numa.1", [0] * 128)):
            shard.seek(start + header[f"blk.0.ffn_up_exps.{tensor}.scale"]["data_offsets"][0])
            shard.write(np.array(values, np.float32).tobytes())
    found, _ = report(damaged, tmp_path / "r.html", code=6)
    assert "256 zeros, 2 that are negative or not finite" in found.words
    assert "not a positive number" in found.words
    assert found.maps["Median scale of each expert", "up"][0, 5] == "nan"
    (damaged / FIRST).unlink()
    found, _ = report(damaged, tmp_path / "r.html", "--against", example, code=6)
    assert f"{FIRST} is missing" in found.words
    assert not found.maps


def test_refusals_come_before_any_work(output, statistics, tmp_path):
    page, old = tmp_path / "r.html", f"an older page, {publish.MARK}"
    page.write_text("my own page")
    assert f"{page}: exists, and ktconvert did not write it" in refusal_message(OutputError, output, "--report", page)
    assert "--text is the same file" in refusal_message(UsageError, output, "--text", page, "--report", page)
    assert page.read_text() == "my own page"
    page.write_text(old)
    (tmp_path / "folder.html").mkdir()
    assert "give a file with the ending .html" in refusal_message(UsageError, output, "--report", tmp_path / "r.txt")
    assert "does not exist; create it first" in refusal_message(
        OutputError, output, "--report", tmp_path / "none" / "r.html"
    )
    assert "is a directory" in refusal_message(OutputError, output, "--report", tmp_path / "folder.html")
    assert "--statistics without --report" in refusal_message(UsageError, output, "--statistics", statistics)
    with_page = (output, "--report", page, "--statistics")
    assert "none: does not exist" in refusal_message(InputError, *with_page, tmp_path / "none")
    other = tmp_path / "other"
    other.mkdir()
    write_file(other / "counts.safetensors", {"counts": ("I64", np.ones((2, 4), np.int64))})
    sentence = refusal_message(InputError, *with_page, other)
    assert "4 experts in 2 layers" in sentence
    assert f"{output} has 8 experts in layers 0-1" in sentence
    assert page.read_text() == old
    assert {p.name for p in tmp_path.iterdir()} == {"r.html", "folder.html", "other"}


def test_page_is_written_completely_or_not_at_all(output, tmp_path):
    """If the system allows no file as large as the page, the old page stays and no other file is left."""
    page = tmp_path / "r.html"
    old = f"an older page, {publish.MARK}"
    page.write_text(old)
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "verify", str(output), "--report", str(page)]
    result = subprocess.run(["bash", "-c", 'ulimit -f 8; exec "$@"', "-", *command], capture_output=True, text=True)
    assert result.returncode == 4
    assert str(page.parent) in result.stderr
    assert "Traceback" not in result.stderr
    assert page.read_text() == old
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_package_contains_the_templates(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])
    here = tmp_path / "ktconvert" / "pipeline" / "verify"
    assert {p.name for p in TEMPLATES.iterdir() if p.suffix in (".html", ".css")} < {p.name for p in here.iterdir()}


Made = Callable[[int, int], str]


@pytest.fixture(scope="module")
def render_large(verify_report: Report) -> Made:
    """Return a function that renders the page of many layers and experts with all errors, as --full does."""

    def make(layers: int, experts: int) -> str:
        rng, errors = np.random.default_rng(1), []
        for layer in range(3, 3 + layers):
            for projection in PROJECTIONS:
                each = [
                    LinearError(layer, n, projection, round(x, 6), 0.99)
                    for n, x in enumerate(rng.uniform(0.1, 0.2, experts))
                ]
                errors.append(ProjectionErrors(layer, projection, np.array([1.0, 1.0, 0.99, 0.02]), each))
        counts = rng.integers(0, 5000, (3 + layers, experts))
        linears = [LinearScales(3, 0, "up", 0.001, 0.002, 0, 0)]
        measure = replace(verify_report.measure, shapes=dict.fromkeys(range(3, 3 + layers), (experts, 7168, 2048)))
        assert verify_report.page_data is not None
        assert verify_report.page_data.scales is not None
        data = PageData((), Scales(linears, verify_report.page_data.scales.counts), counts)
        return render_page(replace(verify_report, measure=measure, errors=tuple(errors), page_data=data))

    return make


def test_pages_of_large_models_are_small(render_large):
    text = render_large(58, 256)
    found = Page(text)
    assert len(text.encode()) < 2_300_000
    assert found.cells == 4 * 58 * 256
    assert sum(map(len, found.maps.values())) == found.cells
    assert "<tr title" not in text
    text = render_large(60, 384)
    assert len(text.encode()) < 1_300_000
    assert MOST_TITLES < 60 * 384 * 4
    assert not re.search(r"<td[^>]*title", text)
    assert text.count("<tr title") == 4 * 60


def test_browser_shows_the_page_without_errors(output, example, statistics, render_large, tmp_path):
    """No errors, no requests, no overflow and legible text, in light and dark, narrow and wide windows."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    browser_at = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_at is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    report(output, tmp_path / "small.html", "--against", example, "--full", "--statistics", statistics)
    (tmp_path / "large.html").write_text(render_large(58, 256))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_at, args=["--no-sandbox"])
        backgrounds = set()
        for scheme, width, name in (("light", 400, "small"), ("dark", 400, "small"), ("light", 1600, "small"),
                                    ("dark", 1600, "small"), ("dark", 400, "large"), ("light", 1600, "large")):  # fmt: skip
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
            opened, console, requested = context.new_page(), [], []  # type: ignore[var-annotated]
            opened.on("console", lambda message, console=console: console.append(message.text))
            opened.on("pageerror", lambda error, console=console: console.append(str(error)))
            opened.on("request", lambda request, requested=requested: requested.append(request.url))
            opened.goto((tmp_path / f"{name}.html").as_uri())
            assert console == []
            assert requested == [(tmp_path / f"{name}.html").as_uri()]
            assert opened.evaluate("document.documentElement.scrollWidth") == width
            assert name == "large" or opened.evaluate(LEGIBLE) == []
            assert opened.evaluate(CUT) == []
            backgrounds.add((scheme, opened.evaluate("getComputedStyle(document.body).backgroundColor")))
            cell = opened.locator(".heat td").first
            box = cell.bounding_box()
            assert box["width"] >= 2.5
            assert box["height"] >= 6.5
            assert "/" in cell.get_attribute("title")
            context.close()
        assert len({color for _, color in backgrounds}) == len(backgrounds) == 2
        browser.close()


# Tables, except maps of experts, of which a part is not visible.
CUT = """() => [...document.querySelectorAll('.box')].filter(e => !e.querySelector('.heat') && e.scrollWidth > e.clientWidth)
  .map(e => e.getAttribute('aria-label'))"""
# Texts that are too small, or whose contrast to the background is below 4.5 (WCAG AA).
LEGIBLE = """() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parse(c).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                       return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor, p = parse(c);
                        if (p.length < 4 || p[3] > 0) return c; } return 'rgb(255, 255, 255)'; };
  const bad = [];
  for (const e of document.querySelectorAll('h1, h2, p, b, span, th, td, summary, footer, li, figcaption')) {
    if (!e.textContent.trim() || !e.getClientRects().length) continue;
    const s = getComputedStyle(e), a = light(s.color), b = light(behind(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (parseFloat(s.fontSize) < 11 || contrast < 4.5) bad.push([e.tagName, e.textContent.slice(0, 40), s.fontSize, contrast]);
  }
  return bad.slice(0, 10);
}"""
