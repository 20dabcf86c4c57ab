"""Structure of the tree: imports run one way and in no circle, names are plain and unique, the glossary is used.

This is the only file that declares the direction of imports.
"""

import ast
import bisect
import dataclasses
import functools
import graphlib
import operator
import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktconvert.layouts.encodings.encoding import Encoding

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pipeline", "layouts", "quantizers", "native_quant")

# A module may import from its own level and from those below it.
BELOW = {
    "native_quant": {"native_quant"},
    "native_quant.runtime": {"native_quant", "quantizers", "layouts"},
    "quantizers": {"quantizers", "native_quant"},
    "layouts": {"layouts", "quantizers", "native_quant"},
    "pipeline": {"pipeline", "_functions", "_results", "layouts", "quantizers", "native_quant"},  # api/
}
# The packages of two levels, lowest first: each may import only from itself and from those before it, inside functions
# too.
PACKAGES = {
    "pipeline": (
        "report",
        "options",
        "engine",
        "models",
        "calibration",
        "stages",
        "verify",
        "plans",
        "fit",
        "api",
        "cli",
    ),
    "layouts": ("files", "sources", "encodings", "checkpoints", "statistics", "outputs"),
}
HEAVY = {"torch", "huggingface_hub", "rich", "transformers", "llmcompressor", "gguf", "accelerate"}
# They subclass or replace what transformers has, define torch's operators, or are loaded where torch is in use alone, so
# they import these at the top; other modules import them inside a function.
SERVING = ("application", "completions", "model_manager", "prompts", "scheduler", "stream_decoder")
RUNTIME = (
    "adapters",
    "few_tokens",
    "hf",
    "hf_blocks",
    "hf_modules",
    "hf_non_experts",
    "layer_forwards",
    "generation",
    "peft_targets",
    "peft_tuner",
)
RUNTIME += ("sft", "streams", "training", "wrapper")
SUBCLASSING = {f"ktconvert.native_quant.runtime.{name}" for name in RUNTIME}
SUBCLASSING |= {f"ktconvert.pipeline.models.serving.{name}" for name in SERVING}
# torch tensors in and out
TENSORS = {ROOT / "quantizers" / name for name in ("gptq.py", "descent.py", "predictions.py")}
FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
MODULES = {
    ".".join(("ktconvert", *path.relative_to(ROOT).with_suffix("").parts))
    .removesuffix(".__init__")
    .replace(".pipeline.api", ""): path
    for path in FILES
}


@functools.cache
def parse_modules() -> dict[Path, ast.Module]:
    """Return the syntax trees of the product's modules."""
    return {path: ast.parse(path.read_text()) for path in FILES}


def level_of(path: Path) -> str:
    """Return the level of a file: its folder, or the runtime, which is beside the pipeline."""
    parts = path.relative_to(ROOT).parts
    return "native_quant.runtime" if parts[:2] == ("native_quant", "runtime") else parts[0]


def find_imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Return every imported module with its line."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append((node.module, node.lineno))
            names += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return names


def fail_with(offenders: list[str]) -> None:
    """Fail with all offenders, one per line, if there are any."""
    if offenders:
        pytest.fail(f"{len(offenders)} of {len(FILES)} files and their names:\n" + "\n".join(offenders), pytrace=False)


def test_packages_import_in_one_direction():
    wrong = []
    for path, tree in parse_modules().items():
        level = level_of(path)
        for module, line in find_imports(tree):
            parts = module.split(".")
            at = f"{path.relative_to(ROOT)}:{line}: "
            if parts[0] in FOLDERS:
                wrong.append(f"{at}imports {module} by its bare name; use ktconvert.{module}")
            if parts[0] == "ktconvert" and len(parts) > 1 and parts[1] not in BELOW[level]:
                wrong.append(f"{at}{level} must not import {module}")
            upper = level in ("pipeline", "native_quant.runtime")
            runtime = module.startswith("ktconvert.native_quant.runtime")
            if runtime and not upper and path.name != "__init__.py":
                wrong.append(f"{at}{level} must not know the runtime")
            if parts[0] == "torch" and not upper and path not in TENSORS:
                wrong.append(f"{at}{level} must not know torch")
            if level in PACKAGES and parts[:2] == ["ktconvert", level]:
                packages = PACKAGES[level]
                package = path.relative_to(ROOT / level).parts[0]
                above = packages[packages.index(package) + 1 :] if package in packages else ()
                if set(above).intersection(parts[2:3]):
                    wrong.append(f"{at}{package} must not import {module}")
    fail_with(wrong)


