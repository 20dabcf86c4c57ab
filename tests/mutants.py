"""Small faults put into the product at random, one at a time, to see which of them a test notices.

    python tests/mutants.py --tree TREE --seed 1 --count 60 [--list] [--again LOG]

TREE is a checkout to spoil and restore, with an environment of its own in .venv and the extension built there with
`.venv/bin/python setup.py build_ext --inplace --build-temp build/temp`. A line is drawn among the lines of code, then a
change among those the line allows. Tests run file by file, those first that share rare words with the changed function,
until one fails or TIERS is spent; a failure counts if the same test passes without the change. --again runs the
survivors of a log with more time. As the first process of a namespace (unshare --pid --fork --mount-proc) it also ends
what tests leave running. One line of output per mutant: killed, survived, or not compiled (drawn again).
"""

import argparse
import ast
import contextlib
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
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("layouts", "quantizers", "pipeline/engine", "pipeline/plans", "native_quant")
TIERS = ((8, 50), (24, 120))  # test files, and seconds of CPU for them
AGAIN = ((60, 400),)
WALL = 3600  # seconds for a tier, on a machine that is busy with other things
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is",
         "in": "not in", "not in": "in", "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+", "<<": ">>", ">>": "<<",
         "&": "|", "|": "&", "^": "&", "**": "*", "and": "or", "or": "and", "&&": "||", "||": "&&"}  # fmt: skip
TEXT = ("note", "warn", "warning", "say", "echo", "info", "debug", "secho")  # calls that only tell people something


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    start: int  # offsets in the file's text
    end: int
    new: str
    function: str  # the text of the function around it
    kind: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} [{self.start}:{self.end}] {self.kind}"


def of_python(path: str, text: str) -> Iterator[Mutant]:
    """The changes that a Python file allows; not in docstrings, annotations, f-strings and messages."""
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]

    def at(line: int, column: int) -> int:  # a column counts bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)

    def change(start: int, end: int, new: str, kind: str, function: str) -> Mutant:
        return Mutant(path, text.count("\n", 0, start) + 1, start, end, new, function, kind)

    def between(left: ast.expr, right: ast.expr, function: str) -> Iterator[Mutant]:
        start, end = span(left)[1], span(right)[0]
        found = re.search(r"not\s+in|is\s+not|\b(?:in|is|and|or)\b|<<|>>|//|\*\*|[<>=!]=|[-+*/%&|^<>]", text[start:end])
        if found and (old := " ".join(found[0].split())) in SWAPS:
            yield change(start + found.start(), start + found.end(), SWAPS[old], f"{old} -> {SWAPS[old]}", function)

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert | ast.arguments):
            return
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in TEXT:
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = text[slice(*span(node))]
            yield from (m for d in getattr(node.args, "defaults", []) for m in visit(d, function)) if not isinstance(node, ast.ClassDef) else ()  # fmt: skip
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from between(left, right, function)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, function)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(left, right, function)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield change(span(node)[0], span(node.operand)[0], "", "not removed", function)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            new = str(not node.value) if isinstance(node.value, bool) else f"({ast.unparse(node)} + 1)"
            yield change(*span(node), new, f"{ast.unparse(node)} -> {new}", function)
        elif isinstance(node, ast.If | ast.IfExp):
            start, end = span(node.test)
            yield change(start, end, f"not ({text[start:end]})", "branches swapped", function)
        removable = isinstance(
            node, ast.AugAssign | ast.Raise | ast.Return | ast.Delete | ast.Continue | ast.Break
        ) or (
            (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript))
        )
        if removable and isinstance(node, ast.stmt):
            yield change(*span(node), "pass", f"{type(node).__name__.lower()} removed", function)
        if isinstance(node, ast.Raise):
            return
        for name, field in ast.iter_fields(node):
            if name not in ("annotation", "returns", "type_params", "decorator_list", "bases"):
                for child in field if isinstance(field, list) else [field]:
                    if isinstance(child, ast.AST):
                        yield from visit(child, function)

    yield from visit(ast.parse(text), text[:2000])


