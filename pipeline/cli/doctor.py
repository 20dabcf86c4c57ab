"""`ktconvert doctor`: what this machine offers for converting and serving, and the kt-kernel flags that follow."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from ktconvert.native_quant import machine
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.cli.version import installed
from ktconvert.pipeline.options.queries import DoctorOptions
from ktconvert.pipeline.report.text import aligned, size

PACKAGES = ("ktconvert", "numpy", "safetensors", "torch", "kt-kernel")
# What ktconvert and kt-kernel choose their code by, in /proc/cpuinfo's words.
FEATURES = (
    *("avx2", "f16c", "avx_vnni", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512vbmi"),
    *("avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
)
# Without any of them the runtime does without AMX.
AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
# Bits of XCR0 (Intel SDM volume 1, 13.3): register state that the kernel saves, so that programs may use it.
XCR0 = (("AVX", 0x06), ("AVX-512", 0xE6), ("AMX", 0x60000))
SYS_ARCH_PRCTL, ARCH_GET_XCOMP_SUPP = 158, 0x1021

PROBE_BYTES, PROBE_SECONDS, BLOCK = 256 << 20, 5.0, 4 << 20
ROOMY = 100 * 10**9  # bytes: less than this holds no large model's experts


def known_features() -> tuple[str, ...]:
    flags = machine.cpu_flags()
    return tuple(name for name in FEATURES if name in flags)


def versions() -> dict[str, str | None]:
    """The installed versions of PACKAGES, None for a missing one; nothing is imported."""
    here = {"python": platform.python_version(), "platform": platform.platform()}
    return {**here, **{package: installed(package) for package in PACKAGES}}


def supported_state() -> int | None:
    """XCR0 as the kernel states it, or None where it does not (Linux before 5.16, other machines)."""
    if os.uname().machine != "x86_64":
        return None
    mask = ctypes.c_uint64()
    done = ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_GET_XCOMP_SUPP, ctypes.byref(mask))
    return mask.value if done == 0 else None


@dataclass(frozen=True)
class Disk:
    """One directory's disk; speed in bytes per second, None with the problem that prevented measuring it."""

    path: str
    free: int
    file_size_limit: int | None
    write_speed: float | None
    direct: bool
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of this machine, unless given. Sizes in bytes; the CPU counts are those that this process may use.

    methods         kt-kernel's names of what the runtime computes; () if the extension cannot be loaded
    memory_policy   a row of placement.MODES; None where the kernel does not tell or the extension cannot be loaded
    memory_refusal  a sentence where this process cannot place memory on nodes
    """

    cpu: str = field(default_factory=lambda: machine.cpu_name())
    features: tuple[str, ...] = field(default_factory=known_features)
    xcr0: int | None = field(default_factory=supported_state)
    isas: tuple[str, ...] = ()
    isa: str | None = None
    isa_problem: str | None = None
    methods: tuple[str, ...] = ()
    physical_cores: int = field(default_factory=lambda: machine.physical_cores())
    cores_with_hyperthreads: int = field(default_factory=lambda: machine.cores_with_hyperthreads())
    logical_cpus: int = field(default_factory=lambda: len(machine.affinity()))
    machine_cpus: int = field(default_factory=lambda: os.cpu_count() or len(machine.affinity()))
    cpu_quota: float | None = field(default_factory=lambda: machine.cpu_quota())
    numa_nodes: tuple[int, ...] = field(default_factory=lambda: machine.numa_nodes())
    machine_numa_nodes: tuple[int, ...] = field(default_factory=lambda: machine.machine_nodes())
    pools: int = field(default_factory=lambda: machine.pool_count())
    memory_total: int = field(default_factory=lambda: machine.memory_total())
    memory_available: int = field(default_factory=lambda: machine.memory_available())
    memory_limit: int | None = field(default_factory=lambda: machine.memory_limit())
    memory_nodes: tuple[int, ...] = field(default_factory=lambda: machine.memory_nodes())
    memory_policy: str | None = None
    memory_refusal: str | None = None
    disk: Disk
    versions: dict[str, str | None] = field(default_factory=versions)

    @property
    def kt_flags(self) -> dict[str, int]:
        """The flags for the server: physical cores, never hyperthreads; one pool per NUMA node, with a thread each."""
        return {"--kt-cpuinfer": self.physical_cores, "--kt-threadpool-count": self.pools}


def of_extension() -> dict[str, Any]:
    """The facts that only our C extension tells: what kernels may use and will use, methods, placement of memory."""
    try:
        from ktconvert.native_quant import kernels, placement
        from ktconvert.native_quant.runtime.methods import METHODS

        refusal = placement.refusal()
    except ImportError as error:
        lacking = f"ktconvert's C extension cannot be loaded ({error}): run `make setup` or reinstall ktconvert."
        return {"isa_problem": lacking}
    policy = None if refusal else placement.policy().mode
    facts: dict[str, Any] = {"isas": kernels.available_isas(), "methods": tuple(METHODS)}
    facts |= {"memory_policy": policy, "memory_refusal": refusal}
    try:
        return {**facts, "isa": kernels.isa()}
    except ValueError as error:  # KTCONVERT_ISA names one that is not there
        return {**facts, "isa_problem": f"{error}."}


def measure_disk(folder: Path) -> Disk:
    """Write at most 256 MiB (or 5 s) to a nameless file in `folder`, fsync it, and give the space back."""
    free, limit = machine.disk_free(folder), machine.file_size_limit()
    budget = min(PROBE_BYTES, free // 2, limit or PROBE_BYTES) // BLOCK * BLOCK
    speed, direct, problem = None, False, None if budget else "there is no room for a measurement"
    for want_direct in (True, False) if budget else ():  # not every file system takes O_DIRECT
        try:
            speed, direct, problem = _write_speed(folder, budget, want_direct), want_direct, None
            break
        except OSError as error:
            problem = os.strerror(error.errno or 0)
    return Disk(str(folder.resolve()), free, limit, speed, direct, problem)


def _write_speed(folder: Path, budget: int, direct: bool) -> float:
    name = folder / f".ktconvert-doctor-{os.getpid()}"
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        name.unlink()  # at once, so that nothing stays behind if we are interrupted
        if direct:  # not in open: where it is refused, that leaves the file behind
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK) as block:  # page-aligned, as O_DIRECT requires
            block[:] = os.urandom(BLOCK)  # random: file systems that compress gain nothing
            begin, done = time.perf_counter(), 0
            while done < budget and time.perf_counter() - begin < PROBE_SECONDS:
                done += os.write(fd, block)
            os.fsync(fd)
            return done / (time.perf_counter() - begin)
    finally:
        os.close(fd)


def warnings(f: Facts) -> Iterator[str]:
    if f.isa_problem is not None:
        yield f.isa_problem
    if "avx2" not in f.features:
        yield "This CPU has no AVX2: conversion works but is slow, and kt-kernel does not run here."
    elif "avx512f" not in f.features:
        yield "This CPU has no AVX-512: convert here, but serve elsewhere; kt-kernel's AVX2 build lacks AMXINT4/8."
    if AMX.issubset(f.features) and f.isas and "amx" not in f.isas:
        yield "The CPU has AMX, but the kernel does not permit it (Linux before 5.16, or a sandbox forbids it)."
    if f.cores_with_hyperthreads:
        yield (
            f"{f.cores_with_hyperthreads} cores show two hyperthreads or more: give kt-kernel physical cores"
            f" ({f.physical_cores}), not {f.logical_cpus} threads."
        )
    if f.logical_cpus < f.machine_cpus:
        yield f"This process may use {f.logical_cpus} of the machine's {f.machine_cpus} CPUs (affinity or cpuset)."
    if f.cpu_quota is not None and f.cpu_quota < f.logical_cpus:
        yield f"The cgroup limits this process to {f.cpu_quota:.4g} CPUs' worth of time, on {f.logical_cpus} CPUs."
    if len(f.numa_nodes) < len(f.machine_numa_nodes):
        yield f"This process may use the CPUs of {len(f.numa_nodes)} of {len(f.machine_numa_nodes)} NUMA nodes."
    if f.memory_limit is not None and f.memory_limit < f.memory_total:
        yield f"The cgroup limits memory to {size(f.memory_limit)} of the machine's {size(f.memory_total)}."
    if len(f.memory_nodes) > 1 and f.memory_refusal is not None:
        yield f.memory_refusal
    if len(f.memory_nodes) > 1 and f.memory_policy not in (None, "default"):
        yield (
            f"This process has a memory policy ({f.memory_policy}; numactl or a launcher set it), which decides on "
            "which NUMA nodes weights lie: without one each part lies on the node of its threads."
        )
    if f.disk.free < ROOMY:
        yield (
            f"{f.disk.path} has {f.disk.free / 1e9:.0f} GB free: less than 100 GB holds no large model."
            " `ktconvert cpu --dry-run` says what yours needs."
        )
    if f.disk.file_size_limit is not None:
        yield f"Files may not grow past {size(f.disk.file_size_limit)} (ulimit -f): shards must be smaller."
    if f.disk.problem is not None:
        yield f"The write speed of {f.disk.path} is not known: {f.disk.problem}."


def rows(facts: Facts) -> list[tuple[str, str]]:
    disk = facts.disk
    saved = [name for name, bits in XCR0 if facts.xcr0 is not None and facts.xcr0 & bits == bits]
    amx = "permitted" if "amx" in facts.isas else "not permitted" if AMX.issubset(facts.features) else "not in this CPU"
    quota = f", time for {facts.cpu_quota:.4g}" if facts.cpu_quota is not None else ""
    how = "O_DIRECT" if disk.direct else "through the page cache"
    speed = f"{disk.write_speed / 1e9:.2f} GB/s written ({how}, fsync)" if disk.write_speed else "write speed not known"
    return [
        ("CPU", facts.cpu),
        ("cores", f"{facts.physical_cores} physical, {facts.logical_cpus} logical{quota}"),
        ("NUMA nodes", f"{len(facts.numa_nodes)} ({', '.join(map(str, facts.numa_nodes))})"),
        ("instruction sets", f"{', '.join(facts.isas) or 'none'}; in use: {facts.isa or 'none'}"),
        ("methods", ", ".join(facts.methods) or "none"),
        ("CPUID", " ".join(facts.features) or "nothing we use"),
        ("XCR0", ", ".join(saved) or ("nothing we use" if facts.xcr0 is not None else "the kernel does not tell")),
        ("AMX", amx),
        ("memory", f"{size(facts.memory_total)}, {size(facts.memory_available)} available"),
        ("cgroup limit", size(facts.memory_limit) if facts.memory_limit is not None else "none"),
        ("disk", f"{size(disk.free)} free, {speed}: {disk.path}"),
        *((name, number or "not installed here") for name, number in facts.versions.items()),
    ]


@command("doctor", DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Show what this machine has, what is in the way, and the kt-kernel flags that fit it.

    Examples:
      ktconvert doctor
      ktconvert doctor --disk /models --json
    """
    facts = Facts(disk=measure_disk(options.disk), **of_extension())
    sentences = list(warnings(facts))
    if options.as_json:
        click.echo(json.dumps({**asdict(facts), "kt_flags": facts.kt_flags, "warnings": sentences}))
        return
    click.echo("\n".join(aligned(rows(facts))))
    flags = " ".join(f"{flag} {value}" for flag, value in facts.kt_flags.items())
    pools = facts.kt_flags["--kt-threadpool-count"]
    click.echo(f"\nServe with    {flags}\nConvert with  ktconvert cpu --threadpool-count {pools} ...")
    for sentence in sentences:
        click.echo(f"\nwarning: {sentence}")
