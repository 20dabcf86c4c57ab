"""`ktconvert doctor`: properties of this machine for converting and serving, and the kt-kernel flags that follow."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from ktconvert.native_quant import machine
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.cli.config_file import find_config_file
from ktconvert.pipeline.options.queries import DoctorOptions
from ktconvert.pipeline.report.text import format_table, size
from ktconvert.pipeline.report.versions import package_version

PACKAGES = ("ktconvert", "numpy", "safetensors", "torch", "kt-kernel")
# Features by which ktconvert and kt-kernel choose their code, with the names of /proc/cpuinfo
FEATURES = (
    *("avx2", "f16c", "avx_vnni", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512vbmi"),
    *("avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
)
# The runtime uses AMX only with all of them.
AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
# Bits of XCR0 (Intel SDM volume 1, 13.3): register state that the kernel saves, so that programs may use it
XCR0 = (("AVX", 0x06), ("AVX-512", 0xE6), ("AMX", 0x60000))
SYS_ARCH_PRCTL, ARCH_GET_XCOMP_SUPP = 158, 0x1021

PROBE_BYTES, PROBE_SECONDS, BLOCK = 256 << 20, 5.0, 4 << 20
LOW_DISK = 100 << 30  # bytes: too little for a large model's experts


@dataclass(frozen=True)
class Disk:
    """The disk of one directory; speed in bytes per second, None with the problem that prevented measuring it."""

    path: str
    free: int
    file_size_limit: int | None
    write_speed: float | None
    direct: bool
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Properties of this machine that only ktconvert's C extension knows.

    methods         kt-kernel's names of the methods that the runtime computes; () if the extension cannot be loaded
    memory_policy   a row of placement.MODES; None if it is unknown
    memory_refusal  a sentence if this process cannot place memory on nodes
    """

    isas: tuple[str, ...] = ()
    isa: str | None = None
    isa_problem: str | None = None
    methods: tuple[str, ...] = ()
    memory_policy: str | None = None
    memory_refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class MachineReport(Extension):
    """This machine. Sizes are in bytes; CPU counts are those available to this process."""

    cpu: str
    features: tuple[str, ...]
    xcr0: int | None
    physical_cores: int
    cores_with_hyperthreads: int
    logical_cpus: int
    machine_cpus: int
    cpu_quota: float | None
    numa_nodes: tuple[int, ...]
    machine_numa_nodes: tuple[int, ...]
    pools: int
    memory_total: int
    memory_available: int
    memory_limit: int | None
    memory_nodes: tuple[int, ...]
    disk: Disk
    versions: dict[str, str | None]
    config_file: str | None

    @property
    def kt_flags(self) -> dict[str, int]:
        """The flags for the server: physical cores, never hyperthreads; one pool per NUMA node, with a thread each."""
        return {"--kt-cpuinfer": self.physical_cores, "--kt-threadpool-count": self.pools}


def describe_machine(disk: Path) -> MachineReport:
    """Return the properties of this machine, and measure the disk of a directory."""
    flags = machine.cpu_flags()
    logical_cpus = len(machine.affinity())
    return MachineReport(
        cpu=machine.cpu_name(),
        features=tuple(name for name in FEATURES if name in flags),
        xcr0=read_xcr0(),
        physical_cores=machine.physical_cores(),
        cores_with_hyperthreads=machine.cores_with_hyperthreads(),
        logical_cpus=logical_cpus,
        machine_cpus=os.cpu_count() or logical_cpus,
        cpu_quota=machine.cpu_quota(),
        numa_nodes=machine.numa_nodes(),
        machine_numa_nodes=machine.machine_nodes(),
        pools=machine.pool_count(),
        memory_total=machine.memory_total(),
        memory_available=machine.memory_available(),
        memory_limit=machine.memory_limit(),
        memory_nodes=machine.memory_nodes(),
        disk=measure_disk(disk),
        versions=package_versions(),
        config_file=None if (path := find_config_file()) is None else str(path),
        **vars(describe_extension()),
    )