def of_c(path: str, text: str) -> Iterator[Mutant]:
    """The changes that a C file allows, inside the bodies of functions; a sign between spaces is an operator."""
    blank = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\])+'|^[ \t]*#(?:\\\n|[^\n])*",
                   lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S | re.M)  # fmt: skip
    depth, head, bodies = 0, 0, []
    for mark in re.finditer(r"[{}]", blank):
        if mark[0] == "{" and depth == 0:
            head = mark.start() if blank[: mark.start()].rstrip().endswith(")") else 0
        depth += 1 if mark[0] == "{" else -1
        if depth == 0 and head:
            bodies.append((head, mark.end()))
    for start, end in bodies:
        function = text[text.rfind("\n\n", 0, start) + 1 : end]
        for found in re.finditer(r"(?<= )(?:<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^<>])(?= )|(?<=[(\s])!(?=[\w(])|(?<=\s)[-+]=(?=\s)"
                                 r"|(?<![\w.])\d+(?![\w.])|(?<=\bif )\([^;{}\n]*\)(?= [^)\n]*[;{]$)"
                                 r"|^[ ]*(?!return)[\w.\->\[\]* ]*[\w\]]\([^;{}]*\);$|^[ ]*[\w.\->\[\]]+ [-+*/|&^<>]*= [^;{}]*;$", blank[start:end], re.M):  # fmt: skip
            old = found[0]
            if old in SWAPS:
                new, kind = SWAPS[old], f"{old} -> {SWAPS[old]}"
            elif old in ("+=", "-="):
                new = "-=" if old == "+=" else "+="
                kind = f"{old} -> {new}"
            elif old == "!":
                new, kind = "", "! removed"
            elif old.isdigit():
                new = str(int(old) + 1)
                kind = f"{old} -> {new}"
            elif old.startswith("("):
                new, kind = f"(!{text[start + found.start() : start + found.end()]})", "branches swapped"
            else:
                new, kind = ";", f"removed: {' '.join(old.split())[:60]}"
            where = start + found.start() + len(old) - len(old.lstrip())
            yield Mutant(path, text.count("\n", 0, where) + 1, where, start + found.end(), new, function, kind)


def mutants(tree: Path) -> dict[tuple[str, int], list[Mutant]]:
    """All changes of all product files, by line."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for file in sorted(p for f in FOLDERS for p in (tree / f).rglob("*") if p.suffix in (".py", ".c", ".h")):
        path = str(file.relative_to(tree))
        for mutant in (of_python if file.suffix == ".py" else of_c)(path, file.read_text()):
            by_line.setdefault((path, mutant.line), []).append(mutant)
    return by_line


def words(text: str) -> set[str]:
    whole = set(re.findall(r"[A-Za-z_]\w{2,}", re.sub(r"_?(?:avx\w*|amx|scalar)\b", "", text)))
    return whole | {part for word in whole for part in word.lower().split("_") if len(part) > 2}


def ranked(tree: Path, mutant: Mutant) -> list[str]:
    """The test files, those first that share rare words with the function, its file's name and its line."""
    tests = {str(p.relative_to(tree)): words(p.stem + " " + p.read_text()) for p in (tree / "tests").glob("test_*.py")}
    common = Counter(word for known in tests.values() for word in known)
    source = (tree / mutant.path).read_text()
    heading = mutant.function.split("(")[0].splitlines()[-1] if mutant.function else ""
    module = re.sub(r"_(?:avx\w*|amx|scalar|template)?$", "", Path(mutant.path).stem)
    python = mutant.path.endswith(".py")
    weights = (
        dict.fromkeys(words(mutant.function), 1.0)
        if python
        else {"isa": 3.0, "kernels": 2.0, "forward" if "forward" in mutant.path else "golden": 3.0}
    )
    weights |= dict.fromkeys(words(source.splitlines()[mutant.line - 1]), 2.0) if python else {}
    weights |= dict.fromkeys(words(f"{heading} {module}") - {"static", "void", "const"}, 4.0)

    def score(name: str) -> float:
        shared = sum(w * math.log(len(tests) / common[k]) ** 2 for k, w in weights.items() if k in tests[name])
        direct = mutant.path.removesuffix(".py").replace("/", ".") in (tree / name).read_text()
        same = len(words(Path(name).stem) & words(module))
        length = math.sqrt(len(tests[name])) if python else 1.0
        return shared / length * (2 if direct else 1) * (1 + same)

    builds = {name for name in tests if re.search(r"build_ext|build\.sh|emulated\.sh", (tree / name).read_text())}
    return sorted(tests, key=lambda name: (name in builds, -score(name), name))  # these take minutes


class Budget:
    """A pytest plugin: one case of each test first, if `cases`, and no new test when the CPU time is spent."""

    def __init__(self, seconds: float, cases: bool) -> None:
        self.seconds, self.cases = seconds, cases

    def pytest_collection_modifyitems(self, items: list) -> None:  # type: ignore[type-arg]
        seen: Counter[str] = Counter()
        turn = {}
        for item in items:
            key = item.nodeid.split("[")[0]
            turn[item] = min(seen[key], 1)
            seen[key] += 1
        if self.cases:
            items.sort(key=turn.__getitem__)  # stable: files stay in their order

    def pytest_runtest_setup(self) -> None:
        if sum(os.times()[:4]) > self.seconds:
            import pytest

            pytest.exit("the time is spent", returncode=0)


