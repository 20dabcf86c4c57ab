"""The wheel that `make wheel` left in dist/: its code is what is tested otherwise, it installs and converts where there is
no compiler, with every Python that is here, and on an x86-64 CPU without any extension, which QEMU plays.

make release-check runs this, with KTCONVERT_WHEEL=required, so that what is missing fails instead of being skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import cpython_tags
from packaging.utils import parse_wheel_filename

from ktconvert.pipeline import __version__

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "qwen3-moe-small"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Of a CPU without SSE4.2: newer wheels of NumPy need more.
OLD_NUMPY = "numpy<2.4"
KERNEL_TESTS = ("test_golden", "test_outputs_golden", "test_kernels", "test_decoding", "test_gemm")
KERNEL_TESTS += ("test_gemm_bf16", "test_elementwise", "test_groups", "test_scale_search", "test_instructions")

PROGRAM = """
import ktconvert
reveal_type(ktconvert.convert("cpu", quiet=True))
reveal_type(ktconvert.KTMoEWrapper)
ktconvert.plan(3)
"""
FORWARD = """
import sys
import numpy as np
from ktconvert.native_quant import KTExperts, kernels
experts = KTExperts.load(sys.argv[1], layer=0)
hidden = np.full((3, experts.hidden), 0x3F80, np.uint16)
ids, weights = np.zeros((3, 2), np.int64) + [0, 1], np.full((3, 2), 0.5, np.float32)
print(kernels.isa(), experts.forward(hidden, ids, weights).tobytes().hex())
"""


def skip_or_fail(what: str) -> None:
    """Skip the test, or fail if nothing may be missing."""
    if os.environ.get("KTCONVERT_WHEEL") == "required":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = sorted((ROOT / "dist").glob(f"ktconvert-{__version__}-*.whl"))
    if len(found) != 1:
        skip_or_fail("there is no wheel of this version in dist/: run `make wheel`")
    return found[0]


def run(command: list[str | Path], **more: Any) -> str:
    """Run a command and return its output; a failure shows everything that it printed."""
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Callable[..., Path]:
    """Return a function that makes a virtual environment with the wheel, by Python, extra and further packages."""
    made: dict[tuple[str, ...], Path] = {}

    def make(python: str, extra: str = "", *more: str) -> Path:
        key = (python, extra, *more)
        if key not in made:
            folder = tmp_path_factory.mktemp("venv") / "venv"
            run([python, "-m", "venv", folder])
            run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *more, f"{wheel}{extra}"])
            made[key] = folder
        return made[key]

    return make


def isolated_environment(venv: Path) -> dict[str, str]:
    """Return variables for only this environment: no compiler, no headers, no other Python."""
    return {"PATH": str(venv / "bin"), "HOME": str(venv.parent)}


def interpreter(version: str) -> str:
    """Return a Python of this version, or skip the test."""
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode:
        skip_or_fail(f"there is no Python {version} with venv here")
    assert found is not None
    return found


def test_one_wheel_for_every_cpython_with_the_gil(wheel: Path) -> None:
    """Free-threaded ones have to build, and are told why they cannot (test_portable.py)."""
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert (name, str(version)) == ("ktconvert", __version__)
    platforms = [f"manylinux_2_28_{os.uname().machine}"]
    for minor in range(11, 16):
        assert tags & set(cpython_tags((3, minor), platforms=platforms)), minor
        assert not tags & set(cpython_tags((3, minor), abis=[f"cp3{minor}t"], platforms=platforms)), minor
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "ktconvert/__init__.py",
        "ktconvert/__init__.pyi",
        "ktconvert/py.typed",
        "ktconvert/native_quant/_ktq.abi3.so",
    } <= names
    assert "ktconvert/native_quant/scripts/convert_cpu_weights.py" in names  # for `kt quant`
    assert not {n.partition("/")[0] for n in names} - {"ktconvert", f"ktconvert-{__version__}.dist-info"}


def test_the_kernels_of_the_wheel_give_golden_bytes(wheel: Path, tmp_path: Path) -> None:
    """Golden vectors, every kernel of each instruction set that this CPU has, and no instruction elsewhere."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    extension = tmp_path / "ktconvert" / "native_quant" / "_ktq.abi3.so"
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "KTCONVERT_EXTENSION": str(extension)}
    imported = run([sys.executable, "-c", "from ktconvert.native_quant import _ktq; print(_ktq.__file__)"], env=env)
    assert imported.strip() == str(extension)
    tests = [f"tests/{name}.py" for name in KERNEL_TESTS]
    printed = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=ROOT, env=env)
    assert " passed" in printed


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_converts_without_a_compiler(version: str, environment: Any, wheel: Path, tmp_path: Path) -> None:
    venv = environment(interpreter(version))
    assert shutil.which("cc", path=isolated_environment(venv)["PATH"]) is None
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel]
    run(pip, env=isolated_environment(venv))
    found = json.loads(run(["ktconvert", "version", "--json"], env=isolated_environment(venv)))
    assert found["ktconvert"] == __version__ and found["python"].startswith(version)
    assert found["build"]["wheel"].startswith("cp311-abi3-manylinux_2_28_")
    out = tmp_path / "int8"
    run(["ktconvert", "cpu", "-i", EXAMPLE, "-o", out, "--quant-method", "int8"], env=isolated_environment(venv))
    assert run(["ktconvert", "verify", out, "--against", EXAMPLE], env=isolated_environment(venv)).endswith(
        "verified\n"
    )
    packages = json.loads(run([venv / "bin" / "python", "-m", "pip", "list", "--format=json"]))
    assert not {package["name"] for package in packages} & {"torch", "transformers", "gguf", "requests"}