def walk_outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported, TYPE_CHECKING blocks included."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from walk_outside_functions(child)


def imported_modules(tree: ast.AST, *, inside_functions: bool) -> set[str]:
    """Return our modules that a module imports; for `from package import module`, the module, not the package."""
    names = set()
    for node in ast.walk(tree) if inside_functions else walk_outside_functions(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in MODULES else node.module)
    return names & MODULES.keys()


@pytest.mark.parametrize("inside_functions", [False, True])
def test_modules_import_in_no_circle(inside_functions):
    """No module imports itself through others, TYPE_CHECKING included."""
    graph = {
        name: imported_modules(parse_modules()[path], inside_functions=inside_functions) - {name}
        for name, path in MODULES.items()
    }
    assert sum(map(len, graph.values())) > 100
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


CSRC = ROOT / "native_quant" / "csrc"


def find_included_files(path: Path, arch: Path) -> Iterator[Path]:
    """Yield the files of csrc that a C file or header includes, found as the compiler finds them."""
    for name in re.findall(r'^\s*#\s*include "(.*)"', path.read_text(), re.M):
        yield next(folder / name for folder in (path.parent, CSRC, arch) if (folder / name).exists())


def preprocess(path: str, command: list[str]) -> tuple[str, list[tuple[int, Path]]]:
    """Preprocess a C file. Return its text and where in it the text of which file begins."""
    output = subprocess.run([*command, path], capture_output=True, text=True, check=True).stdout
    output = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", "", output)
    text, starts = "", []
    for line in output.splitlines(keepends=True):
        if marker := re.match(r'# \d+ "(.*?)"', line):
            starts.append((len(text), (ROOT / marker[1]).resolve()))
        else:
            text += line
    return text, starts


def find_definitions(text: str) -> Iterator[tuple[int, str]]:
    """Yield the functions and variables that preprocessed C defines, with their offsets; no declarations, no types."""
    depth, start, is_function = 0, 0, False
    for mark in re.finditer(r"[{};]", text):
        if mark[0] == "{":
            is_function = is_function or (depth == 0 and text[start : mark.start()].rstrip().endswith(")"))
        depth += {"{": 1, "}": -1, ";": 0}[mark[0]]
        if depth == 0 and (mark[0] == ";" or is_function):
            item = text[start : mark.end()].strip()
            at, start, is_function = text.index(item, start), mark.end(), False
            if "{" in item and not item.startswith(("typedef", "enum", "struct")):
                yield at, item


def test_c_headers_include_in_no_circle(tmp_path, monkeypatch):
    """No C file, header or template needs, by includes and calls, one that needs it."""
    monkeypatch.chdir(ROOT)
    build = runpy.run_path("native_quant/_build.py")
    (tmp_path / "immintrin.h").touch()  # the compiler's own is long
    command = [os.environ.get("CC", "cc"), "-E", f"-I{tmp_path}", f"-I{CSRC}", f"-I{build['ARCH']}"]
    home: dict[str, Path] = {}
    used: dict[Path, set[str]] = {}
    for source in build["list_sources"]():
        text, starts = preprocess(source, command)
        for at, item in find_definitions(text):
            path = starts[bisect.bisect(starts, at, key=operator.itemgetter(0)) - 1][1]
            head = re.split(r"[(=\[]", item, maxsplit=1)[0].replace("*", " ").split()
            if "static" not in head:
                home[head[-1]] = path
            used.setdefault(path, set()).update(re.findall(r"\bktq?_\w+", item))
    assert {"ktq_decode", "kt_current", "kt_decode_scalar", "kt_decode_avx2", "kt_bf16_arithmetic"} <= home.keys()
    files = [path for path in CSRC.rglob("*.*") if path.is_file()]
    graph: dict[Path, set[Path]] = {}
    for path in files:
        arch = path.parent if path.parent.parent == CSRC / "arch" else ROOT / build["ARCH"]
        called = {home[name] for name in used.get(path, set()) & home.keys()} - {path}
        graph[path] = called | set(find_included_files(path, arch))
    assert sum(map(len, graph.values())) > 400
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        names = [str(path.relative_to(CSRC)) for path in error.args[1]]
        pytest.fail(f"a circle of C files: {' <- '.join(names)}")


