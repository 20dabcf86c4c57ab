"""Puts small random faults into the product, one at a time, to see which of them a test detects.

    python benchmarks/mutants.py --tree TREE --seed 1 --count 60 [--seconds 170] [--list]

TREE is a checkout that is changed and restored. It has an environment of its own in .venv, and the extension built with
`.venv/bin/python setup.py build_ext --inplace --build-temp build/temp`. The script draws a line of code, and then a
change that this line allows. Tests run file by file, first those that share rare words with the changed function, until
one fails that passes without the change, or the CPU seconds are used up. As the first process of a namespace (unshare
--pid --fork --mount-proc), it also ends processes that tests leave behind. It prints a line for each mutant: killed,
survived, or not compiled (drawn again).
"""

import argparse
import ast
import contextlib
import itertools
import math
import os
import random
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

FOLDERS = ("layouts", "quantizers", "pipeline/engine", "pipeline/plans", "native_quant")
FILES = 24  # number of test files for each mutant
WALL = 3600  # in seconds, for a busy machine
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is",
         "in": "not in", "not in": "in", "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+",
         "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&", "**": "*", "and": "or", "or": "and",
         "&&": "||", "||": "&&", "+=": "-=", "-=": "+="}  # fmt: skip
OPERATOR = re.compile(r"not\s+in|is\s+not|\b(?:in|is|and|or)\b|<<|>>|//|\*\*|[<>=!]=|[-+*/%&|^<>]")
TEXT = ("note", "warn", "warning", "say", "echo", "info", "debug", "secho")  # calls that only print messages


class Mutant(NamedTuple):
    path: str
    line: int
    start: int  # offsets in the file's text
    end: int
    new: str
    function: str  # text of the function that contains it

    def __str__(self) -> str:
        return f"{self.path}:{self.line} [{self.start}:{self.end}] -> {self.new!r}"


def find_python_mutants(path: str, text: str) -> Iterator[Mutant]:
    """Yield the changes that a Python file allows, except in docstrings, annotations, f-strings and messages."""
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]

    def offset(line: int, column: int) -> int:  # a column counts bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        return offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)

    def changes_of_node(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare() | ast.BinOp() | ast.BoolOp():
                operands = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
                for left, right in itertools.pairwise(operands):
                    start, end = span(left)[1], span(right)[0]
                    match = OPERATOR.search(text[start:end])
                    if match and (old := " ".join(match[0].split())) in SWAPS:
                        yield start + match.start(), start + match.end(), SWAPS[old]
            case ast.UnaryOp(op=ast.Not()):
                yield span(node)[0], span(node.operand)[0], ""
            case ast.Constant(value=bool()):
                yield *span(node), str(not node.value)
            case ast.Constant(value=int() | float()):
                yield *span(node), f"({ast.unparse(node)} + 1)"
            case ast.If() | ast.IfExp():
                yield *span(node.test), f"not ({text[slice(*span(node.test))]})"
            case ast.AugAssign() | ast.Raise() | ast.Return() | ast.Delete() | ast.Continue() | ast.Break():
                yield *span(node), "pass"
            case ast.Expr(value=value) if not isinstance(value, ast.Constant):
                yield *span(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield *span(node), "pass"

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        match node:
            case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Assert() | ast.arguments():
                return
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in TEXT:
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                function = text[slice(*span(node))]
        for start, end, new in changes_of_node(node):
            yield Mutant(path, text.count("\n", 0, start) + 1, start, end, new, function)
        for name, field in ast.iter_fields(node) if not isinstance(node, ast.Raise) else ():
            if name not in ("annotation", "returns", "type_params", "decorator_list", "bases"):
                for child in field if isinstance(field, list) else [field]:
                    if isinstance(child, ast.AST):
                        yield from visit(child, function)

    yield from visit(ast.parse(text), text[:2000])


C = re.compile(r"(?<= )(?:<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^<>]|[-+]=)(?= )|(?<=[(\s])!(?=[\w(])"
               r"|(?<![\w.])\d+(?![\w.])|(?<=\bif )\([^;{}\n]*\)(?= [^)\n]*[;{]$)"
               r"|^ +(?!return)[\w.\->\[\]* ]*[\w\]]\([^;{}]*\);$"
               r"|^ +[\w.\->\[\]]+ [-+*/|&^<>]*= [^;{}]*;$", re.M)  # fmt: skip


def find_c_mutants(path: str, text: str) -> Iterator[Mutant]:
    """Yield the changes that a C file allows inside functions; a sign between spaces is an operator."""
    blank = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\])+'|^[ \t]*#(?:\\\n|[^\n])*",
                   lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S | re.M)  # fmt: skip
    for body in re.finditer(r"\)\s*(\{$.*?^\})", blank, re.S | re.M):
        start, end = body.span(1)
        function = text[text.rfind("\n\n", 0, start) + 1 : end]
        for match in C.finditer(blank, start, end):
            old = match[0].lstrip()
            new = f"(!{old})" if old[0] == "(" else str(int(old) + 1) if old.isdigit() else "" if old == "!" else ";"
            position = match.end() - len(old)
            yield Mutant(path, text.count("\n", 0, position) + 1, position, match.end(), SWAPS.get(old, new), function)


