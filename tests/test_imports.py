"""Imports run one way; this is the only place where the direction is written."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pipeline", "layouts", "quantizers", "native_quant")

# A module may import from its own floor and from those below it.
BELOW = {
    "native_quant": {"native_quant"},
    "native_quant.runtime": {"native_quant", "quantizers", "layouts"},
    "quantizers": {"quantizers", "native_quant"},
    "layouts": {"layouts", "quantizers", "native_quant"},
    "pipeline": {"pipeline", "layouts", "quantizers", "native_quant"},
}
# Of the rooms of the pipeline, what each must not know, inside functions neither; all others must not know the command
# line.
ABOVE = {
    "engine": {"plans", "stages", "walk", "verify", "models", "cli"},
    "stages": {"plans", "cli"},
    "cli": set[str](),
}
HEAVY = {
    "torch",
    "huggingface_hub",
    "rich",
    "transformers",
    "llmcompressor",
    "gguf",
    "accelerate",
    "datasets",
    "matplotlib",
    "dask",
    "distributed",
}
# They subclass or replace what transformers has, or define torch's operators, so they import these at the top; other
# modules import them inside a function.
SUBCLASSING = {
    f"ktconvert.native_quant.runtime.{name}" for name in ("hf", "hf_modules", "hf_operator", "hf_output")
} | {f"ktconvert.pipeline.models.serving.{name}" for name in ("model_manager", "scheduler", "stream_decoder")}
TENSORS = ROOT / "quantizers" / "gptq.py"  # torch tensors in, torch tensors out
FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
MODULES = {
    ".".join(("ktconvert", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in FILES
}


def floor_of(path: Path) -> str:
    """The floor on which a file stands: its folder, or the runtime, which stands beside the pipeline."""
    parts = path.relative_to(ROOT).parts
    return "native_quant.runtime" if parts[:2] == ("native_quant", "runtime") else parts[0]


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Every imported module with its line."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append((node.module, node.lineno))
            names += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_direction(path: Path) -> None:
    floor = floor_of(path)
    tree = ast.parse(path.read_text())
    for module, line in imports(tree):
        top = module.split(".")[0]
        assert top not in FOLDERS, f"{path}:{line}: imports {module} by its bare name; say ktconvert.{module}"
        if top == "ktconvert" and "." in module:
            assert module.split(".")[1] in BELOW[floor], f"{path}:{line}: {floor} must not import {module}"
            if module.startswith("ktconvert.native_quant.runtime") and path.name != "__init__.py":
                assert floor in ("pipeline", "native_quant.runtime"), (
                    f"{path}:{line}: {floor} must not know the runtime"
                )
        if top == "torch":
            known = floor in ("pipeline", "native_quant.runtime") or path == TENSORS
            assert known, f"{path}:{line}: {floor} must not know torch"


@pytest.mark.parametrize("path", sorted((ROOT / "pipeline").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_of_the_pipeline(path: Path) -> None:
    room = path.relative_to(ROOT / "pipeline").parts[0]
    for module, line in imports(ast.parse(path.read_text())):
        parts = module.split(".")
        if parts[:2] == ["ktconvert", "pipeline"]:
            assert not ABOVE.get(room, {"cli"}).intersection(parts[2:3]), (
                f"{path}:{line}: {room} must not import {module}"
            )


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs when a module is imported, and what is imported for types."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from outside_functions(child)


def imported_modules(tree: ast.AST) -> set[str]:
    """Our modules that a module imports as such; of `from package import module`, the module, not the package."""
    names = set()
    for node in outside_functions(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in MODULES else node.module)
    return names & MODULES.keys()


def test_no_circles() -> None:
    """No module needs itself, TYPE_CHECKING included: what two modules share has a module of its own."""
    graph = {name: imported_modules(ast.parse(path.read_text())) - {name} for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 100
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


CSRC = ROOT / "native_quant" / "csrc"


def definitions(text: str) -> Iterator[str]:
    """The functions and variables that preprocessed C defines, whole, but no declarations and no types."""
    depth, start, is_function = 0, 0, False
    for mark in re.finditer(r"[{};]", text):
        if mark[0] == "{":
            is_function = is_function or (depth == 0 and text[start : mark.start()].rstrip().endswith(")"))
        depth += {"{": 1, "}": -1, ";": 0}[mark[0]]
        if depth == 0 and (mark[0] == ";" or is_function):
            item, start, is_function = text[start : mark.end()].strip(), mark.end(), False
            if "{" in item and not item.startswith(("typedef", "enum", "struct")):
                yield item


def test_no_circles_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No C file needs, by way of others, one that needs it; no header includes itself."""
    monkeypatch.chdir(ROOT)
    build = runpy.run_path("native_quant/_build.py")
    (tmp_path / "immintrin.h").touch()  # the compiler's own is long
    command = [os.environ.get("CC", "cc"), "-E", "-P", f"-I{tmp_path}", f"-I{CSRC}", f"-I{build['ARCH']}"]
    home: dict[str, str] = {}
    used: dict[str, set[str]] = {}
    for path in build["sources"]():
        text = subprocess.run([*command, path], capture_output=True, text=True, check=True).stdout
        text = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", "", text)
        items = list(definitions(text))
        heads = [re.split(r"[(=\[]", item, maxsplit=1)[0].replace("*", " ").split() for item in items]
        home |= {head[-1]: path for head in heads if "static" not in head}
        used[path] = {name for item in items for name in re.findall(r"\bktq?_\w+", item)}
    assert {"ktq_decode", "kt_current", "kt_decode_scalar", "kt_bf16_arithmetic"} <= home.keys()
    files = {path: {home[name] for name in names & home.keys()} - {path} for path, names in used.items()}
    headers = {
        path.name: set(re.findall(r'#include "(?:.*/)?(\w+\.h)"', path.read_text())) for path in CSRC.rglob("*.h")
    }
    for graph in (files, headers):
        assert sum(map(len, graph.values())) > 50
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            pytest.fail(f"a circle of C files: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    if ".".join(("ktconvert", *path.relative_to(ROOT).with_suffix("").parts)) in SUBCLASSING:
        return
    tree = ast.parse(path.read_text())
    typing_only = {n for block in ast.walk(tree) if isinstance(block, ast.If) for n in ast.walk(block)}
    for node in tree.body:
        for inner in ast.walk(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if inner in typing_only:
                continue
            for module, line in imports(inner):
                assert module.split(".")[0] not in HEAVY and module not in SUBCLASSING, (
                    f"{path}:{line}: import {module} inside the function that uses it"
                )