def test_heavy_packages_are_imported_where_they_are_used():
    wrong = []
    for name, path in MODULES.items():
        tree = parse_modules()[path]
        typing_only = {n for block in ast.walk(tree) if isinstance(block, ast.If) for n in ast.walk(block)}
        tops = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) and n not in typing_only]
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: import {module} inside the function that uses it"
            for node in tops
            for module, line in find_imports(node)
            if name not in SUBCLASSING and (module.split(".")[0] in HEAVY or module in SUBCLASSING)
        ]
    fail_with(wrong)


BUILDING = ROOT / "pipeline" / "models" / "pretrained.py"


def test_one_module_asks_transformers_for_configs_and_tokenizers():
    """pretrained.py switches off settings that do not concern predictions, and explains failures."""
    asking = {"AutoConfig", "AutoTokenizer", "AutoProcessor"}
    fail_with(
        [
            f"{path.relative_to(ROOT)}:{node.lineno}: use models.pretrained instead of {node.attr}"
            for path, tree in parse_modules().items()
            for node in ast.walk(tree)
            if path != BUILDING and isinstance(node, ast.Attribute) and node.attr in asking
        ]
    )


# Words that tell a new reader nothing. Use runner, threads, remote, side output, other tensors, request
# options, fair lock, scheduler, model manager, chunk, expected, declared, reported, paths, space, panel, pack.
WORD_LIST = """apart beside carried asked keeper keepers crew crews lane lanes lay lays laid piece pieces places
    room rooms stated strip strips told turns wanted"""
UNCLEAR_WORDS = {*WORD_LIST.split()}
VECTORS = "native_quant/"  # where a lane is one of a vector
# Files that are rows of a table may share a name: commands, encodings of the numbers that quantizers define.
ROWS = (("pipeline", "cli"), ("layouts", "encodings"))


