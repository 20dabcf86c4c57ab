"""The real kt-kernel 0.7.2, where it is installed: it writes the bytes that we write, computes with ours what it computes
with its own, and one program (tests/rig/layers.py) has the same bits with it and with ktconvert.native_quant.

KTCONVERT_PEER_PYTHON names the Python of a venv that has kt-kernel; `make peer` makes one in build/peer.
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

from ktconvert.layouts.outputs.measuring import measure
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.slices import SliceId
from ktconvert.native_quant import kernels
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.wrapper import KTMoEWrapper
from rig import floats, hf, native, programs
from rig.golden import FOLDER
from rig.native_peer import train
from rig.safetensors import Tensors
from rig.training import distance

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "qwen3-moe-small"
EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 8, 256, 256, 2


def by_peer(python: str, scratch: Path, **run: Any) -> Tensors:
    """Let the peer do one thing, in a process of its own: its thread pool is a singleton that keeps the first T."""
    sizes = {"experts": EXPERTS, "hidden": HIDDEN, "width": INTERMEDIATE, "topk": TOPK}
    return native.run_kt_kernel(python, {"out": sizes | run}, scratch)


def forward(python: str, scratch: Path, layer: int, numa: int, method: str, folder: Path) -> npt.NDArray[np.uint16]:
    """What the peer computes with these files, of the inputs that lie in scratch: bits of BF16."""
    what = {"layer": layer, "parts": numa, "method": method, "path": str(folder)}
    return by_peer(python, scratch, **what, inputs=str(scratch / "inputs.safetensors"))["out"].bits


def convert(out: Path, method: str, numa: int, *more: str, source: Path = MODEL) -> None:
    """Our own conversion, as a user runs it."""
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "cpu", "-i", str(source), "-o", str(out)]
    subprocess.run(
        [*command, "--quant-method", method, "--threadpool-count", str(numa), "-q", *more], check=True, timeout=300
    )


def kt_files(folder: Path) -> dict[str, bytes]:
    """Every .kt file by its path."""
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
        by_peer(peer_python, tmp_path, layer=layer, parts=numa, method=name, **stored)
    convert(loose, method, numa, "--no-merge-safetensor")
    convert(merged, method, numa)
    ours, want = kt_files(loose), kt_files(theirs)
    assert len(want) == 2 * EXPERTS * 3 * numa * 2 and ours.keys() == want.keys()
    assert [name for name in want if ours[name] != want[name]] == []

    save_file(inputs_of(6, 7), tmp_path / "inputs.safetensors")
    for layer in (0, 1):
        outs = [forward(peer_python, tmp_path, layer, numa, name, folder) for folder in (merged, loose, theirs)]
        assert outs[0].any() and all(np.array_equal(out, outs[2]) for out in outs)


@pytest.mark.parametrize(("numa", "hidden", "width"), [(2, 96, 704), (2, 1856, 128), (1, 544, 320)])
def test_peer_writes_our_backward_matrices(tmp_path, peer_python, numa, hidden, width, write_qwen, random_experts):
    """BF16, every file; more than a block of 256 rows and of 1792 columns, and parts of blocks."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    stacked = random_experts(2, hidden, width)
    source = write_qwen(tmp_path / "in", {0: stacked})
    weights = {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in stacked.items()}
    save_file(weights, tmp_path / "weights.safetensors")
    sizes = {"parts": numa, "experts": 2, "hidden": hidden, "width": width}
    stored = {"tensors": str(tmp_path / "weights.safetensors"), "path": str(theirs), "backward": True}
    by_peer(peer_python, tmp_path, method="AMXBF16_SFT", **sizes, **stored)
    convert(ours, "bf16", numa, "--no-merge-safetensor", "--save-backward-weights", source=source)
    assert len(kt_files(theirs)) == 2 * 3 * numa * 2 and kt_files(ours) == kt_files(theirs)