def run_tests(tree: Path, tests: list[str], seconds: float, cases: str = "cases") -> str:
    """The first test that fails, or nothing."""
    command = [tree / ".venv/bin/python", Path(__file__).resolve(), "--run", str(seconds), cases, *tests]
    # A process that loops or grows for ever ends by itself (see __main__).
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as log:  # no pipe, which what it leaves running would keep open
        process = subprocess.Popen(command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, start_new_session=os.getpid() != 1,
                                   stdout=log, stderr=subprocess.STDOUT)  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=WALL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL) if os.getpid() == 1 else os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        output = log.read()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", output, re.M)
    begun = re.findall(r"^(tests/\S+?\.py::.+?)(?: (?:PASSED|SKIPPED|XFAIL).*)?$", output, re.M)
    if failed or process.returncode == 0:
        return failed[1] if failed else ""
    return f"end with {process.returncode}: {(begun or tests)[-1].strip()}"


def compiled(tree: Path, path: str) -> bool:
    """Whether a C file, or what includes it, compiles; then the extension is linked anew."""
    build = runpy.run_path("native_quant/_build.py")
    include = f"{sys.base_prefix}/include/python3.{sys.version_info[1]}"
    flags = [*build["COMPILE"], "-fPIC", f"-I{build['CSRC']}", f"-I{build['ARCH']}", f"-I{include}"]
    (temp,) = (tree / "build").glob("temp")
    names = [n for n in build["sources"]() if n == path or path.endswith(".h")]
    for name in names:
        needs = subprocess.run(["cc", "-MM", *flags, name], cwd=tree, capture_output=True, text=True).stdout
        if path in [os.path.normpath(n) for n in needs.replace("\\\n", " ").split()[1:]]:
            command = ["cc", *flags, "-c", name, "-o", temp / Path(name).with_suffix(".o")]
            if subprocess.run(command, cwd=tree, capture_output=True).returncode:
                return False
    link = ["cc", "-shared", *map(str, temp.rglob("*.o")), "-o", "native_quant/_ktq.abi3.so"]
    return bool(names) and subprocess.run(link, cwd=tree, capture_output=True).returncode == 0


def tried(tree: Path, mutant: Mutant, tiers: tuple[tuple[int, int], ...]) -> str:
    """What becomes of a mutant."""
    file = tree / mutant.path
    text = file.read_text()
    files = ranked(tree, mutant)
    flaky: list[str] = []
    done = 0
    while True:
        file.write_text(text[: mutant.start] + mutant.new + text[mutant.end :])
        try:
            if not mutant.path.endswith(".py") and not compiled(tree, mutant.path):
                return "not compiled"
            killer = ""
            while done < len(tiers) and not killer:
                first = tiers[done - 1][0] if done else 0
                killer = run_tests(
                    tree,
                    [*files[first : tiers[done][0]], *flaky],
                    tiers[done][1],
                    "cases" if mutant.path.endswith(".py") else "files",
                )
                done += not killer
        finally:
            file.write_text(text)
            assert mutant.path.endswith(".py") or compiled(tree, mutant.path), mutant.path
        if not killer:
            return (
                f"survived {len(files[: tiers[-1][0]])} test files, first {' '.join(Path(f).stem for f in files[:3])}"
            )
        test = killer.split(": ", 1)[-1] if not killer.startswith("tests/") else killer
        if not run_tests(tree, [test], 300):
            return f"killed by {killer}"
        flaky += ["--deselect", test]  # it fails without the change, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--skip", type=int, default=0, help="how many draws to leave out")
    parser.add_argument("--list", action="store_true", help="only print what would be changed")
    parser.add_argument("--again", type=Path, help="a log of the same seed, of which the survivors get more time")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    again = arguments.again.read_text() if arguments.again else ""
    os.chdir(tree)
    by_line = mutants(tree)
    draws = random.Random(arguments.seed)
    survived = re.findall(r"^\S+ survived .*?: (\S+:\d+ \[.*\])", again, re.M)
    print(f"# {len(by_line)} lines, {sum(map(len, by_line.values()))} mutants, seed {arguments.seed}", flush=True)
    number = 0
    while number < arguments.count:
        mutant = draws.choice(by_line[draws.choice(sorted(by_line))])
        start, before = time.monotonic(), sum(os.times()[:4])
        if arguments.skip > 0:
            arguments.skip, number = arguments.skip - 1, number + 1
            continue
        if arguments.list:
            fate = "listed " + " ".join(Path(f).stem for f in ranked(tree, mutant)[:4])
        elif arguments.again and str(mutant).rpartition("]")[0] + "]" not in survived:
            number += 1
            continue
        else:
            fate = tried(tree, mutant, AGAIN if arguments.again else TIERS)
        number += fate != "not compiled"
        seconds = f"{sum(os.times()[:4]) - before:.0f} s of CPU, {time.monotonic() - start:.0f} s"
        print(f"{number:3d} {fate.split()[0]:8s}: {mutant}; {fate} ({seconds})", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        import pytest

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
        sys.exit(pytest.main([*options, *sys.argv[4:]], plugins=[Budget(float(sys.argv[2]), sys.argv[3] == "cases")]))
    main()
