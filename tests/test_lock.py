"""Locks of work directories: one process at a time, or one per job share, with and without file-system locks."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ktconvert.layouts.errors import OutputError
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.lock import acquire, unlock
from rig import conversion, forks, killpoint, shims
from rig.programs import python_output

LIBRARY = """
import os, sys, signal
from pathlib import Path
from ktconvert.layouts.errors import OutputError
from ktconvert.pipeline.engine.lock import JobShare, acquire, unlock

output = Path(sys.argv[1])
root = output.with_name(output.name + ".work")

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(3)
    return child
"""

# Eight processes at once, in many rounds, each of which begins with the files of an earlier process. Each reports whether
# it has the lock; the holder keeps it until all have reported. Random delays between reading and replacing locks imitate
# a busy machine.
RACE = (
    LIBRARY
    + """
import random, time
from ktconvert.layouts.files import publish
from ktconvert.pipeline.engine import lock as locks

def delayed(call):
    def slow(*arguments):
        random.seed()
        time.sleep(random.random() / 100)
        return call(*arguments)
    return slow

def killed_holder():
    def hold():
        acquire(root, output)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(in_child(hold), 0)

def killed_while_replacing():
    killed_holder()
    def replace():
        publish.publish_path = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        acquire(root, output)
    os.waitpid(in_child(replace), 0)
    assert list(root.glob("lock.held.after-*"))

before = {"nothing": lambda: None, "killed": killed_holder, "killed while replacing": killed_while_replacing}
for number in range(int(sys.argv[3])):
    before[sys.argv[2]]()
    (start, go), (reports, report), (end, stop) = os.pipe(), os.pipe(), os.pipe()
    def contend():
        os.close(go)
        os.close(stop)
        locks.read_lock, publish.publish_path = delayed(locks.read_lock), delayed(publish.publish_path)
        os.read(start, 1)
        try:
            lock = acquire(root, output)
        except OutputError as error:
            assert "is writing to it" in str(error), error
            os.write(report, b"0")
        else:
            os.write(report, b"1")
            os.read(end, 1)
            lock.remove()
        os._exit(0)
    children = [in_child(contend) for _ in range(8)]
    os.close(go)
    results = b""
    while len(results) < 8:
        results += os.read(reports, 8)
    assert results.count(b"1") == 1, (number, results)
    os.close(stop)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, number
    assert not list(root.iterdir()), (number, list(root.iterdir()))
    root.rmdir()
    for fd in (start, reports, report, end):
        os.close(fd)
"""
)

# A process is killed before each call that changes a file, while it takes over a stale lock and while it removes its own;
# then a second process does the same.
KILLS = (
    LIBRARY
    + """
def run(n):
    '''Take the lock and remove it; kill the process before the n-th call. Return whether it was killed.'''
    def take():
        os.environ["KILLPOINT_ROOT"], os.environ["KILLPOINT_N"] = str(output), str(n)
        acquire(root, output).remove()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(in_child(take), 0)[1])
    assert code in (0, -signal.SIGKILL), (n, code)
    return code != 0

def hold():
    acquire(root, output)
    os.kill(os.getpid(), signal.SIGKILL)

def begin(n):
    os.waitpid(in_child(hold), 0)
    return run(n)

def end(where):
    assert not run(0), where
    assert not list(root.iterdir()), (where, list(root.iterdir()))

def once(n):
    killed = begin(n)
    end(n)
    return killed

points, step = next(n for n in range(1, 100) if not once(n)), int(sys.argv[2])
for first in range(1, points):
    for second in range(1 + first % step, points + step, step):
        assert begin(first)
        run(second)
        end((first, second))
print(points)
"""
)

# Holds the lock (of a job share, if one is given) until stdin ends or the process is killed.
HOLD = (
    LIBRARY
    + """
part = JobShare(*map(int, sys.argv[2].split("/"))) if sys.argv[2:] else None
try:
    lock = acquire(root, output, part)
except OutputError as error:
    print(error, flush=True)
    sys.exit(7)
print("held", flush=True)
sys.stdin.read()
lock.release()
"""
)


REASONS = ("ENOLCK", "EOPNOTSUPP", "ENOSYS", "EINVAL")


@pytest.fixture(scope="module")
def preloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build a library for each reason for which a system refuses flock."""
    base = tmp_path_factory.mktemp("shims")
    libraries = {}
    for reason in REASONS:
        (base / reason).mkdir()
        libraries[reason] = shims.build_refusing(base / reason, reason, "flock")
    return libraries | {
        "no locks": libraries["ENOLCK"],
        "no links": shims.build_refusing(base, "EOPNOTSUPP", "flock", "link", "linkat"),
    }


