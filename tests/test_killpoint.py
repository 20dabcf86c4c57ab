"""Tests of the kill-point shim: it kills before each call, and counts every call that changes the directory."""

import sys
from pathlib import Path

import pytest

from rig import killpoint


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the shim."""
    return killpoint.build(tmp_path_factory.mktemp("shim"))


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return the files of a folder with their bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def python_command(code: str, *arguments: str | Path) -> list[str]:
    """Return the command of an isolated Python, so that startup files add no calls."""
    return [sys.executable, "-I", "-c", code, *map(str, arguments)]


LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
CALLS = {
    "write": "os.write(f, b'x')",
    "pwrite": "os.pwrite(f, b'x', 0)",
    "writev": "os.writev(f, [b'x', b'y'])",
    "pwritev": "os.pwritev(f, [b'x', b'y'], 0)",
    "sendfile": "os.sendfile(f, old, 0, 1)",
    "copy_file_range": "os.copy_file_range(old, f, 1)",
    "fsync": "os.fsync(f)",
    "fdatasync": "os.fdatasync(f)",
    "sync_file_range": LIBC + "assert libc.sync_file_range(f, 0, 0, 2) == 0",
    "syncfs": LIBC + "assert libc.syncfs(f) == 0",
    "ftruncate": "os.ftruncate(f, 1)",
    "truncate": "os.truncate('out/old', 1)",
    "posix_fallocate": "os.posix_fallocate(f, 0, 4096)",
    "fallocate": LIBC + "libc.fallocate(f, 0, ctypes.c_long(0), ctypes.c_long(4096))",
    "rename": "os.rename('out/old', 'out/new')",
    "renameat": "os.rename('old', 'out/new', src_dir_fd=d)",
    "renameat2": LIBC + "assert libc.renameat2(-100, b'out/old', -100, b'out/file', 2) == 0",
    "renameat2 by syscall": LIBC + "assert libc.syscall(316, -100, b'out/old', -100, b'out/file', 2) == 0",
    "link": "os.link('out/old', 'out/new')",
    "linkat": "os.link('old', 'new', src_dir_fd=d, dst_dir_fd=d)",
    "unlink": "os.unlink('out/old')",
    "unlinkat": "os.unlink('old', dir_fd=d)",
    "remove": LIBC + "assert libc.remove(b'out/old') == 0",
    "mkdir": "os.mkdir('out/new/')",
    "mkdirat": "os.mkdir('new', dir_fd=d)",
    "rmdir": "os.rmdir('out/empty')",
    "symlink": "os.symlink('old', 'out/new')",
    "symlinkat": "os.symlink('old', 'new', dir_fd=d)",
    "chmod": "os.chmod('out/old', 0o600)",
    "fchmod": "os.fchmod(f, 0o600)",
    "open to create": "os.open('out/new', os.O_CREAT)",
    "open to write": "open('out/old', 'r+')",
    "open through a link": "os.open('link/old', os.O_WRONLY)",
    "open beside": "os.open('out.work', os.O_CREAT)",
    "openat": "os.open('new', os.O_CREAT, dir_fd=d)",
    "creat": LIBC + "assert libc.creat(b'out/new', 0o644) >= 0",
}
PREPARE = """
import os, sys
os.chdir(sys.argv[1])
f, old, d = os.open("out/file", os.O_RDWR), os.open("out/old", os.O_RDONLY), os.open("out", os.O_RDONLY)
elsewhere = os.open("elsewhere", os.O_RDWR)
"""


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Write the files that CALLS change."""
    for name in ("out", "out/empty"):
        (tmp_path / name).mkdir()
    for name in ("out/file", "out/old", "elsewhere"):
        (tmp_path / name).write_bytes(b"0123")
    (tmp_path / "link").symlink_to("out")
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
def test_every_kind_of_change_is_counted_and_prevented(shim, prepared, call):
    log, root = prepared / "log", prepared / "out"
    before = snapshot(root)
    command = python_command(PREPARE + CALLS[call], prepared)
    assert killpoint.run(command, root, 2, shim, log).returncode == killpoint.KILLED  # 1 is opening out/file
    assert killpoint.find_prevented_call(log).name == call.split()[0] and snapshot(root) == before
    result = killpoint.run(command, root, 0, shim, log)
    assert (result.returncode, result.stderr) == (0, "")
    first, second = killpoint.read_calls(log)
    assert first == ("open", str(root / "file"), None) and second.name == call.split()[0]
    assert killpoint.find_prevented_call(log) is None


UNCOUNTED = """
os.write(elsewhere, b"x"); os.write(1, b"x"); os.fsync(elsewhere); os.rename("elsewhere", "other")
os.open("out/old", os.O_RDONLY); os.read(old, 4); os.listdir("out"); os.stat("out/old"); os.mkdir("ou")
r, w = os.pipe(); os.write(w, b"x")
"""


def test_reads_and_other_folders_are_not_counted(shim, prepared):
    log = prepared / "log"
    result = killpoint.run(python_command(PREPARE + UNCOUNTED, prepared), prepared / "out", 0, shim, log)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "x")
    assert killpoint.count_calls(log) == 1  # opening out/file