def find_mutants(tree: Path) -> dict[tuple[str, int], list[Mutant]]:
    """Return all changes of all product files, by line."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for file in sorted(p for f in FOLDERS for p in (tree / f).rglob("*") if p.suffix in (".py", ".c", ".h")):
        for mutant in (find_python_mutants if file.suffix == ".py" else find_c_mutants)(
            str(file.relative_to(tree)), file.read_text()
        ):
            by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    return by_line


def words_of(text: str) -> set[str]:
    """Return the words of a text and their parts."""
    names = set(re.findall(r"[A-Za-z_]\w{2,}", re.sub(r"_?(?:avx\w*|amx|scalar)\b", "", text)))
    return names | {part for name in names for part in name.lower().split("_") if len(part) > 2}


def rank_tests(tree: Path, mutant: Mutant) -> list[str]:
    """Return the test files, first those that share rare words with the function and its file's name."""
    texts = {str(p.relative_to(tree)): p.read_text() for p in (tree / "tests").glob("test_*.py")}
    known = {name: words_of(Path(name).stem + " " + text) for name, text in texts.items()}
    common = Counter(word for of_file in known.values() for word in of_file)
    weights = dict.fromkeys(words_of(mutant.function), 1) | dict.fromkeys(words_of(Path(mutant.path).stem), 4)
    if not mutant.path.endswith(".py"):
        weights |= {"isa": 20, "kernels": 10, "forward" if "forward" in mutant.path else "golden": 20}

    def score(name: str) -> float:
        shared = sum(w * math.log(len(known) / common[k]) ** 2 for k, w in weights.items() if k in known[name])
        return shared / math.sqrt(len(known[name])) * (2 if mutant.path[:-3].replace("/", ".") in texts[name] else 1)

    builds = {name for name, text in texts.items() if re.search(r"build_ext|build\.sh|emulated\.sh", text)}
    return sorted(texts, key=lambda name: (name in builds, -score(name), name))  # tests that build take minutes


