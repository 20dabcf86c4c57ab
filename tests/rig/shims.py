"""Libraries for LD_PRELOAD that replace calls of libc, to imitate systems that refuse a call or are slow."""

import os
import subprocess
from pathlib import Path


def build(folder: Path, name: str, code: str) -> Path:
    """Compile C into folder/NAME.so and return its path."""
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(code)
    subprocess.run([os.environ.get("CC", "cc"), "-w", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def preload_environment(*libraries: Path) -> dict[str, str]:
    """Return the environment in which a process loads these libraries, after those of this process (`make asan`)."""
    return {"LD_PRELOAD": ":".join(filter(None, [os.environ.get("LD_PRELOAD"), *map(str, libraries)]))}


# Code that runs before space is reserved for the file of a unit.
AT_FALLOCATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int posix_fallocate64(int fd, long at, long size) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    if (strstr(path, "%s")) %s;
    return ((int (*)(int, long, long))dlsym(RTLD_NEXT, "posix_fallocate64"))(fd, at, size);
}
int posix_fallocate(int fd, long at, long size) { return posix_fallocate64(fd, at, size); }
"""


def build_crashing(folder: Path, unit: str) -> Path:
    """Build a shim that crashes the process that makes a unit whose name contains this text."""
    return build(folder, "crashing", AT_FALLOCATE % (unit, "raise(SIGSEGV)"))


def build_waiting(folder: Path, gate: Path) -> Path:
    """Build a shim that makes each unit of experts wait until the file `gate` exists."""
    wait = f'while (access("{gate}", F_OK)) usleep(5000)'
    return build(folder, "waiting", AT_FALLOCATE % ("/partial/experts", wait))


REFUSED = "SHIM_REFUSED"
REFUSING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#define REFUSE(name, reason, selected) \\
    int name(long a, long b, long c, long d, long e) { \\
        const char *refused = getenv("SHIM_REFUSED"); \\
        if (!selected || (refused && strstr(refused, #name))) { errno = reason; return -1; } \\
        return ((int (*)(long, long, long, long, long))dlsym(RTLD_NEXT, #name))(a, b, c, d, e); \\
    }
"""


def build_refusing(folder: Path, reason: str, *calls: str, selected: bool = False) -> Path:
    """Build a shim under which these calls fail, as on FAT and some network shares.

    selected: only those calls fail that the environment variable REFUSED lists.
    """
    bodies = [f"REFUSE({call}, {reason}, {int(selected)})" for call in calls]
    return build(folder, f"no_{calls[0]}", "\n".join([REFUSING, *bodies]))