@pytest.mark.skipif(not {"avx512bf16", "amx"} & {*kernels.available_isas()}, reason="kt-kernel trains with these alone")
@pytest.mark.parametrize("method", ["AMXBF16_SFT", "AMXINT4_SFT"])
def test_peer_trains_as_we_do(tmp_path, peer_python, random_experts, method):
    """More than one block of tokens for an expert, and a rank that fills no panel."""
    stacked, generator = random_experts(EXPERTS, HIDDEN, INTERMEDIATE), torch.Generator().manual_seed(1)
    linears = {name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for name, array in stacked.items()}
    save_file(linears, tmp_path / "weights.safetensors")
    shapes = {"a": (EXPERTS, 5, HIDDEN), "b": (EXPERTS, INTERMEDIATE, 5)}
    factors = {f"{name}_{which}": shapes[which] for name in ("gate", "up") for which in "ab"}
    factors |= {"down_a": (EXPERTS, 5, INTERMEDIATE), "down_b": (EXPERTS, HIDDEN, 5)}
    given = {name: torch.randn(shape, generator=generator).mul(0.05).bfloat16() for name, shape in factors.items()}
    given |= inputs_of(300, 3) | {"gradient": torch.randn(300, HIDDEN, generator=generator).bfloat16()}
    save_file(given, tmp_path / "given.safetensors")
    files = {"tensors": str(tmp_path / "weights.safetensors"), "train": str(tmp_path / "given.safetensors")}
    by_peer(peer_python, tmp_path, method=method, **files)
    theirs = load_file(tmp_path / "result.safetensors")
    run = {"topk": TOPK, "hidden": HIDDEN, "width": INTERMEDIATE, "method": method, **files}
    ours = train(KTMoEWrapper, run, list(linears.values()), torch.arange(EXPERTS))
    for name, found in ours.items():
        assert distance(found, theirs[name]) < (5.6e-3 if name == "hidden" else 2e-3), name


def bits(hidden: torch.Tensor) -> np.ndarray:
    """Of BF16."""
    return hidden.view(torch.uint16).numpy()


def inputs_of(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)])
    return {"hidden": hidden, "ids": ids, "weights": torch.rand(tokens, TOPK, generator=generator)}


def in_float64(out: Path, inputs: dict[str, torch.Tensor], numa: int = 1) -> np.ndarray:
    """What float64 computes of the last layer from the numbers that an output stores."""
    opened = open_output(out)
    fmt = measure(opened).fmt
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


def errors_of(
    scratch: Path, python: str, numa: int, inputs: dict[str, torch.Tensor], ways: dict[str, tuple[str, ...]]
) -> dict[str, tuple[float, float]]:
    """Of the last layer in INT4, converted in these ways: how far from the source in float64 the outputs are that float64
    computes from what is stored, and those of the real kt-kernel.
    """
    hidden, ids, weights = (inputs[name] for name in ("hidden", "ids", "weights"))
    save_file(inputs, scratch / "inputs.safetensors")
    source = load_file(MODEL / "model.safetensors")

    def original(expert: int, projection: str) -> np.ndarray:
        return source[f"model.layers.1.mlp.experts.{expert}.{projection}_proj.weight"].double().numpy()

    expected = floats.forward(original, bits(hidden), ids.numpy(), weights.numpy())
    errors = {}
    for scale, more in ways.items():
        out = scratch / scale
        convert(out, "int4", numa, "--scale", scale, *more)
        ours = in_float64(out, inputs, numa)
        theirs = floats.from_bits(forward(python, scratch, 1, numa, "AMXINT4", out))
        errors[scale] = tuple(np.linalg.norm(each - expected) / np.linalg.norm(expected) for each in (ours, theirs))
        assert abs(errors[scale][1] - errors[scale][0]) < 0.05 * errors[scale][0], errors
    return errors


@pytest.mark.parametrize(("layer", "method"), [(0, "AMXINT4"), (1, "BF16")])
def test_peer_takes_no_layer_of_a_mix_for_its_own(tmp_path, peer_python, layer, method):
    """Asked to load a layer of an output with a method per layer, and by its very method, it fails and computes nothing."""
    convert(tmp_path / "out", "int4", 1, "--method-map", "1=bf16")
    save_file(inputs_of(6, 7), tmp_path / "inputs.safetensors")
    with pytest.raises(AssertionError, match="No experts found"):
        forward(peer_python, tmp_path, layer, 1, method, tmp_path / "out")
    assert not (tmp_path / "result.safetensors").exists()


@pytest.mark.parametrize("numa", [1, 2])
def test_peer_computes_with_scales_of_least_error(tmp_path, peer_python, numa):
    """The real kt-kernel loads `--scale mse` and `imatrix`, and its error against the source in float64 is what the
    weights say: less than by the largest values.
    """
    ways = {"absmax": (), "mse": (), "imatrix": ("--imatrix", str(FOLDER / "llama_cpp.imatrix.gguf"))}
    errors = errors_of(tmp_path, peer_python, numa, inputs_of(48, 9), ways)
    assert errors["mse"][1] < 0.95 * errors["absmax"][1], errors
    assert errors["imatrix"][1] < 0.95 * errors["absmax"][1], errors  # though these inputs are alike in all columns