def split_words(name: str) -> set[str]:
    """Return the words of an identifier such as my_name, MyName or MY_NAME, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def find_defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a module gives to functions, classes, variables, attributes and parameters."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno


def find_identifiers() -> Iterator[tuple[str, str]]:
    """Yield (name, place) of all identifiers of the product and of its files."""
    for path, tree in parse_modules().items():
        where = str(path.relative_to(ROOT))
        yield from ((name, f"{where}:{line}") for name, line in [*find_defined_names(tree), (path.stem, 1)])
    for path in sorted(p for p in CSRC.rglob("*") if p.is_file()):
        text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", " ", path.read_text(), flags=re.S)
        where = str(path.relative_to(ROOT))
        yield from ((name, where) for name in {*re.findall(r"[A-Za-z_]\w*", text), path.stem})


def test_names_are_plain():
    wrong: dict[str, list[str]] = {}
    for name, where in find_identifiers():
        if split_words(name) & (UNCLEAR_WORDS - ({"lane", "lanes"} if where.startswith(VECTORS) else set())):
            wrong.setdefault(name, []).append(where)
    fail_with([f"{name}: {' '.join(where[:4])}" for name, where in sorted(wrong.items())])


def test_class_and_file_names_are_unique():
    """Covers public classes; files that are rows of a table may share a name."""
    found: dict[str, list[str]] = {}
    for path, tree in parse_modules().items():
        where = path.relative_to(ROOT)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(f"class {node.name}", []).append(str(where))
        command = where.parts[1] == "plans" and (ROOT / "pipeline" / "cli" / path.name).exists()
        if path.stem != "__init__" and where.parts[:2] not in ROWS and not command:
            found.setdefault(path.name, []).append(str(where))
    fail_with([f"{name}: {' '.join(w)}" for name, w in sorted(found.items()) if len(w) > 1])


def test_every_module_has_a_docstring():
    fail_with(
        [
            str(p.relative_to(ROOT))
            for p, tree in parse_modules().items()
            if p.stat().st_size and not ast.get_docstring(tree)
        ]
    )


def test_the_readme_of_tests_lists_every_file():
    rows = [line.split("|") for line in (ROOT / "tests/README.md").read_text().splitlines() if line.startswith("| ")]
    listed = sorted(name.strip() for row in rows[1:] for name in row[2].split(","))
    assert listed == sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py"))


# Where the result of a removal is known: files of a work directory, which are made again; a pattern of an option.
MAY_REMOVE = {"pipeline/engine/job_share.py", "pipeline/engine/existing.py", "layouts/files/direct_file.py"}
MAY_REMOVE |= {"layouts/outputs/ignore.py"}


IMPORT = re.compile(
    r"""(?x) (?:^ | ["'`(;>] ) [ \t.]* (?:from [ ] (ktconvert[\w.]*) [ ] import [ ]+ ( \([^)]*\) | \w[\w, ]* )
    | import [ ] (ktconvert[\w.]*) )""",
    re.M,
)


EXTENSION = "ktconvert.native_quant._ktq"  # compiled


@functools.cache
def names_in(module: str) -> set[str]:
    """Return the submodules of a module, and the names that it defines, imports, or computes in __getattr__."""
    names = {each.rpartition(".")[2] for each in (*MODULES, EXTENSION) if each.rpartition(".")[0] == module}
    path = MODULES.get(module)
    nodes = [] if path is None else list(ast.walk(parse_modules()[path]))
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if "__getattr__" in names:
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names


def exists(module: str, name: str = "") -> bool:
    """Return whether a module, or a name in it, exists. Imports nothing, since some modules import torch."""
    if module in MODULES or module in {f"ktconvert.{folder}" for folder in FOLDERS}:
        return not name or name in names_in(module)
    parent, _, last = module.rpartition(".")
    return module == EXTENSION or (not name and bool(parent) and exists(parent, last))


def test_imports_in_programs_and_docs_resolve():
    """Imports of ktconvert in every tracked text: also in strings of tests, which start programs, and in pages."""
    listed = subprocess.check_output(
        ["git", "ls-files", "*.py", "*.md", "*.toml", "*.yml", "*.sh"], cwd=ROOT, text=True
    )
    offenders, count = [], 0
    for file in listed.splitlines():
        text = (ROOT / file).read_text()
        for match in IMPORT.finditer(text) if "ktconvert" in text else ():
            module, names = match[1] or match[3], re.findall(r"(\w+)(?: as \w+)?", match[2] or "") or [""]
            count += len(names)
            line = text.count("\n", 0, match.start()) + 1
            offenders += [f"{file}:{line}: {module} {name}" for name in names if not exists(module, name)]
    assert count > 1000
    fail_with(offenders)


def test_no_message_advises_to_remove_a_file_or_a_tensor():
    """Without the file the rest may be a different model, or the file was not the problem."""
    advice = re.compile(r"(?:[;:,] |\bor |^)(?:remove|delete|keep one)(?: \w|,| $|\Z)")
    found = [
        f"{path.relative_to(ROOT)}: {node.value}"
        for path, tree in parse_modules().items()
        if str(path.relative_to(ROOT)) not in MAY_REMOVE and "cli" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and advice.search(node.value)
    ]
    fail_with(found)


def test_the_core_of_an_encoding_is_small():
    members = [field.name for field in dataclasses.fields(Encoding)]
    members += [name for name, value in vars(Encoding).items() if callable(value) and not name.startswith("_")]
    assert len(set(members)) <= 13, members


def test_glossary_defines_words_that_are_used():
    """At most 40 words, each of them used: in identifiers, or in the docs outside the glossary."""
    design = (ROOT / "docs/explanation/design.md").read_text()
    before, heading, glossary = design.partition("\n## Glossary\n")
    assert heading, "docs/explanation/design.md has no Glossary"
    words = re.findall(r"^\| ([^|*`]+?) \|", glossary.partition("| --")[2] or glossary.partition("|---")[2], re.M)
    assert 20 <= len(words) <= 40, words
    names = {name for name, _ in find_identifiers()}
    used = set().union(*map(split_words, names)) | {name.lower().replace("_", " ") for name in names}
    docs = before + "".join(p.read_text() for p in (ROOT / "docs").rglob("*.md") if p.name != "design.md")
    docs += "".join(p.read_text() for p in (ROOT / "README.md", *ROOT.glob("*/*.md")) if "docs" not in p.parts)

    def is_used(word: str) -> bool:
        return not used.isdisjoint({word, f"{word}s"}) or re.search(rf"\b{re.escape(word)}s?\b", docs, re.I) is not None

    fail_with([word for entry in words for word in entry.split(", ") if not is_used(word)])
