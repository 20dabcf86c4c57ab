"""A guest with real NUMA nodes: Debian's kernel under QEMU, on the host's file system.

    tests/numa/guest.py run VARIANT COMMAND...   boot, run COMMAND in this checkout, print its output, power off
    tests/numa/guest.py all [VARIANT...]         the suite (TESTS below and all checks) in every variant; `make numa`

The guest mounts the host's file system read-only, so that the checkout, its .venv and all other files have the same
paths. Files that it writes are lost afterwards. Kernel and initramfs are made once, in build/numa or $OUT.
"""

from __future__ import annotations

import argparse
import fcntl
import lzma
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from variants import VARIANTS, Variant

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
STATE = Path(os.environ.get("OUT", CHECKOUT / "build" / "numa")).resolve()
QEMU = "qemu-system-x86_64"
KERNEL = "linux-image-amd64"  # not the cloud kernel: it has no 9p file system
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
LIMIT = 5400  # in seconds; an emulated guest needs minutes for what the host does in seconds
ENDED = re.compile(r"=== guest: exit (\d+)")


class Unavailable(Exception):
    """A requirement of guests that this machine lacks; the message is one sentence."""


# ---- kernel and initramfs --------------------------------------------------------------------------------------------


def prepare() -> None:
    """Make kernel and initramfs in STATE from Debian's packages; make the initramfs again if init.sh has changed."""
    if platform.machine() != "x86_64":
        raise Unavailable("the guest runs this machine's own programs, and must be x86-64")
    if not shutil.which(QEMU):
        install("qemu-system-x86")
    STATE.mkdir(parents=True, exist_ok=True)
    tree, initrd, init = STATE / "initramfs", STATE / "initrd", HERE / "init.sh"
    if not tree.exists():
        with tempfile.TemporaryDirectory(dir=STATE) as folder:
            packages, new = Path(folder) / "packages", Path(folder) / "initramfs"
            download(["busybox-static", kernel_package()], packages)
            unpack(packages, new)
            new.rename(tree)
    if initrd.exists() and initrd.stat().st_mtime >= init.stat().st_mtime:
        return
    shutil.copy(init, tree / "init")
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    cpio = [str(tree / "bin/busybox"), "cpio", "-o", "-H", "newc"]
    with (STATE / "initrd.new").open("wb") as archive:
        subprocess.run(cpio, cwd=tree, input=names.encode(), stdout=archive, stderr=subprocess.DEVNULL, check=True)
    (STATE / "initrd.new").rename(initrd)


def unpack(packages: Path, tree: Path) -> None:
    """Write the initramfs, except init, and the kernel beside it."""
    for folder in ("bin", "modules", "proc", "sys", "dev", "host", "changes", "guest"):
        (tree / folder).mkdir(parents=True)
    kernel = next(packages.glob("boot/vmlinuz-*"))
    shutil.copy(kernel, STATE / "vmlinuz")
    shutil.copy(packages / "bin/busybox", tree / "bin/busybox")
    order = []
    for name, data in read_modules(packages / "lib/modules" / kernel.name.removeprefix("vmlinuz-")):
        (tree / "modules" / name).write_bytes(data)
        order.append(name)
    (tree / "modules/order").write_text("\n".join(order))


def install(package: str) -> None:
    """Install a Debian package; requires root."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise Unavailable(f"{package} is not installed, and installing it needs root and apt-get")
    command = ["apt-get", "install", "-y", "--no-install-recommends", package]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise Unavailable(f"apt-get cannot install {package} ({last_line(result.stderr)})")


def kernel_package() -> str:
    """Return the package on which KERNEL depends."""
    if not shutil.which("apt-get"):
        raise Unavailable("the guest's kernel is a package of Debian, and there is no apt-get to fetch it")
    text = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True).stdout
    match = re.search(r"Depends: (linux-image-\S+)", text)
    if not match:
        raise Unavailable(f"apt-cache knows no {KERNEL}: the guest needs the packages of Debian (or `apt-get update`)")
    return match[1]


def download(names: list[str], target: Path) -> None:
    """Unpack Debian packages without installing them."""
    with tempfile.TemporaryDirectory(dir=STATE) as folder:
        result = subprocess.run(["apt-get", "download", *names], cwd=folder, capture_output=True, text=True)
        if result.returncode:
            raise Unavailable(f"apt-get cannot download {' and '.join(names)} ({last_line(result.stderr)})")
        for package in sorted(Path(folder).glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, target], check=True)


def read_modules(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (file name, content) of MODULES and their dependencies, each after the modules that it needs."""
    paths = {path.name.partition(".")[0].replace("-", "_"): path for path in root.rglob("*.ko*")}
    visited: set[str] = set()

    def visit(name: str) -> Iterator[tuple[str, bytes]]:
        if name in visited or name not in paths:  # missing modules are built into the kernel
            return
        visited.add(name)
        data = paths[name].read_bytes()
        data = lzma.decompress(data) if paths[name].suffix == ".xz" else data
        match = re.search(rb"\0depends=([\w,-]*)\0", data)
        for dependency in match[1].decode().replace("-", "_").split(",") if match else ():
            yield from visit(dependency)
        yield f"{name}.ko", data

    for name in MODULES:
        yield from visit(name)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


