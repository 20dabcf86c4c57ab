"""Libraries for LD_PRELOAD that take the place of some of libc's calls: a system that refuses something, or takes its time."""

import os
import subprocess
from pathlib import Path


def build(folder: Path, name: str, code: str) -> Path:
    """Compile C into folder/NAME.so and return its path."""
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(code)
    subprocess.run([os.environ.get("CC", "cc"), "-w", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def preloaded(*libraries: Path) -> dict[str, str]:
    """The environment in which a process loads these, after those that this one was given (`make asan`)."""
    return {"LD_PRELOAD": ":".join(filter(None, [os.environ.get("LD_PRELOAD"), *map(str, libraries)]))}


# Something happens before the file of a unit gets its room.
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


def crashing(folder: Path, unit: str) -> Path:
    """A shim under which the process that makes a unit, whose name holds this text, crashes."""
    return build(folder, "crashing", AT_FALLOCATE % (unit, "raise(SIGSEGV)"))


def waiting(folder: Path, gate: Path) -> Path:
    """A shim under which whoever makes a unit of experts waits until a file `gate` is there."""
    wait = f'while (access("{gate}", F_OK)) usleep(5000)'
    return build(folder, "waiting", AT_FALLOCATE % ("/partial/experts", wait))


REFUSED = "SHIM_REFUSED"
REFUSING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#define REFUSE(name, reason, asked) \\
    int name(long a, long b, long c, long d, long e) { \\
        const char *refused = getenv("SHIM_REFUSED"); \\
        if (!asked || (refused && strstr(refused, #name))) { errno = reason; return -1; } \\
        return ((int (*)(long, long, long, long, long))dlsym(RTLD_NEXT, #name))(a, b, c, d, e); \\
    }
"""


def refusing(folder: Path, reason: str, *calls: str, asked: bool = False) -> Path:
    """A shim for a file system that cannot do something, such as FAT and some network shares: these calls fail. asked: of
    them those that REFUSED of the environment names.
    """
    bodies = [f"REFUSE({call}, {reason}, {int(asked)})" for call in calls]
    return build(folder, f"no_{calls[0]}", "\n".join([REFUSING, *bodies]))
