"""Tests of `ktconvert doctor`: facts of this machine, recommended flags, and one sentence for each problem."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktconvert.native_quant import kernels, machine
from ktconvert.pipeline.cli.doctor import Disk, MachineReport, find_problems, machine_rows, measure_disk
from rig.conversion import run_in_process

GIB = 1 << 30

FEATURES = ("avx2", "avx512f", "amx_tile", "amx_int8", "amx_bf16")
CPU = {"cpu": "Intel(R) Xeon(R) Platinum 8488C", "xcr0": 0x602E7, "physical_cores": 96, "cores_with_hyperthreads": 0}
CPU |= {"logical_cpus": 96, "machine_cpus": 96, "cpu_quota": None, "features": FEATURES}
KERNELS = {"isas": ("scalar", "avx2", "avx512", "amx"), "isa": "amx", "methods": ("AMXINT4", "BF16")}
MEMORY = {"memory_total": 1024 * GIB, "memory_available": 1000 * GIB, "memory_limit": None, "memory_nodes": (0, 1)}
MEMORY |= {"memory_policy": "default", "memory_refusal": None}
NODES = {"numa_nodes": (0, 1), "machine_numa_nodes": (0, 1), "pools": 2}
REST = {"disk": Disk("/data", 4000 * GIB, None, 2e9, True, None), "versions": {"python": "3.11.7", "torch": None}}
REST |= {"config_file": None}
SERVER = MachineReport(**CPU, **KERNELS, **NODES, **MEMORY, **REST)  # type: ignore[arg-type]

PROBLEMS = {
    "no extension": ({"isa_problem": "broken.", "isas": (), "isa": None}, ["broken."]),
    "no AVX2": ({"features": (), "isas": ("scalar",), "isa": "scalar"}, ["no AVX2"]),
    "no AVX-512": ({"features": ("avx2",), "isas": ("scalar", "avx2"), "isa": "avx2"}, ["`ktconvert serve` does not"]),
    "AMX forbidden": ({"isas": ("scalar", "avx2", "avx512"), "isa": "avx512"}, ["has AMX, but the kernel"]),
    "hyperthreads": ({"cores_with_hyperthreads": 48, "physical_cores": 48}, ["physical cores (48), not 96"]),
    "cpuset": ({"logical_cpus": 8, "physical_cores": 8}, ["8 of the machine's 96 CPUs"]),
    "quota": ({"cpu_quota": 3.5, "physical_cores": 4}, ["3.5 CPUs' worth of time, on 96 CPUs"]),
    "one node of two": ({"numa_nodes": (1,)}, ["1 of 2 NUMA nodes"]),
    "memory limit": ({"memory_limit": 64 * GIB}, ["64.0 GiB of the machine's 1.0 TiB"]),
    "mbind denied": ({"memory_policy": None, "memory_refusal": "It may not choose."}, ["It may not choose."]),
    "numactl --membind": ({"memory_policy": "bind"}, ["has a memory policy (bind; "]),
    "small disk": ({"disk": replace(SERVER.disk, free=99 * 10**9)}, ["/data has 92.2 GiB free"]),
    "ulimit -f": ({"disk": replace(SERVER.disk, file_size_limit=GIB)}, ["1.0 GiB (ulimit -f)"]),
    "read-only": ({"disk": replace(SERVER.disk, write_speed=None, problem="EROFS")}, ["/data is unknown: EROFS."]),
}


def test_good_server_has_no_warnings() -> None:
    assert list(find_problems(SERVER)) == []
    assert SERVER.kt_flags == {"--kt-cpuinfer": 96, "--kt-threadpool-count": 2}
    assert dict(machine_rows(SERVER))["AMX"] == "permitted"
    assert dict(machine_rows(SERVER))["XCR0"] == "AVX, AVX-512, AMX"
    assert dict(machine_rows(SERVER))["torch"] == "not installed here"


@pytest.mark.parametrize("problem", PROBLEMS)
def test_each_problem_gives_a_sentence(problem: str) -> None:
    change, expected = PROBLEMS[problem]
    facts = replace(SERVER, **change)
    for sentence, words in zip(find_problems(facts), expected, strict=True):
        assert words in sentence and sentence.endswith(".")


def test_json_describes_this_machine(tmp_path: Path, cli: Any) -> None:
    """A wrong setting is reported as a warning."""
    report = cli("doctor", "--disk", tmp_path).stdout
    assert f"--kt-cpuinfer {machine.physical_cores()} --kt-threadpool-count " in report and machine.cpu_name() in report
    result = cli("doctor", "--json", "--disk", tmp_path, env={"KTCONVERT_ISA": "mmx"})
    facts = json.loads(result.stdout)
    assert result.stderr == "" and any("KTCONVERT_ISA" in warning for warning in facts["warnings"])
    facts = json.loads(cli("doctor", "--json", "--disk", tmp_path).stdout)
    assert facts["isas"] == list(kernels.available_isas()) and facts["isa"] == kernels.isa()
    assert facts["kt_flags"]["--kt-cpuinfer"] == facts["physical_cores"] == machine.physical_cores()
    assert facts["kt_flags"]["--kt-threadpool-count"] == facts["pools"] == machine.pool_count()
    assert facts["disk"]["path"] == str(tmp_path.resolve()) and facts["disk"]["write_speed"] > 0
    assert facts["disk"]["problem"] is None and list(tmp_path.iterdir()) == []
    assert "does not exist" in cli("doctor", "--disk", tmp_path / "absent", code=5).stderr


def test_extension_and_cpuinfo_agree_on_avx() -> None:
    # C asks CPUID and XCR0, and Linux lists the features in /proc/cpuinfo; both must agree.
    flags = machine.cpu_flags()
    if flags:
        assert ("avx2" in kernels.available_isas()) == ({"avx2", "f16c"} <= flags)


@pytest.mark.parametrize("limit", [1 << 20, 9 << 20])
def test_measuring_keeps_the_file_size_limit(tmp_path: Path, limit: int) -> None:
    code = "from pathlib import Path; from ktconvert.pipeline.cli.doctor import *; import sys; package_versions()\n"
    code += "print(measure_disk(Path('.')), 'torch' in sys.modules)"
    limited: Any = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, **limited)
    assert (result.returncode, result.stderr) == (0, "") and result.stdout.endswith(
        "False\n"
    )  # nothing heavy is imported
    assert f"file_size_limit={limit}" in result.stdout
    assert ("not enough space for a measurement" in result.stdout) == (limit < 4 << 20)
    assert list(tmp_path.iterdir()) == []
    disk = measure_disk(tmp_path / "absent")
    assert disk.write_speed is None and disk.problem == "No such file or directory" and disk.free > 0


# (pools, nodes of this process, nodes of the machine) -> note of the plan. test_machine.py tests the counts.
NODES_HERE = {
    (2, 2, 2): "this machine has 2 nodes",
    (1, 1, 2): "this process may use 1 of this machine's 2 nodes",
    (1, 2, 2): "this process has CPU time for 1 thread (cgroup quota)",
}


@pytest.mark.parametrize("counts", NODES_HERE)
def test_doctor_plan_and_inspect_report_the_same_nodes(
    counts: tuple[int, int, int], tmp_path: Path, example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools, nodes, present = counts
    for name, value in (
        ("pool_count", pools),
        ("numa_nodes", tuple(range(nodes))),
        ("machine_nodes", tuple(range(present))),
    ):
        monkeypatch.setattr(machine, name, lambda *_, value=value: value)
    assert json.loads(run_in_process("doctor", "--json", "--disk", tmp_path).stdout)["pools"] == pools
    options = ("--threadpool-count", 4, "--quant-method", "int8", "--dry-run")
    note = run_in_process("cpu", "-i", example, "-o", tmp_path / "out", *options).stderr.splitlines()[0]
    assert NODES_HERE[counts] in note and note.endswith(f"--numa {pools}")
    commands = json.loads(run_in_process("inspect", example, "--json").stdout)["convert"]
    assert all(f"--threadpool-count {pools}" in line for line in commands if "--threadpool-count" in line)