# ---- booting --------------------------------------------------------------------------------------------------------


def qemu_options(variant: Variant) -> list[str]:
    """Return the options of QEMU for a variant."""
    options = ["-machine", "q35", "-cpu", variant.cpu, "-m", f"{variant.mib}M", "-smp", variant.smp]
    for node, (cpus, mib) in variant.nodes.items():
        node_options = ["node", f"nodeid={node}"]
        if all_cpus := cpus or variant.off.get(node):
            node_options.append(f"cpus={all_cpus}")
        if mib:
            options += ["-object", f"memory-backend-ram,id=memory{node},size={mib}M"]
            node_options.append(f"memdev=memory{node}")
        options += ["-numa", ",".join(node_options)]
    return options


def boot(name: str, command: list[str], accelerator: str, limit: int = LIMIT) -> Iterator[str]:
    """Run a command in a guest and yield its lines as they are printed.

    The last line matches ENDED unless the guest has failed earlier.
    """
    with tempfile.NamedTemporaryFile("w", dir=STATE, suffix=".sh") as job:
        job.write(
            f"export PATH={shlex.quote(str(CHECKOUT / '.venv/bin'))}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n"
            f"export HOME=/dev/shm LANG=C.UTF-8 TMPDIR=/dev/shm PYTHONDONTWRITEBYTECODE=1 VARIANT={name}\n"
            + "".join(f"echo 0 >/sys/devices/system/cpu/cpu{cpu}/online\n" for cpu in VARIANTS[name].offline)
            + f"cd {shlex.quote(str(CHECKOUT))} && {shlex.join(command)}\n"
        )
        job.flush()
        arguments = [QEMU, "-accel", accelerator, *qemu_options(VARIANTS[name])]
        arguments += ["-kernel", str(STATE / "vmlinuz"), "-initrd", str(STATE / "initrd")]
        arguments += ["-append", f"console=ttyS0 quiet panic=-1 mitigations=off job={job.name}"]
        arguments += ["-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"]
        arguments += ["-nodefaults", "-no-reboot", "-display", "none", "-net", "none", "-serial", "stdio"]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(["timeout", str(limit), *arguments], **pipes, text=True, errors="replace") as guest:
            assert guest.stdout is not None
            for line in guest.stdout:
                yield line.replace("\r", "").rstrip("\n")


def accelerator() -> str:
    """Return "kvm" if a guest boots with it, otherwise emulation; this is tried once."""
    cache = STATE / "accelerator"
    if not cache.exists():
        works = os.access("/dev/kvm", os.W_OK) and any(ENDED.match(line) for line in boot("one", ["true"], "kvm", 60))
        cache.write_text("kvm" if works else "tcg,thread=multi")
    return cache.read_text()


def run(name: str, command: list[str]) -> tuple[int, list[str]]:
    """Boot, print the output, and return the command's exit status and lines. Only one guest runs at a time."""
    prepare()
    with (Path(tempfile.gettempdir()) / "ktconvert-numa.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = []
        for line in boot(name, command, accelerator()):
            print(line, flush=True)
            lines.append(line)
    statuses = [int(match[1]) for line in lines if (match := ENDED.match(line))]
    return (statuses[-1] if statuses else 1), lines


# ---- the suite ------------------------------------------------------------------------------------------------------

TESTS = ("tests/test_machine.py", "tests/test_pool.py", "tests/test_runtime_load.py")


def run_suite(names: list[str]) -> int:
    """Run tests and checks in each variant, print a line for each, and return the number of variants that fail."""
    model, hole = STATE / "model", STATE / "hole"
    if not hole.exists():
        subprocess.run([CHECKOUT / ".venv/bin/python", HERE / "model.py", model], check=True)
        hole.touch()
        os.truncate(hole, 600 << 20)
    checks = [str(path.relative_to(CHECKOUT)) for path in sorted(HERE.glob("check_*.py"))]
    options = ["-m", "pytest", "-q", "--color=no", "--tb=short", "--timeout=1800", "-p", "no:cacheprovider"]
    results = {}
    for name in names:
        print(f"--- {name}", flush=True)
        begin = time.monotonic()
        command = ["env", f"MODEL={model}", f"HOLE={hole}", "python", *options, *TESTS, *checks]
        status, lines = run(name, command)
        counts = next((line for line in reversed(lines) if re.search(r"\d (passed|failed|error)", line)), "no result")
        results[name] = (status, f"{counts.strip('= ')}, {time.monotonic() - begin:.0f} s with the boot")
    width = max(map(len, results))
    for name, (status, text) in results.items():
        print(f"{name:<{width}}  {'good' if status == 0 else 'BAD'}: {text}")
    return sum(status != 0 for status, _ in results.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("variant", choices=VARIANTS)
    run_parser.add_argument("command", nargs=argparse.REMAINDER)
    all_parser = commands.add_parser("all")
    all_parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(VARIANTS))
    arguments = parser.parse_args()
    try:
        if arguments.action == "run":
            return run(arguments.variant, arguments.command)[0]
        prepare()
        return run_suite(arguments.variants or list(VARIANTS))
    except Unavailable as error:
        print(f"make numa: skipped: {error}.")
        return 0


if __name__ == "__main__":
    sys.exit(main())