def describe_extension() -> Extension:
    """Return the properties that only our C extension can determine: instruction sets, methods, placement of memory."""
    try:
        from ktconvert.native_quant import kernels, placement
        from ktconvert.native_quant.runtime.methods import METHODS

        refusal = placement.explain_denial()
    except ImportError as error:
        problem = f"ktconvert's C extension cannot be loaded ({error}): run `make setup` or reinstall ktconvert."
        return Extension(isa_problem=problem)
    isa: str | None = None
    isa_problem: str | None = None
    try:
        isa = kernels.isa()
    except ValueError as error:  # KTCONVERT_ISA names a missing one
        isa_problem = f"{error}."
    return Extension(
        isas=kernels.available_isas(),
        isa=isa,
        isa_problem=isa_problem,
        methods=tuple(METHODS),
        memory_policy=None if refusal else placement.read_policy().mode,
        memory_refusal=refusal,
    )


def package_versions() -> dict[str, str | None]:
    """Return the installed versions of PACKAGES, None for a missing one; import nothing."""
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {**system, **{package: package_version(package) for package in PACKAGES}}


def read_xcr0() -> int | None:
    """Return XCR0 as the kernel reports it; None if it does not (Linux before 5.16, other machines)."""
    if os.uname().machine != "x86_64":
        return None
    mask = ctypes.c_uint64()
    status = ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_GET_XCOMP_SUPP, ctypes.byref(mask))
    return mask.value if status == 0 else None


def measure_disk(folder: Path) -> Disk:
    """Measure the disk of a folder with an unlinked file: write at most 256 MiB (or 5 s), fsync, free the space."""
    free = machine.disk_free(folder)
    limit = machine.file_size_limit()
    path = str(folder.resolve())
    budget = min(PROBE_BYTES, free // 2, limit or PROBE_BYTES) // BLOCK * BLOCK
    if not budget:
        return Disk(path, free, limit, None, False, "not enough space for a measurement")
    problem: str | None = None
    for direct in (True, False):  # not every file system supports O_DIRECT
        try:
            speed = _measure_write_speed(folder, budget, direct)
            return Disk(path, free, limit, speed, direct, None)
        except OSError as error:
            problem = os.strerror(error.errno or 0)
    return Disk(path, free, limit, None, False, problem)


def _measure_write_speed(folder: Path, budget: int, direct: bool) -> float:
    """Return the speed in bytes per second at which a file of at most `budget` bytes is written."""
    name = folder / f".ktconvert-doctor-{os.getpid()}"
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        name.unlink()  # at once, so that an interrupt leaves no file
        if direct:  # not in open(), which may fail and leave the file
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK) as block:  # page-aligned, as O_DIRECT requires
            block[:] = os.urandom(BLOCK)  # random, so that compressing file systems gain nothing
            start_time = time.perf_counter()
            written = 0
            while written < budget and time.perf_counter() - start_time < PROBE_SECONDS:
                written += os.write(fd, block)
            os.fsync(fd)
            return written / (time.perf_counter() - start_time)
    finally:
        os.close(fd)


