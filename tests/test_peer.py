"""Comparison with the real kt-kernel 0.7.2, if it is installed.

It writes our bytes, computes with our files as with its own, and one program (tests/rig/layers.py) gives the same bits
with it and with ktconvert.native_quant. KTCONVERT_PEER_PYTHON names the Python of a venv that has kt-kernel; `make
peer` creates one in build/peer.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from ktconvert.layouts.outputs.measuring import measure_output
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.slices import SliceId
from ktconvert.native_quant import kernels
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper
from rig import floats, hf, native, programs
from rig.golden import FOLDER
from rig.native_peer import train
from rig.safetensors import Tensors
from rig.training import distance

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "qwen3-moe-small"
EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 8, 256, 256, 2


def run_peer(python: str, scratch: Path, **run: Any) -> Tensors:
    """Run the peer in its own process: its thread pool is a singleton that keeps the first number of NUMA slices."""
    sizes = {"experts": EXPERTS, "hidden": HIDDEN, "width": INTERMEDIATE, "topk": TOPK}
    return native.run_kt_kernel(python, {"out": sizes | run}, scratch)


def run_peer_forward(
    python: str, scratch: Path, layer: int, numa: int, method: str, folder: Path
) -> npt.NDArray[np.uint16]:
    """Return the peer's output with these files, for the inputs in scratch, as BF16 bits."""
    what = {"layer": layer, "parts": numa, "method": method, "path": str(folder)}
    return run_peer(python, scratch, **what, inputs=str(scratch / "inputs.safetensors"))["out"].bits


def convert(out: Path, method: str, numa: int, *more: str, source: Path = MODEL) -> None:
    """Run our own conversion as a user does."""
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "cpu", "-i", str(source), "-o", str(out)]
    subprocess.run(
        [*command, "--quant-method", method, "--threadpool-count", str(numa), "-q", *more], check=True, timeout=300
    )


def kt_files(folder: Path) -> dict[str, bytes]:
    """Return each .kt file by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.kt"))}


@pytest.mark.parametrize("numa", [1, 2])
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_peer_writes_our_bytes_and_computes_the_same(tmp_path, peer_python, method, numa):
    source, name = load_file(MODEL / "model.safetensors"), f"AMX{method.upper()}"
    theirs, loose, merged = tmp_path / "theirs", tmp_path / "loose", tmp_path / "merged"
    theirs.mkdir()
    stored = {"tensors": str(tmp_path / "weights.safetensors"), "path": str(theirs)}
    for layer in (0, 1):
        experts = f"model.layers.{layer}.mlp.experts"
        stacked = {
            p: torch.stack([source[f"{experts}.{e}.{p}_proj.weight"] for e in range(EXPERTS)]).contiguous()
            for p in ("gate", "up", "down")
        }
        save_file(stacked, stored["tensors"])
        run_peer(peer_python, tmp_path, layer=layer, parts=numa, method=name, **stored)
    convert(loose, method, numa, "--no-merge-safetensor")
    convert(merged, method, numa)
    ours, expected = kt_files(loose), kt_files(theirs)
    assert len(expected) == 2 * EXPERTS * 3 * numa * 2 and ours.keys() == expected.keys()
    assert [name for name in expected if ours[name] != expected[name]] == []

    save_file(draw_inputs(6, 7), tmp_path / "inputs.safetensors")
    for layer in (0, 1):
        outs = [
            run_peer_forward(peer_python, tmp_path, layer, numa, name, folder) for folder in (merged, loose, theirs)
        ]
        assert outs[0].any() and all(np.array_equal(out, outs[2]) for out in outs)


@pytest.mark.parametrize(("numa", "hidden", "width"), [(2, 96, 704), (2, 1856, 128), (1, 544, 320)])
def test_peer_writes_our_backward_matrices(tmp_path, peer_python, numa, hidden, width, write_qwen, random_experts):
    """Compares every BF16 file, for more than a block of 256 rows and of 1792 columns, and partial blocks."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    stacked = random_experts(2, hidden, width)
    source = write_qwen(tmp_path / "in", {0: stacked})
    weights = {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in stacked.items()}
    save_file(weights, tmp_path / "weights.safetensors")
    sizes = {"parts": numa, "experts": 2, "hidden": hidden, "width": width}
    stored = {"tensors": str(tmp_path / "weights.safetensors"), "path": str(theirs), "backward": True}
    run_peer(peer_python, tmp_path, method="AMXBF16_SFT", **sizes, **stored)
    convert(ours, "bf16", numa, "--no-merge-safetensor", "--save-backward-weights", source=source)
    assert len(kt_files(theirs)) == 2 * 3 * numa * 2 and kt_files(ours) == kt_files(theirs)


