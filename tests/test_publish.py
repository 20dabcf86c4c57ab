"""Publishing on file systems that refuse optional features: direct writes, and swaps of two names."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from ktconvert.layouts.files.direct_file import DirectFile, RowFile
from rig import shims
from rig.programs import run_python

# Direct writes fail after all threads have begun one.
REFUSED_AT_WRITE = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <errno.h>
    #include <fcntl.h>
    #include <unistd.h>
    ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) {
        if (fcntl(fd, F_GETFL) & O_DIRECT) {
            usleep(200000);
            errno = EINVAL;
            return -1;
        }
        return ((ssize_t (*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64"))(fd, data, count, offset);
    }
    ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) { return pwrite64(fd, data, count, offset); }
"""

# Like tmpfs before Linux 6.6: O_DIRECT (0x4000) is refused after the file was created; F_SETFL is 4.
REFUSED_AT_OPEN = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <errno.h>
    #include <unistd.h>
    static int refused(void) { errno = EINVAL; return -1; }
    int open64(const char *path, int flags, int mode) {
        int fd = ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64"))(path, flags & ~0x4000, mode);
        if (fd < 0 || !(flags & 0x4000)) return fd;
        close(fd);
        return refused();
    }
    int open(const char *path, int flags, int mode) { return open64(path, flags, mode); }
    int fcntl64(int fd, int command, long argument) {
        if (command == 4 && argument & 0x4000) return refused();
        return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64"))(fd, command, argument);
    }
    int fcntl(int fd, int command, long argument) { return fcntl64(fd, command, argument); }
"""

WRITE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from ktconvert.layouts.files.direct_file import DirectFile, allocate_aligned
from ktconvert.layouts.files import publish

pages = allocate_aligned(4 * 4096)
for page in range(4):
    pages[page * 4096 : (page + 1) * 4096] = page + 1
path = Path(sys.argv[1])
with DirectFile(path, pages.size + 5) as file, ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda page: file.write_at(page * 4096, pages[page * 4096 : (page + 1) * 4096]), range(4)))
    file.skip(pages)
    file.append(b"and 5")
    digest = file.close()
assert path.read_bytes() == pages.tobytes() + b"and 5"
assert digest == publish.sha256_file(path)
"""


def check_program(program: str, path: Path, shim: Path | None = None) -> None:
    """Assert that a program succeeds, with a shim if one is given."""
    result = run_python(program, path, preload=shim)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("code", [REFUSED_AT_WRITE, REFUSED_AT_OPEN, ""], ids=["write", "open", "nowhere"])
def test_files_are_written_if_direct_writes_are_refused(code, tmp_path):
    check_program(WRITE, tmp_path / "file", shims.build(tmp_path, "refusing", code))


SAVE = """
import sys
from pathlib import Path
import numpy as np
from ktconvert.native_quant.runtime.experts import KTExperts

root = Path(sys.argv[1])
for value in (0x3F80, 0x4000):
    weight = np.full((2, 64, 64), value, np.uint16)
    KTExperts.from_bf16(weight, weight, weight, method="AMXINT8")._save(root / "saved")
KTExperts.from_bf16(weight, weight, weight, method="AMXINT8")._save(root / "fresh")
"""


def test_a_saved_layer_replaces_the_old_one_without_a_swap(tmp_path, read_tree):
    check_program(SAVE, tmp_path, shims.build_refusing(tmp_path, "EINVAL", "renameat2"))
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["_layer_0"]
    assert read_tree(tmp_path / "saved") == read_tree(tmp_path / "fresh")


# A different process creates a file in the folder, and removes one, after the folder was listed.
MEANWHILE = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <fcntl.h>
    #include <stdio.h>
    #include <string.h>
    #include <unistd.h>
    int rmdir(const char *path) {
        static int times;
        char late[4096];
        snprintf(late, sizeof late, "%s/late", path);
        if (times++ == 0) close(open(late, O_CREAT | O_WRONLY, 0600));
        return ((int (*)(const char *))dlsym(RTLD_NEXT, "rmdir"))(path);
    }
    int unlinkat(int fd, const char *name, int flags) {
        static int times;
        int (*real)(int, const char *, int) = dlsym(RTLD_NEXT, "unlinkat");
        if (!strcmp(name, "gone") && times++ == 0) real(fd, name, flags);
        return real(fd, name, flags);
    }
"""
REMOVE = """
import sys
from pathlib import Path
from ktconvert.layouts.files import publish

publish.remove_tree(Path(sys.argv[1]))
assert not Path(sys.argv[1]).exists()
"""


def test_a_folder_is_removed_although_its_files_change(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "gone").touch()
    check_program(REMOVE, folder, shims.build(tmp_path, "meanwhile", MEANWHILE))


def test_files_are_written_where_space_cannot_be_reserved(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    rows = np.arange(6, dtype=np.uint16).reshape(3, 2)
    with RowFile(tmp_path / "rows", 3, 2, new=True) as file:
        file.write(0, rows)
        assert (file.read(0, 3) == rows).all()
    with DirectFile(tmp_path / "bytes", 5) as file:
        file.append(b"12345")
        file.close()
    assert (tmp_path / "bytes").read_bytes() == b"12345"