@pytest.fixture(params=["locks", "no locks"])
def system(request: pytest.FixtureRequest, preloads: dict[str, Path]) -> dict[str, str]:
    """Return the environment of a process on a file system with locks, without them, or also without hard links."""
    return {} if request.param == "locks" else {"LD_PRELOAD": str(preloads[request.param])}


@pytest.fixture
def no_locks(preloads: dict[str, Path]) -> dict[str, str]:
    """Return the environment of a process on a file system without locks."""
    return {"LD_PRELOAD": str(preloads["ENOLCK"])}


class Process:
    """A process that holds a lock or was refused; `text` is its message."""

    def __init__(self, output: Path, *arguments: str, **env: str) -> None:
        command = [sys.executable, "-c", HOLD, str(output), *arguments]
        self.process = subprocess.Popen(
            command, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.text = self.process.stdout.readline().strip()
        self.holds = self.text == "held"

    def end(self, number: int | None = None) -> None:
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate(timeout=300)


def run_script(script: str, *arguments: object, **env: str) -> str:
    """Run a script and return its output."""
    return python_output(script, *arguments, timeout=600, **env)


RACES = [(system, before) for system in ("locks", "no locks", "no links") for before in ("nothing", "killed")]


@pytest.mark.parametrize("rounds", [12, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize(("system", "before"), [*RACES, ("no locks", "killed while replacing")], indirect=["system"])
def test_only_one_of_many_processes_gets_the_lock(tmp_path, system, before, rounds):
    with conversion.memory_folder(tmp_path) as base:
        run_script(RACE, base / "out", before, rounds, **system)


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("missing", [(), ("flock",), ("flock", "link", "linkat")], ids=" and ".join)
def test_locks_can_be_taken_after_any_kill(tmp_path, missing, step):
    libraries = [shims.build_refusing(tmp_path, "EOPNOTSUPP", *missing)] if missing else []
    preload = ":".join(map(str, [*libraries, killpoint.build(tmp_path)]))
    with conversion.memory_folder(tmp_path) as base:
        points = int(run_script(KILLS, base / "out", step, LD_PRELOAD=preload))
    assert points > (10 if missing else 3)


def test_shares_work_together_and_exclude_other_processes(tmp_path, system):
    output = tmp_path / "out"
    shares = [Process(output, f"{n}/3", KTCONVERT_HOST="abc"[n], **system) for n in range(3)]
    assert [share.text for share in shares] == ["held"] * 3
    unshared = Process(output, KTCONVERT_HOST="a", **system)
    for n, share in enumerate(shares):
        assert f"job share {n}/3 (process {share.process.pid} on host {'abc'[n]})" in unshared.text
    assert unshared.text.count(" are writing to it; wait for them or stop them.") == 1
    duplicate = Process(output, "1/3", KTCONVERT_HOST="d", **system)
    assert f"{output}: job share 1/3 (process {shares[1].process.pid} on host b) is writing to it" in duplicate.text
    shares[0].end()
    shares[2].end()
    unshared = Process(output, KTCONVERT_HOST="b", **system)
    assert f"{output}: job share 1/3 (process {shares[1].process.pid} on host b) is writing to it" in unshared.text
    shares[1].end(signal.SIGKILL)
    unshared = Process(output, KTCONVERT_HOST="b", **system)
    assert unshared.holds
    share = Process(output, "2/3", KTCONVERT_HOST="b", **system)
    assert f"process {unshared.process.pid} on host b is writing to it; wait for it or stop it." in share.text
    unshared.end()
    share = Process(output, "1/3", KTCONVERT_HOST="b", **system)
    assert share.holds
    share.end()


def test_shares_and_an_unshared_process_exclude_each_other(tmp_path, system):
    """Either the shares work or the process without a share. On a busy machine none may work: nobody waits forever."""
    rounds = 0
    while rounds < 3:
        with ThreadPoolExecutor(4) as pool:
            shares = list(pool.map(lambda share: Process(tmp_path / "out", *share, **system), [["0/2"], [], ["1/2"]]))
        unshared = shares.pop(1)
        assert not (unshared.holds and any(share.holds for share in shares))
        rounds += unshared.holds or any(share.holds for share in shares)
        assert all(process.holds or "writing to it" in process.text for process in (unshared, *shares))
        for process in (unshared, *shares):
            process.end()


@pytest.mark.parametrize("reason", REASONS)
def test_a_file_replaces_missing_file_system_locks(tmp_path, preloads, reason):
    env = {"LD_PRELOAD": str(preloads[reason])}
    first = Process(tmp_path / "out", **env)
    lock_file = tmp_path / "out.work/lock.held"
    assert lock_file.read_bytes() == (tmp_path / "out.work/lock").read_bytes()
    holder = json.loads(lock_file.read_bytes())
    assert [holder[key] for key in ("pid", "host", "boot")] == [first.process.pid, machine.host(), machine.boot_id()]
    second = Process(tmp_path / "out", **env)
    assert f"process {first.process.pid} on host {machine.host()} is writing to it" in second.text
    assert "--force-unlock" not in second.text  # the process is known to run
    first.end()
    assert not lock_file.exists()


# Stale locks: entries that differ from those of a running process, or other contents of the file; and whether the lock is
# respected.
STALE_LOCKS: list[tuple[dict[str, Any] | bytes, bool]] = [
    ({}, True),
    ({"start": 1}, False),  # a later process has the same id
    ({"boot": "another"}, False),
    ({"namespace": "pid:[1]"}, True),  # a container
    ({"host": "another", "start": 1}, True),
    ({"host": "another", "boot": "another", "start": 1}, True),
    ({"host": "localhost", "boot": "another", "start": 1}, True),  # hosts without names
    *((content, True) for content in (b"", b"4711\n", b"\xff\x00" * 5000, b"1 a b c d\n", b"{}")),
]
# Takes the lock of each output in a list of outputs and hosts, each in its own process.
TAKE = (
    LIBRARY
    + """
for output, os.environ["KTCONVERT_HOST"] in zip(sys.argv[1::2], sys.argv[2::2]):
    def take():
        try:
            acquire(Path(output + ".work"), Path(output))
            print("held", flush=True)
        except OutputError as error:
            print(error, flush=True)
    os.waitpid(in_child(take), 0)
"""
)


def test_only_locks_of_dead_processes_are_taken_over(tmp_path, no_locks):
    pid, arguments, holder = (
        os.getpid(),
        [],
        {"host": "this", "boot": machine.boot_id(), "namespace": machine.pid_namespace()},
    )
    holder |= {"pid": pid, "start": machine.process_start(pid)}
    for number, (content, _) in enumerate(STALE_LOCKS):
        root = tmp_path / f"{number}.work"
        root.mkdir()
        (root / "lock").touch()
        (root / "lock.held").write_bytes(
            content if isinstance(content, bytes) else json.dumps(holder | content).encode()
        )
        host = content.get("host", "this") if isinstance(content, dict) else "this"
        arguments += [str(tmp_path / str(number)), "localhost" if host == "localhost" else "this"]
    before = conversion.tree(tmp_path)
    for number, (text, (content, respected)) in enumerate(
        zip(run_script(TAKE, *arguments, **no_locks).splitlines(), STALE_LOCKS, strict=True)
    ):
        assert (text == "held") is not respected, text
        lock_file = f"{number}.work/lock.held"
        assert (conversion.tree(tmp_path)[lock_file] == before[lock_file]) == respected, text
        if isinstance(content, bytes):
            assert "another process is writing to it" in text and "--force-unlock" in text
        elif respected:
            assert f"process {pid} on host {content.get('host', 'this')} is writing to it" in text


def test_processes_with_locks_respect_lock_files(tmp_path, no_locks):
    first = Process(tmp_path / "out", "0/2", KTCONVERT_HOST="a", **no_locks)
    second = Process(tmp_path / "out", KTCONVERT_HOST="b")
    assert f"job share 0/2 (process {first.process.pid} on host a)" in second.text
    first.end()
    second = Process(tmp_path / "out", KTCONVERT_HOST="b")
    assert second.holds
    second.end()


def test_a_lock_of_another_host_needs_force_unlock(tmp_path, preloads):
    source = conversion.checkpoint(tmp_path / "source")
    assert conversion.ktconvert("cpu", "-i", source, "-o", tmp_path / "whole").returncode == 0
    output, lock_file = tmp_path / "made/out", tmp_path / "made/out.work/lock.held"
    output.parent.mkdir()
    repeat = ("cpu", "-i", source, "-o", output)
    with forks.Forks([preloads["ENOLCK"]]) as server:

        def run_on(host: str, *arguments: str | Path) -> Any:
            return server.run(arguments, tmp_path / "said", {"KTCONVERT_HOST": host})

        with killpoint.hold_conversion(source, output, preload=[preloads["ENOLCK"]], KTCONVERT_HOST="a") as process:
            name = f"process {process.pid} on host a "
            before = conversion.identity(output.parent)
            for arguments in (repeat, (*repeat, "--force-unlock"), ("resume", output, "--force-unlock")):
                done = run_on("a", *arguments)
                conversion.check_refusal(done, 7, name, "wait for it or stop it")
                assert "--force-unlock removed" not in done.stderr
            conversion.check_refusal(run_on("b", *repeat), 7, name, str(lock_file), "from 20", "--force-unlock")
            assert run_on("b", "resume", output, "--dry-run", "--force-unlock").returncode == 0
            assert conversion.identity(output.parent) == before
        conversion.check_refusal(run_on("b", "resume", output), 7, name, str(lock_file), "--force-unlock")
        done = run_on("b", "resume", output, "--force-unlock")
    assert done.returncode == 0, done.stderr
    assert f"--force-unlock removed {lock_file} of process {process.pid} on host a, from 20" in done.stderr
    assert conversion.find_differences(conversion.tree(output), conversion.tree(tmp_path / "whole")) == []
    assert conversion.names(output.parent) == ["out"]


def test_force_unlock_cannot_remove_file_system_locks(tmp_path):
    first = Process(tmp_path / "out", KTCONVERT_HOST="a")
    name = f"process {first.process.pid} on host a is writing to it"
    with pytest.raises(OutputError, match=f"{name}.*--force-unlock cannot remove it"):
        unlock(tmp_path / "out.work", tmp_path / "out")
    first.end()


def test_unlocking_a_share_removes_only_its_lock(tmp_path, no_locks):
    root = tmp_path / "out.work"
    root.mkdir()
    for name, share in (("lock.held.part-0-of-3", "0/3"), ("lock.held.part-1-of-3", "1/3")):
        killed = Process(tmp_path / "out", share, KTCONVERT_HOST="a", **no_locks)
        assert killed.holds
        killed.end(signal.SIGKILL)
        assert (root / name).exists()
    code = LIBRARY + "for taken in unlock(root, output, JobShare(1, 3)): print(taken)\n"
    output = run_script(code, tmp_path / "out", **no_locks)
    assert f"{root / 'lock.held.part-1-of-3'} of job share 1/3 (process " in output
    assert len(output.splitlines()) == 1
    assert conversion.names(root) == ["lock", "lock.held.part-0-of-3"]


def test_a_file_system_without_any_lock_is_refused(tmp_path):
    library = shims.build_refusing(tmp_path, "EOPNOTSUPP", "flock", "link", "renameat2")
    source = conversion.checkpoint(tmp_path / "source", layers=1)
    done = conversion.ktconvert("cpu", "-i", source, "-o", tmp_path / "out", env={"LD_PRELOAD": str(library)})
    conversion.check_refusal(done, 7, str(tmp_path / "out.work/lock.held"), "choose a different file system")


@pytest.mark.parametrize("name", ["partial", "attempts", "store", "out", "plan.json", "journal.jsonl", "lock"])
def test_links_in_a_work_directory_are_refused(tmp_path, name):
    output, root, victim = tmp_path / "out", tmp_path / "out.work", tmp_path / "victim"
    victim.mkdir()
    (victim / "a").write_text("precious")
    root.mkdir()
    (root / "lock").touch()
    (root / name).unlink(missing_ok=True)
    folders = name in ("partial", "attempts", "store", "out")
    (root / name).symlink_to(victim if folders else victim / "a")
    with pytest.raises(OutputError, match=rf"out\.work/{name}: is a link, not ktconvert's own"):
        acquire(root, output)
    assert (victim / "a").read_text() == "precious"


def test_a_link_is_no_work_directory(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.work").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match=r"out\.work: is a link, but ktconvert needs its own folder"):
        acquire(tmp_path / "out.work", tmp_path / "out")
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_work_directories_are_private(tmp_path):
    """A run makes directories private that earlier versions left open."""
    for name in ("new", "old"):
        root = tmp_path / f"{name}.work"
        if name == "old":
            root.mkdir()
            (root / "lock").touch()
            root.chmod(0o2775)
        acquire(root, tmp_path / name).release()
        assert root.stat().st_mode & 0o777 == 0o700
        acquire(root, tmp_path / name).remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("name", ["", "store"])
def test_a_work_directory_of_another_user_is_refused(tmp_path, name):
    root = tmp_path / "out.work"
    (root / "store").mkdir(parents=True)
    (root / "lock").touch()
    os.chown(root / name, 12345, -1)
    with pytest.raises(OutputError, match=r"user 12345, but (this is user 0|the work directory to user 0)"):
        acquire(root, tmp_path / "out")
    assert {path.name for path in root.iterdir()} == {"lock", "store"}