@pytest.mark.skipif(not {"avx512bf16", "amx"} & {*kernels.available_isas()}, reason="kt-kernel trains with these alone")
@pytest.mark.parametrize("method", ["AMXBF16_SFT", "AMXINT4_SFT"])
def test_peer_training_gives_close_gradients(tmp_path, peer_python, random_experts, method):
    """More than one block of tokens for an expert, and a rank that fills no panel."""
    stacked, generator = random_experts(EXPERTS, HIDDEN, INTERMEDIATE), torch.Generator().manual_seed(1)
    linears = {name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for name, array in stacked.items()}
    save_file(linears, tmp_path / "weights.safetensors")
    shapes = {"a": (EXPERTS, 5, HIDDEN), "b": (EXPERTS, INTERMEDIATE, 5)}
    factors = {f"{name}_{matrix}": shapes[matrix] for name in ("gate", "up") for matrix in "ab"}
    factors |= {"down_a": (EXPERTS, 5, INTERMEDIATE), "down_b": (EXPERTS, HIDDEN, 5)}
    arguments = {name: torch.randn(shape, generator=generator).mul(0.05).bfloat16() for name, shape in factors.items()}
    arguments |= draw_inputs(300, 3) | {"gradient": torch.randn(300, HIDDEN, generator=generator).bfloat16()}
    save_file(arguments, tmp_path / "given.safetensors")
    files = {"tensors": str(tmp_path / "weights.safetensors"), "train": str(tmp_path / "given.safetensors")}
    run_peer(peer_python, tmp_path, method=method, **files)
    theirs = load_file(tmp_path / "result.safetensors")
    run = {"topk": TOPK, "hidden": HIDDEN, "width": INTERMEDIATE, "method": method, **files}
    ours = train(KTMoEWrapper, run, list(linears.values()), torch.arange(EXPERTS))
    for name, gradient in ours.items():
        assert distance(gradient, theirs[name]) < (5.6e-3 if name == "hidden" else 2e-3), name


def bits(hidden: torch.Tensor) -> np.ndarray:
    """Return BF16 bits."""
    return hidden.view(torch.uint16).numpy()


