"""Damages documents of rig.documents, in a process of its own each time, so that a hang, a signal and a full memory are
told from what must hold: a result, or one sentence of a KtconvertError. As a script it does one again, and shows what
comes of it: python tests/rig/fuzzing.py DOCUMENT SEED.
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
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, whose names are those of libraries, too

from ktconvert.layouts.errors import KtconvertError
from rig import conversion, mutations
from rig.documents import DOCUMENTS, Inputs, make_inputs, restored

SECONDS = 20  # of CPU time for one document, a hundred times what the slowest takes
ROOM = 2 << 30  # bytes of address space more than what is used before
MOST = 5  # failures of a document that are shown
PROGRAM = "rig.fuzzing:"


def describe(name: str, seed: int, what: str) -> str:
    return f"{what}\nagain: .venv/bin/python tests/rig/fuzzing.py {name!r} {seed}"


def fuzz(name: str, inputs: Inputs, count: int) -> dict[str, Any]:
    """Damage a document so many times. Returns how many gave a result, how many a sentence, and the seconds; raises
    AssertionError with what else happened, and how to see it again.
    """
    document = DOCUMENTS[name]
    path, results = document.make(inputs), inputs.root / "results"
    failures: list[str] = []
    total = {"accepted": 0, "refused": 0, "seconds": 0.0}
    done = 0
    while done < count and len(failures) < MOST:
        results.unlink(missing_ok=True)
        words = [str(inputs.root), name, str(path), str(done), str(count), str(results)]
        with restored(path):
            ended = conversion.fork(f"{PROGRAM}damage_many", *words, modules=document.modules)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        for line in lines:
            failures += [describe(name, line["seed"], line["failure"])] if "failure" in line else []
        last = lines[-1] if lines else {}
        if "accepted" in last:  # it came to its end
            total = {key: total[key] + last[key] for key in total}
            break
        at = int((inputs.root / "at").read_text())
        seed = next(itertools.islice(seeds(), at, None))
        failures.append(describe(name, seed, f"the process ended with {ended.returncode}: {ended.stderr[-1500:]}"))
        done = at + 1
    assert not failures, "\n\n".join([f"{name}: {len(failures)} failures", *failures])
    return total


def trace_all(inputs: Inputs) -> set[str]:
    """The functions of the product that run where a valid document of each row is read, by each `read` once."""
    ran: set[str] = set()
    rows = {row.read: name for name, row in DOCUMENTS.items()}
    for modules in {document.modules for document in DOCUMENTS.values()}:
        results = inputs.root / "results"
        own = (name for name in rows.values() if DOCUMENTS[name].modules == modules)
        files = {name: str(DOCUMENTS[name].make(inputs)) for name in own}
        words = [str(inputs.root), json.dumps(files), str(results)]
        ended = conversion.fork(f"{PROGRAM}trace_valid", *words, modules=modules)
        assert ended.returncode == 0, ended.stderr
        ran |= {*results.read_text().splitlines()}
    return ran


def seeds() -> Iterator[int]:
    """Of mutations, without end."""
    draw = conversion.chance()
    return (draw.getrandbits(64) for _ in itertools.count())


def damage_many() -> None:
    """The process: damages a document again and again; what is wrong goes into a file, a line each, in the end numbers."""
    root, name, file, start, stop, results = sys.argv[1:]
    inputs, path, document = Inputs(Path(root)), Path(file), DOCUMENTS[name]
    whole, seen = path.read_bytes(), set[str]()
    document.read(inputs, path)  # what is made once, and loaded, is no part of what follows
    counted, began = {"accepted": 0, "refused": 0}, time.monotonic()
    limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, also within C
    with (inputs.root / "at").open("w") as at, Path(results).open("w", buffering=1) as told:
        for number, seed in enumerate(itertools.islice(seeds(), int(start), int(stop)), int(start)):
            at.seek(0)
            at.write(f"{number:20d}")
            at.flush()
            path.write_bytes(mutations.damaged(document.damage, whole, seed))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            failure = wrong(document.read, inputs, path)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if failure in counted:
                counted[failure] += 1
            elif (where := failure.splitlines()[-1][:80] + failure.splitlines()[-3]) not in seen:
                seen.add(where)
                print(json.dumps({"seed": seed, "failure": failure}), file=told)
        print(json.dumps({**counted, "seconds": time.monotonic() - began}), file=told)


def wrong(read: Callable[[Inputs, Path], object], inputs: Inputs, path: Path) -> str:
    """Return "accepted", "refused", or what should not happen."""
    try:
        read(inputs, path)
    except KtconvertError as error:
        return "refused" if str(error) else traceback.format_exc(limit=-8)
    except BaseException:
        return traceback.format_exc(limit=-8)
    return "accepted"


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))


def trace_valid() -> None:
    """The process: reads valid documents, and writes which functions of the product ran, a line each."""
    root, files, results = sys.argv[1:]
    ran: set[Any] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code)

    inputs = Inputs(Path(root))
    for name, file in json.loads(files).items():
        print(name, file=sys.stderr)  # a failure comes after it
        sys.setprofile(note)
        try:
            DOCUMENTS[name].read(inputs, Path(file))
        finally:
            sys.setprofile(None)
    modules = {module.__file__: name for name, module in sys.modules.items() if getattr(module, "__file__", None)}
    names = {f"{modules.get(code.co_filename, '')}.{code.co_qualname}" for code in ran}
    Path(results).write_text("\n".join(sorted(name for name in names if name.startswith("ktconvert."))))


def main() -> None:
    name, *seed = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder) / "inputs")
        document = DOCUMENTS[name]
        path = document.make(inputs)
        if seed:
            path.write_bytes(mutations.damaged(document.damage, path.read_bytes(), int(seed[0])))
        print(path.read_bytes()[:4000])
        try:
            print(document.read(inputs, path))
        except KtconvertError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main()