class Budget:
    """A pytest plugin that runs one case of each test first, and starts no test when the CPU time is used up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seen: set[str] = set()
        later = {item: (key := item.nodeid.split("[")[0]) in seen or seen.add(key) for item in items}
        items.sort(key=lambda item: bool(later[item]))  # stable: files stay in their order

    def pytest_runtest_setup(self) -> None:
        if sum(os.times()[:4]) > self.seconds:
            pytest.exit("the time is spent", returncode=0)


def run_tests(tree: Path, tests: list[str], seconds: float) -> str:
    """Return the first test that fails, or "".

    A process that loops or grows without limit ends by itself (see __main__).
    """
    command = [tree / ".venv/bin/python", Path(__file__).resolve(), "--run", str(seconds), *tests]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONDONTWRITEBYTECODE": "1"}
    first = os.getpid() == 1
    with tempfile.TemporaryFile("w+") as log:  # no pipe, because processes that are left behind would keep it open
        process = subprocess.Popen(command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=subprocess.STDOUT, start_new_session=not first)  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=WALL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL) if first else os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        output = log.read()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", output, re.M)
    if failed or process.returncode == 0:
        return failed[1] if failed else ""
    started = re.findall(r"^(tests/\S+?\.py::.+?)(?: (?:PASSED|SKIPPED|XFAIL|Fatal Python).*)?$", output, re.M)
    return (started or tests)[-1].strip()  # the process was killed, or has crashed


def compile_extension(tree: Path, path: str) -> bool:
    """Compile a C file and files that include it, and link the extension; return whether this succeeds."""
    build = runpy.run_path("native_quant/_build.py")
    include = f"{sys.base_prefix}/include/python3.{sys.version_info[1]}"
    flags = [*build["COMPILE"], "-fPIC", f"-I{build['CSRC']}", f"-I{build['ARCH']}", f"-I{include}"]
    temp = tree / "build" / "temp"
    names = [n for n in build["list_sources"]() if n == path or path.endswith(".h")]
    for name in names:
        dependencies = subprocess.run(["cc", "-MM", *flags, name], cwd=tree, capture_output=True, text=True).stdout
        if path in [os.path.normpath(n) for n in dependencies.replace("\\\n", " ").split()[1:]]:
            command = ["cc", *flags, "-c", name, "-o", temp / Path(name).with_suffix(".o")]
            if subprocess.run(command, cwd=tree, capture_output=True).returncode:
                return False
    link = ["cc", "-shared", *map(str, temp.rglob("*.o")), "-o", "native_quant/_ktq.abi3.so"]
    return bool(names) and subprocess.run(link, cwd=tree, capture_output=True).returncode == 0


def try_mutant(tree: Path, mutant: Mutant, seconds: float) -> str:
    """Return the fate of a mutant."""
    file, python = tree / mutant.path, mutant.path.endswith(".py")
    text, tests = file.read_text(), rank_tests(tree, mutant)[:FILES]
    while True:
        file.write_text(text[: mutant.start] + mutant.new + text[mutant.end :])
        try:
            if not python and not compile_extension(tree, mutant.path):
                return "not compiled"
            killer = run_tests(tree, tests, seconds)
        finally:
            file.write_text(text)
            assert python or compile_extension(tree, mutant.path), mutant.path
        if not killer:
            return "survived"
        if not run_tests(tree, [killer], 300):
            return f"killed by {killer}"
        tests += ["--deselect", killer]  # the test also fails without the change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=170, help="CPU seconds for the tests of one mutant")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    os.chdir(tree)
    by_line, draws, number = find_mutants(tree), random.Random(arguments.seed), 0
    print(f"# {len(by_line)} lines, {sum(map(len, by_line.values()))} mutants, seed {arguments.seed}", flush=True)
    while number < arguments.count:
        mutant = draws.choice(by_line[draws.choice(sorted(by_line))])
        fate = "listed" if arguments.list else try_mutant(tree, mutant, arguments.seconds)
        number += fate != "not compiled"
        print(f"{number:3d} {mutant}: {fate}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        resource.setrlimit(resource.RLIMIT_CPU, (int(float(sys.argv[2])) + 60,) * 2)
        Path("/proc/self/oom_score_adj").write_text("1000")
        options = [
            "-x",
            "-v",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "--timeout=180",
            "--timeout-method=thread",
            "--tb=no",
        ]
        sys.exit(pytest.main([*options, *sys.argv[3:]], plugins=[Budget(float(sys.argv[2]))]))
    main()