def find_problems(report: MachineReport) -> Iterator[str]:
    """Yield a sentence for each problem of a machine."""
    if report.isa_problem is not None:
        yield report.isa_problem
    if "avx2" not in report.features:
        yield "This CPU has no AVX2: conversion works but is slow, and kt-kernel does not run here."
    elif "avx512f" not in report.features:
        yield "This CPU has no AVX-512, which kt-kernel needs for AMXINT4 and AMXINT8; `ktconvert serve` does not."
    if AMX.issubset(report.features) and report.isas and "amx" not in report.isas:
        yield "The CPU has AMX, but the kernel does not permit it (Linux before 5.16, or a sandbox forbids it)."
    if report.cores_with_hyperthreads:
        yield (
            f"{report.cores_with_hyperthreads} cores show two hyperthreads or more: give kt-kernel physical cores"
            f" ({report.physical_cores}), not {report.logical_cpus} threads."
        )
    if report.logical_cpus < report.machine_cpus:
        yield (
            f"This process may use {report.logical_cpus} of the machine's {report.machine_cpus} CPUs (affinity or "
            "cpuset)."
        )
    if report.cpu_quota is not None and report.cpu_quota < report.logical_cpus:
        yield (
            f"The cgroup limits this process to {report.cpu_quota:.4g} CPUs' worth of time, "
            f"on {report.logical_cpus} CPUs."
        )
    if len(report.numa_nodes) < len(report.machine_numa_nodes):
        nodes = len(report.machine_numa_nodes)
        yield f"This process may use the CPUs of {len(report.numa_nodes)} of {nodes} NUMA nodes."
    if report.memory_limit is not None and report.memory_limit < report.memory_total:
        yield f"The cgroup limits memory to {size(report.memory_limit)} of the machine's {size(report.memory_total)}."
    if len(report.memory_nodes) > 1 and report.memory_refusal is not None:
        yield report.memory_refusal
    if len(report.memory_nodes) > 1 and report.memory_policy not in (None, "default"):
        yield (
            f"This process has a memory policy ({report.memory_policy}; numactl or a launcher set it), which decides "
            "the NUMA nodes of weights: without it, each slice is on the node of its threads."
        )
    if report.disk.free < LOW_DISK:
        yield (
            f"{report.disk.path} has {size(report.disk.free)} free: a large model needs more than 100 GiB."
            " `ktconvert cpu --dry-run` prints what yours needs."
        )
    if report.disk.file_size_limit is not None:
        yield f"Files are limited to {size(report.disk.file_size_limit)} (ulimit -f): shards must be smaller."
    if report.disk.problem is not None:
        yield f"The write speed of {report.disk.path} is unknown: {report.disk.problem}."


def machine_rows(report: MachineReport) -> list[tuple[str, str]]:
    """Return the rows of the table that describes a machine."""
    disk = report.disk
    saved_states = [name for name, bits in XCR0 if report.xcr0 is not None and report.xcr0 & bits == bits]
    amx = (
        "permitted" if "amx" in report.isas else "not permitted" if AMX.issubset(report.features) else "not in this CPU"
    )
    quota = f", time for {report.cpu_quota:.4g}" if report.cpu_quota is not None else ""
    method = "O_DIRECT" if disk.direct else "through the page cache"
    speed = (
        f"{disk.write_speed / 1e9:.2f} GB/s written ({method}, fsync)" if disk.write_speed else "write speed unknown"
    )
    return [
        ("CPU", report.cpu),
        ("cores", f"{report.physical_cores} physical, {report.logical_cpus} logical{quota}"),
        ("NUMA nodes", f"{len(report.numa_nodes)} ({', '.join(map(str, report.numa_nodes))})"),
        ("instruction sets", f"{', '.join(report.isas) or 'none'}; in use: {report.isa or 'none'}"),
        ("methods", ", ".join(report.methods) or "none"),
        ("CPUID", " ".join(report.features) or "none that ktconvert uses"),
        (
            "XCR0",
            ", ".join(saved_states)
            or ("none that ktconvert uses" if report.xcr0 is not None else "not reported by the kernel"),
        ),
        ("AMX", amx),
        ("memory", f"{size(report.memory_total)}, {size(report.memory_available)} available"),
        ("cgroup limit", size(report.memory_limit) if report.memory_limit is not None else "none"),
        ("disk", f"{size(disk.free)} free, {speed}: {disk.path}"),
        ("config file", report.config_file or "none"),
        *((name, number or "not installed here") for name, number in report.versions.items()),
    ]


@command("doctor", DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Describe this machine, report problems, and print the kt-kernel flags that fit it.

    Examples:
      ktconvert doctor
      ktconvert doctor --disk /models --json
    """
    report = describe_machine(options.disk)
    sentences = list(find_problems(report))
    if options.as_json:
        click.echo(json.dumps({**asdict(report), "kt_flags": report.kt_flags, "warnings": sentences}))
        return
    click.echo("\n".join(format_table(machine_rows(report))))
    flags = " ".join(f"{flag} {value}" for flag, value in report.kt_flags.items())
    pools = report.kt_flags["--kt-threadpool-count"]
    click.echo(f"\nServe with    {flags}\nConvert with  ktconvert cpu --numa {pools} ...")
    for sentence in sentences:
        click.echo(f"\nwarning: {sentence}")
