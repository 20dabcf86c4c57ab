"""The same program with kt_kernel 0.7.2 and with ktconvert.native_quant: the same bits in exact mode, deferred experts
included.

The program is tests/rig/layers.py; only the module that it imports KTMoEWrapper from is another. Where the peer is
found: test_peer.py.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
EXPERTS, HIDDEN = 8, 256
SIZES: dict[str, Any] = {"experts": EXPERTS, "intermediate": 256}
# Both layers of the bundled model: tokens, experts per token, what the first defers, whether some experts are on a GPU.
RUNS = [(1, 2, 0, False), (40, 2, 0, False), (24, 4, 2, True), (3, 2, 1, False), (4, 2, 2, False)]


def program(python: str, module: str, job: dict[str, Any], scratch: Path) -> dict[str, torch.Tensor]:
    """What the program's layers gave."""
    result, path = str(scratch / f"{module}.safetensors"), scratch / f"{module}.json"
    path.write_text(json.dumps(job | {"result": result}))
    command = [python, "-P", str(ROOT / "tests" / "rig" / "layers.py"), module, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return load_file(result)


def inputs(path: Path, tokens: int, topk: int, mask: bool, **more: torch.Tensor) -> str:
    g = torch.Generator().manual_seed(100 * tokens + topk)
    tensors = {
        "hidden": torch.randn(tokens, HIDDEN, generator=g).to(torch.bfloat16),
        "ids": torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :topk].contiguous(),
        "weights": torch.rand(tokens, topk, generator=g),
    }
    if mask:
        more["mask"] = torch.arange(EXPERTS) % 3 == 1
    save_file(tensors | more, path)
    return str(path)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_the_same_program_gives_the_same_bits(tmp_path, peer_python, cli, example, method, parts):
    out = tmp_path / "out"
    cli("cpu", "-i", example, "-o", out, "--quant-method", method, "--threadpool-count", parts, "-q")
    runs = {
        f"{tokens}": {
            "inputs": inputs(tmp_path / f"{tokens}.safetensors", tokens, topk, mask),
            "deferred": [deferred, 0],
        }
        for tokens, topk, deferred, mask in RUNS
    }
    job = SIZES | {"numa": parts, "folder": str(out), "save": False, "method": f"AMX{method.upper()}", "runs": runs}
    theirs = program(peer_python, "kt_kernel", job, tmp_path)
    ours = program(sys.executable, "ktconvert.native_quant", job, tmp_path)
    assert ours.keys() == theirs.keys() and len(ours) == len(RUNS) * 2 * 2
    different = {name: int((ours[name].view(torch.int16) != theirs[name].view(torch.int16)).sum()) for name in ours}
    assert not any(different.values()), different
    assert all(bool(tensor.any()) for name, tensor in ours.items() if not name.startswith("4.") or name.endswith(".1"))


@pytest.mark.parametrize("method", ["int4", "int8"])
def test_weights_from_tensors_give_the_same_bits_and_files(tmp_path, peer_python, method):
    g = torch.Generator().manual_seed(3)
    shapes = {"gate": (EXPERTS, 256, 256), "up": (EXPERTS, 256, 256), "down": (EXPERTS, 256, 256)}
    weights = {f"0.{name}": (torch.randn(shape, generator=g) / 16).to(torch.bfloat16) for name, shape in shapes.items()}
    folders = {module: tmp_path / module for module in ("kt_kernel", "ktconvert.native_quant")}
    results = {}
    for module, folder in folders.items():
        folder.mkdir()
        runs = {"5": {"inputs": inputs(tmp_path / "5.safetensors", 5, 2, False, **weights), "deferred": [0]}}
        job = SIZES | {"numa": 2, "folder": str(folder), "save": True, "method": f"AMX{method.upper()}", "runs": runs}
        results[module] = program(peer_python if module == "kt_kernel" else sys.executable, module, job, tmp_path)
    theirs, ours = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*.kt")} for f in folders.values())
    assert ours == theirs and len(ours) == EXPERTS * 3 * 2 * 2
    left, right = (result["5.0.0"].view(torch.int16) for result in results.values())
    assert torch.equal(left, right)


@pytest.mark.long
def test_the_benchmark_compares_what_kt_kernel_has(tmp_path, peer_python):
    """With AVX2 alone kt-kernel has no AMXINT4, and BF16."""
    words = "--quick --isa avx2 --shapes small --methods int4 bf16 --tokens 1 --threads 1 --layers 1 --loads 0"
    figures = tmp_path / "figures.json"
    script = ROOT / "benchmarks" / "forward.py"
    done = subprocess.run(
        [sys.executable, script, *words.split(), "--peer", peer_python, "--dir", tmp_path, "--json", figures],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"^kt-kernel has no .*int4.* on this CPU$", done.stdout, re.MULTILINE)
    cells = {cell["method"]: cell for cell in json.loads(figures.read_text())["cells"]}
    assert set(cells["int4"]["figures"]) == {"ours"}
    assert set(cells["bf16"]["figures"]) == {"ours", "kt"} and cells["bf16"]["distance"] < 0.02