def draw_inputs(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Draw inputs."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)])
    return {"hidden": hidden, "ids": ids, "weights": torch.rand(tokens, TOPK, generator=generator)}


def compute_in_float64(out: Path, inputs: dict[str, torch.Tensor], numa: int = 1) -> np.ndarray:
    """Compute the last layer in float64 from the values that an output stores."""
    opened = open_output(out)
    fmt = measure_output(opened).fmt
    assert fmt is not None

    def linear(expert: int, projection: str) -> np.ndarray:
        shape = (HIDDEN, INTERMEDIATE // numa) if projection == "down" else (INTERMEDIATE // numa, HIDDEN)
        parts = []
        for part in range(numa):
            place, tensors = SliceId(1, expert, projection, False, part), fmt.encoding.tensors(*shape)
            stored = [opened.read(opened.tensors[place, tensor.name]) for tensor in tensors]
            parts.append(fmt.encoding.decode(stored, *shape, slice(None)).astype(np.float64))
        return np.concatenate(parts, axis=1 if projection == "down" else 0)

    return floats.forward(linear, bits(inputs["hidden"]), inputs["ids"].numpy(), inputs["weights"].numpy())


def measure_errors(
    scratch: Path, python: str, numa: int, inputs: dict[str, torch.Tensor], variants: dict[str, tuple[str, ...]]
) -> dict[str, tuple[float, float]]:
    """Return two distances from the source in float64, for the last layer in INT4 with each of these options.

    The first is of the outputs that float64 computes from the stored values, the second of those of the real kt-kernel.
    """
    hidden, ids, weights = (inputs[name] for name in ("hidden", "ids", "weights"))
    save_file(inputs, scratch / "inputs.safetensors")
    source = load_file(MODEL / "model.safetensors")

    def original(expert: int, projection: str) -> np.ndarray:
        return source[f"model.layers.1.mlp.experts.{expert}.{projection}_proj.weight"].double().numpy()

    expected = floats.forward(original, bits(hidden), ids.numpy(), weights.numpy())
    errors = {}
    for scale, more in variants.items():
        out = scratch / scale
        convert(out, "int4", numa, "--scale", scale, *more)
        ours = compute_in_float64(out, inputs, numa)
        theirs = floats.from_bits(run_peer_forward(python, scratch, 1, numa, "AMXINT4", out))
        errors[scale] = tuple(np.linalg.norm(each - expected) / np.linalg.norm(expected) for each in (ours, theirs))
        assert abs(errors[scale][1] - errors[scale][0]) < 0.05 * errors[scale][0], errors
    return errors


@pytest.mark.parametrize(("layer", "method"), [(0, "AMXINT4"), (1, "BF16")])
def test_peer_does_not_load_layers_of_a_mix(tmp_path, peer_python, layer, method):
    """When asked to load a layer of an output with a method per layer, by its very method, it fails."""
    convert(tmp_path / "out", "int4", 1, "--method-map", "1=bf16")
    save_file(draw_inputs(6, 7), tmp_path / "inputs.safetensors")
    with pytest.raises(AssertionError, match="No experts found"):
        run_peer_forward(peer_python, tmp_path, layer, 1, method, tmp_path / "out")
    assert not (tmp_path / "result.safetensors").exists()


@pytest.mark.parametrize("numa", [1, 2])
def test_peer_computes_with_scales_of_least_error(tmp_path, peer_python, numa):
    """kt-kernel loads `--scale mse` and `imatrix`; its error is that of the weights, and smaller than with absmax."""
    variants = {"absmax": (), "mse": (), "imatrix": ("--imatrix", str(FOLDER / "llama_cpp.imatrix.gguf"))}
    errors = measure_errors(tmp_path, peer_python, numa, draw_inputs(48, 9), variants)
    assert errors["mse"][1] < 0.95 * errors["absmax"][1], errors
    assert errors["imatrix"][1] < 0.95 * errors["absmax"][1], errors  # although these inputs are alike in all columns


def record_expert_inputs(text: str) -> dict[str, torch.Tensor]:
    """Return what the last layer's experts read for a text, by transformers: hidden states, ids and weights."""
    import transformers

    model = hf.load_complete(MODEL, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager")
    ids = transformers.AutoTokenizer.from_pretrained(MODEL)(text, return_tensors="pt")["input_ids"]
    hidden, chosen, weights, _ = hf.record_experts(model, ids)[1]
    return {"hidden": hidden.clone(), "ids": chosen.long().clone(), "weights": weights.float().clone()}


@pytest.mark.parametrize("numa", [1, 2])
def test_peer_computes_with_compensated_codes(tmp_path, peer_python, numa):
    """The same for `--scale gptq`, with text outside the calibration data."""
    pytest.importorskip("llmcompressor")
    text = (ROOT / "examples" / "heldout.txt").read_text()
    calibration, rest = tmp_path / "calibration.txt", text[2 * len(text) // 3 :][:600]
    calibration.write_text(text[: 2 * len(text) // 3])
    variants = {"absmax": (), "mse": (), "gptq": ("--dataset", str(calibration), "--sequence-length", "256")}
    errors = measure_errors(tmp_path, peer_python, numa, record_expert_inputs(rest), variants)
    print(errors)
    assert errors["mse"][1] < 0.95 * errors["absmax"][1], errors
    assert errors["gptq"][1] < 0.95 * errors["mse"][1], errors


TOLERANCES = {"MXFP4": 0.01, "FP8": 0.01, "BF16": 0.01, "RAWINT4": 0.015}  # RAWINT4 has 8-bit activations in kt-kernel
SCALES = (("RAWINT4", "mse"), ("RAWINT4", "gptq"), ("MXFP4", "gptq"))


@pytest.mark.parametrize("numa", [1, 2])
@pytest.mark.parametrize(("method", "scale"), [*((name, "absmax") for name in TOLERANCES), *SCALES])
def test_peer_computes_with_its_native_layout(tmp_path, peer_python, method, scale, numa):
    """kt-kernel loads and splits `--layout kt`; compares with float64 on the same values."""
    out, inputs = tmp_path / "out", draw_inputs(6, 8)
    more = ("--dataset", str(ROOT / "examples" / "heldout.txt"), "--sequence-length", "256") if scale == "gptq" else ()
    convert(out, method.lower(), numa, "--layout", "kt", "--scale", scale, *more)
    save_file(inputs, tmp_path / "inputs.safetensors")
    expected = compute_in_float64(out, inputs)
    theirs = floats.from_bits(run_peer_forward(peer_python, tmp_path, 1, numa, method, out))
    assert np.linalg.norm(theirs - expected) < TOLERANCES[method] * np.linalg.norm(expected)


def test_one_directory_serves_cpu_and_gpu(tmp_path, peer_python):
    """The output of `gpu --group-size 32` loads in kt-kernel as RAWINT4, in our runtime, and in transformers.

    Our runtime is at least as close to float64 as kt-kernel.
    """
    pytest.importorskip("compressed_tensors")
    out, inputs = tmp_path / "out", draw_inputs(6, 8)
    program = [sys.executable, "-m", "ktconvert.pipeline.cli"]
    options = ("--quant-method", "RTN", "--quant-type", "W4A16", "--group-size", "32")
    subprocess.run([*program, "gpu", "-i", str(MODEL), "-o", str(out), "-q", *options], check=True, timeout=300)
    save_file(inputs, tmp_path / "inputs.safetensors")
    expected = compute_in_float64(out, inputs)
    theirs = floats.from_bits(run_peer_forward(peer_python, tmp_path, 1, 1, "RAWINT4", out))
    experts = KTExperts.load(out, 1, parts=1)
    assert experts.method == "RAWINT4"
    ours = experts.forward(bits(inputs["hidden"]), inputs["ids"].numpy(), inputs["weights"].numpy())
    their_error, our_error = (
        np.linalg.norm(y - expected) / np.linalg.norm(expected) for y in (theirs, floats.from_bits(ours))
    )
    assert our_error < their_error < 0.015
    verify = [*program, "verify", str(out), "--against", str(MODEL)]
    result = subprocess.run(verify, check=True, timeout=300, capture_output=True, text=True)
    assert "every routed expert matches" in result.stdout and "KL divergence" in result.stdout


SIZES: dict[str, Any] = {"experts": EXPERTS, "intermediate": 256}
# Runs of both layers of the bundled model: tokens, experts per token, deferred experts of the first layer, GPU mask.
RUNS = [(1, 2, 0, False), (40, 2, 0, False), (24, 4, 2, True), (3, 2, 1, False), (4, 2, 2, False)]


def run_program(python: str, module: str, job: dict[str, Any], scratch: Path) -> dict[str, torch.Tensor]:
    """Run the program of tests/rig/layers.py; return the outputs of its layers."""
    result, path = str(scratch / f"{module}.safetensors"), scratch / f"{module}.json"
    path.write_text(json.dumps(job | {"result": result}))
    command = [python, "-P", str(ROOT / "tests" / "rig" / "layers.py"), module, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return load_file(result)


def write_inputs(path: Path, tokens: int, topk: int, mask: bool, **more: torch.Tensor) -> str:
    """Write inputs for a run."""
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
            "inputs": write_inputs(tmp_path / f"{tokens}.safetensors", tokens, topk, mask),
            "deferred": [deferred, 0],
        }
        for tokens, topk, deferred, mask in RUNS
    }
    job = SIZES | {"numa": parts, "folder": str(out), "save": False, "method": f"AMX{method.upper()}", "runs": runs}
    theirs = run_program(peer_python, "kt_kernel", job, tmp_path)
    ours = run_program(sys.executable, "ktconvert.native_quant", job, tmp_path)
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
        runs = {"5": {"inputs": write_inputs(tmp_path / "5.safetensors", 5, 2, False, **weights), "deferred": [0]}}
        job = SIZES | {"numa": 2, "folder": str(folder), "save": True, "method": f"AMX{method.upper()}", "runs": runs}
        results[module] = run_program(peer_python if module == "kt_kernel" else sys.executable, module, job, tmp_path)
    theirs, ours = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*.kt")} for f in folders.values())
    assert ours == theirs and len(ours) == EXPERTS * 3 * 2 * 2
    left, right = (result["5.0.0"].view(torch.int16) for result in results.values())
    assert torch.equal(left, right)


@pytest.fixture
def beside_us(tmp_path: Path, peer_python: str) -> dict[str, str]:
    """Return environment variables for the documented sitecustomize with the real package's modules."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.run([peer_python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\n\nsys.path.append({theirs!r})\n"
        "from ktconvert.native_quant import install_as_kt_kernel\n\ninstall_as_kt_kernel()\n"
    )
    return {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}


KT = "from kt_kernel.cli.main import main; main()"


def test_kt_commands_and_training_run_under_our_name(beside_us):
    for command in ("version", "doctor", "run --help", "quant --help", "model list", "bench --help"):
        assert programs.python_output(KT, *command.split(), **beside_us)
    sft = "import kt_kernel; from kt_kernel.sft import KTConfig; print(kt_kernel.KTMoEWrapper.__module__, "
    sft += "kt_kernel.kt_kernel_ext.__name__, KTConfig.__module__, kt_kernel.sft.get_fp8_runtime.__module__)"
    modules = ["ktconvert.native_quant.runtime.wrapper", "kt_kernel_ext"]
    modules += ["kt_kernel.sft.config", "ktconvert.native_quant.runtime.kt_sft"]
    assert programs.python_output(sft, **beside_us).split() == modules
    native = "from kt_kernel.sft.deepseek_v4 import inspect_native_checkpoint as a\n"
    native += "from kt_kernel.sft.export_dsv4_sglang_adapter import _validate_fused_experts as b\n"
    assert "kt_kernel.sft.deepseek_v4" in programs.python_output(f"{native}print(a.__module__)", **beside_us)


def test_kt_quant_converts_and_kt_run_starts_sglang_with_our_wrapper(tmp_path, beside_us):
    out = tmp_path / "out"
    assert programs.python_output(KT, "quant", MODEL, "-m", "int8", "-o", out, "--numa-nodes", 1, "-y", **beside_us)
    assert KTExperts.load(out, 1, method="AMXINT8", parts=1).num_experts == EXPERTS
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("__version__ = '0.7.2'")
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import sys, kt_kernel\n"
        "print(kt_kernel.KTMoEWrapper.__module__, *sys.argv[1:], '--kt-gpu-prefill-token-threshold')\n"
    )
    sizes = [
        "--gpu-experts",
        "0",
        "--cpu-threads",
        "2",
        "--numa-nodes",
        "1",
        "--tensor-parallel-size",
        "1",
        "--max-total-tokens",
        "64",
    ]
    paths = "--model-path", MODEL, "--weights-path", out, "--kt-method", "AMXINT8"
    started = programs.python_output(KT, "run", MODEL, *paths, *sizes, **beside_us).splitlines()
    (launched,) = [line for line in started if line.startswith("ktconvert.native_quant.runtime.wrapper ")]
    assert f"--kt-weight-path {out}" in launched and "--kt-method AMXINT8" in launched
