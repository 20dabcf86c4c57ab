"""Damages documents of rig.documents, each in its own process, and checks how the product reads them.

The product must return a result, or raise a KTConvertError with a message. A separate process also shows timeouts,
signals and memory limits. As a script, this file repeats one case: python tests/rig/fuzzing.py DOCUMENT SEED.
"""

import itertools
import json
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of this folder, which has names of libraries

from ktconvert.layouts.errors import KTConvertError
from rig import conversion, mutations
from rig.documents import DOCUMENTS, Inputs, make_inputs, restore_file

SECONDS = 20  # CPU time for one document; the slowest needs a hundredth of it
MEMORY = 2 << 30  # bytes of address space, besides those used before
MAX_FAILURES = 5  # failures that are shown for a document
PROGRAM = "rig.fuzzing:"


def describe(name: str, seed: int, failure: str) -> str:
    """Return a failure with the command that repeats it."""
    return f"{failure}\nagain: .venv/bin/python tests/rig/fuzzing.py {name!r} {seed}"


def fuzz(name: str, inputs: Inputs, count: int) -> dict[str, Any]:
    """Damage a document `count` times; return the counts of results and of messages, and the seconds.

    Raise AssertionError with other outcomes, and with the commands that repeat them.
    """
    document = DOCUMENTS[name]
    path, results = document.make(inputs), inputs.root / "results"
    failures: list[str] = []
    total = {"accepted": 0, "refused": 0, "seconds": 0.0}
    result = 0
    while result < count and len(failures) < MAX_FAILURES:
        results.unlink(missing_ok=True)
        arguments = [str(inputs.root), name, str(path), str(result), str(count), str(results)]
        with restore_file(path):
            ended = conversion.fork(f"{PROGRAM}damage_many", *arguments, models=document.models)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        for line in lines:
            failures += [describe(name, line["seed"], line["failure"])] if "failure" in line else []
        last = lines[-1] if lines else {}
        if "accepted" in last:  # the process ended regularly
            total = {key: total[key] + last[key] for key in total}
            break
        at = int((inputs.root / "at").read_text())
        seed = next(itertools.islice(seeds(), at, None))
        failures.append(describe(name, seed, f"the process ended with {ended.returncode}: {ended.stderr[-1500:]}"))
        result = at + 1
    assert not failures, "\n\n".join([f"{name}: {len(failures)} failures", *failures])
    return total


def trace_all(inputs: Inputs) -> set[str]:
    """Return the functions of the product that run when each `read` reads a valid document once."""
    ran: set[str] = set()
    rows = {row.read: name for name, row in DOCUMENTS.items()}
    for models in {document.models for document in DOCUMENTS.values()}:
        results = inputs.root / "results"
        group = (name for name in rows.values() if DOCUMENTS[name].models == models)
        files = {name: str(DOCUMENTS[name].make(inputs)) for name in group}
        arguments = [str(inputs.root), json.dumps(files), str(results)]
        ended = conversion.fork(f"{PROGRAM}trace_valid", *arguments, models=models)
        assert ended.returncode == 0, ended.stderr
        ran |= {*results.read_text().splitlines()}
    return ran


def seeds() -> Iterator[int]:
    """Yield seeds of mutations without end."""
    draw = conversion.seeded_random()
    return (draw.getrandbits(64) for _ in itertools.count())


def damage_many() -> None:
    """Run in the forked process: damage a document repeatedly; write a line per failure, and the counts at the end."""
    root, name, file, start, stop, results = sys.argv[1:]
    inputs, path, document = Inputs(Path(root)), Path(file), DOCUMENTS[name]
    valid, known_failures = path.read_bytes(), set[str]()
    document.read(inputs, path)  # so that the limits do not include what is loaded only once
    counts, start_time = {"accepted": 0, "refused": 0}, time.monotonic()
    limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, also within C
    with (inputs.root / "at").open("w") as at, Path(results).open("w", buffering=1) as result_file:
        for number, seed in enumerate(itertools.islice(seeds(), int(start), int(stop)), int(start)):
            at.seek(0)
            at.write(f"{number:20d}")
            at.flush()
            path.write_bytes(mutations.damage(document.damage, valid, seed))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            failure = read_damaged(document.read, inputs, path)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if failure in counts:
                counts[failure] += 1
            elif (where := failure.splitlines()[-1][:80] + failure.splitlines()[-3]) not in known_failures:
                known_failures.add(where)
                print(json.dumps({"seed": seed, "failure": failure}), file=result_file)
        print(json.dumps({**counts, "seconds": time.monotonic() - start_time}), file=result_file)


def read_damaged(read: Callable[[Inputs, Path], object], inputs: Inputs, path: Path) -> str:
    """Read a damaged document; return "accepted", "refused", or the traceback of an unexpected exception."""
    try:
        read(inputs, path)
    except KTConvertError as error:
        return "refused" if str(error) else traceback.format_exc(limit=-8)
    except BaseException:
        return traceback.format_exc(limit=-8)
    return "accepted"


def limit_memory() -> None:
    """Limit the address space to MEMORY bytes more than it uses now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


def trace_valid() -> None:
    """Run in the forked process: read valid documents; write the functions of the product that ran, one per line."""
    root, files, results = sys.argv[1:]
    ran: set[Any] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code)

    inputs = Inputs(Path(root))
    for name, file in json.loads(files).items():
        print(name, file=sys.stderr)  # so that a failure follows the document's name
        sys.setprofile(note)
        try:
            DOCUMENTS[name].read(inputs, Path(file))
        finally:
            sys.setprofile(None)
    modules = {module.__file__: name for name, module in sys.modules.items() if getattr(module, "__file__", None)}
    names = {f"{modules.get(code.co_filename, '')}.{code.co_qualname}" for code in ran}
    Path(results).write_text("\n".join(sorted(name for name in names if name.startswith("ktconvert."))))


def main() -> None:
    """Read a document, damaged by the seed if one is given, and print the result."""
    name, *seed = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder) / "inputs")
        document = DOCUMENTS[name]
        path = document.make(inputs)
        if seed:
            path.write_bytes(mutations.damage(document.damage, path.read_bytes(), int(seed[0])))
        print(path.read_bytes()[:4000])
        try:
            print(document.read(inputs, path))
        except KTConvertError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main()