def test_the_extra_run_generates_text(environment: Any, tmp_path: Path) -> None:
    torch = next(x for x in (ROOT / ".ci" / "constraints.txt").read_text().split() if x.startswith("torch=="))
    venv = environment(interpreter("3.11"), "[run]", torch)
    out = tmp_path / "int8"
    run(["ktconvert", "cpu", "-i", EXAMPLE, "-o", out, "--quant-method", "int8"], env=isolated_environment(venv))
    command = ["ktconvert", "run", EXAMPLE, "--cpu-weights", out, "--prompt", "def ", "--max-new-tokens", "8"]
    assert run(command, env=isolated_environment(venv)).startswith("def ")


def test_the_installed_package_has_types(environment: Any, tmp_path: Path) -> None:
    venv = environment(interpreter("3.11"))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--python-executable", venv / "bin" / "python", "--cache-dir", tmp_path / "cache"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, program], capture_output=True, text=True, cwd=tmp_path
    )
    assert 'Revealed type is "list[pathlib.Path]"' in result.stdout, result.stdout + result.stderr
    assert 'Revealed type is "def (layer_idx: int, ' in result.stdout, result.stdout
    assert 'Argument 1 to "plan" has incompatible type "int"; expected "str"' in result.stdout


def test_the_wheel_runs_on_a_plain_x86_64_cpu(environment: Any, tmp_path: Path) -> None:
    """QEMU's oldest: SSE3 and no more. Its bytes are those of this CPU."""
    qemu = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if sysconfig.get_platform() != "linux-x86_64" or qemu is None:
        skip_or_fail("there is no qemu-x86_64 here: install it (Debian: apt install qemu-user)")
    venv = environment(interpreter("3.11"), "", OLD_NUMPY)
    python = (venv / "bin" / "python").resolve()
    site = next((venv / "lib").glob("python*/site-packages"))
    emulated = [qemu, "-cpu", "qemu64", python]
    env = {**isolated_environment(venv), "PYTHONPATH": str(site)}
    outputs, results = [], []
    for here in ([venv / "bin" / "python"], emulated):
        out = tmp_path / f"out{len(outputs)}"
        convert = ["cpu", "-i", EXAMPLE, "-o", out, "--quant-method", "int4", "--threadpool-count", "1"]
        run([*here, "-m", "ktconvert.pipeline.cli", *convert, "--cpuinfer-threads", "1"], env=env)
        outputs.append({p.name: p.read_bytes() for p in sorted(out.glob("*.safetensors"))})
        results.append(run([*here, "-c", FORWARD, out], env=env).split())
    facts = json.loads(run([*emulated, "-m", "ktconvert.pipeline.cli", "doctor", "--json"], env=env))
    assert facts["isas"] == ["scalar"] and results[1][0] == "scalar"
    assert outputs[0] == outputs[1] and outputs[0]
    assert results[0][1] == results[1][1]