def read_by_experts(text: str) -> dict[str, torch.Tensor]:
    """What the last layer's experts read of a text, by transformers: hidden states, experts' numbers and weights."""
    import transformers

    model = hf.load_complete(MODEL, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager")
    ids = transformers.AutoTokenizer.from_pretrained(MODEL)(text, return_tensors="pt")["input_ids"]
    hidden, chosen, weights, _ = hf.record_experts(model, ids)[1]
    return {"hidden": hidden.clone(), "ids": chosen.long().clone(), "weights": weights.float().clone()}


@pytest.mark.parametrize("numa", [1, 2])
def test_peer_computes_with_compensated_codes(tmp_path, peer_python, numa):
    """The same of `--scale gptq`, on text that was not calibrated with."""
    pytest.importorskip("llmcompressor")
    text = (ROOT / "examples" / "heldout.txt").read_text()
    calibration, rest = tmp_path / "calibration.txt", text[2 * len(text) // 3 :][:600]
    calibration.write_text(text[: 2 * len(text) // 3])
    ways = {"absmax": (), "mse": (), "gptq": ("--dataset", str(calibration), "--max-sequence-length", "256")}
    errors = errors_of(tmp_path, peer_python, numa, read_by_experts(rest), ways)
    print(errors)
    assert errors["mse"][1] < 0.95 * errors["absmax"][1], errors
    assert errors["gptq"][1] < 0.95 * errors["mse"][1], errors


NEAR = {"MXFP4": 0.01, "FP8": 0.01, "BF16": 0.01, "RAWINT4": 0.015}  # whose activations are in 8 bits
SCALES = (("RAWINT4", "mse"), ("RAWINT4", "gptq"), ("MXFP4", "gptq"))


@pytest.mark.parametrize("numa", [1, 2])
@pytest.mark.parametrize(("method", "scale"), [*((name, "absmax") for name in NEAR), *SCALES])
def test_peer_computes_with_its_native_layout(tmp_path, peer_python, method, scale, numa):
    """`--layout kt` as the real kt-kernel loads and splits it, against float64 on the same numbers."""
    out, inputs = tmp_path / "out", inputs_of(6, 8)
    more = (
        ("--dataset", str(ROOT / "examples" / "heldout.txt"), "--max-sequence-length", "256") if scale == "gptq" else ()
    )
    convert(out, method.lower(), numa, "--layout", "kt", "--scale", scale, *more)
    save_file(inputs, tmp_path / "inputs.safetensors")
    expected = in_float64(out, inputs)
    theirs = floats.from_bits(forward(peer_python, tmp_path, 1, numa, method, out))
    assert np.linalg.norm(theirs - expected) < NEAR[method] * np.linalg.norm(expected)


def test_one_directory_for_cpu_and_gpu(tmp_path, peer_python):
    """`gpu --group-size 32` as the real kt-kernel's RAWINT4 loads it, as our runtime does, which is no farther from float64 on
    the same numbers, and as transformers loads the model: the same files."""
    pytest.importorskip("compressed_tensors")
    out, inputs = tmp_path / "out", inputs_of(6, 8)
    program = [sys.executable, "-m", "ktconvert.pipeline.cli"]
    options = ("--quant-method", "RTN", "--quant-type", "W4A16", "--group-size", "32")
    subprocess.run([*program, "gpu", "-i", str(MODEL), "-o", str(out), "-q", *options], check=True, timeout=300)
    save_file(inputs, tmp_path / "inputs.safetensors")
    expected = in_float64(out, inputs)
    theirs = floats.from_bits(forward(peer_python, tmp_path, 1, 1, "RAWINT4", out))
    experts = Experts.load(out, 1, parts=1)
    assert experts.method == "RAWINT4"
    ours = experts.forward(bits(inputs["hidden"]), inputs["ids"].numpy(), inputs["weights"].numpy())
    far, near = (np.linalg.norm(y - expected) / np.linalg.norm(expected) for y in (theirs, floats.from_bits(ours)))
    assert near < far < 0.015
    verify = [*program, "verify", str(out), "--against", str(MODEL)]
    done = subprocess.run(verify, check=True, timeout=300, capture_output=True, text=True)
    assert "every routed expert matches" in done.stdout and "KL divergence" in done.stdout


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


def test_kt_commands_and_training_run_under_our_name(tmp_path, peer_python):
    """With the documented sitecustomize they are the real package's."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.run([peer_python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\n\nsys.path.append({theirs!r})\n"
        "from ktconvert.native_quant import install_as_kt_kernel\n\ninstall_as_kt_kernel()\n"
    )
    ours = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    kt = "from kt_kernel.cli.main import main; main()"
    for command in ("version", "doctor", "run --help", "quant --help"):
        assert programs.python_output(kt, *command.split(), **ours)
    sft = "import kt_kernel.sft, kt_kernel; print(kt_kernel.KTMoEWrapper.__module__, kt_kernel.kt_kernel_ext.__name__)"
    assert programs.python_output(sft, **ours).split() == ["ktconvert.native_quant.runtime.wrapper", "kt_kernel_ext"]
