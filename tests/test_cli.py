"""The command line as a user of kt-kernel's scripts meets it: their examples, their spellings, what is printed and where."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rig import stored
from rig.safetensors import edit_file, read_folder

# kt-kernel's scripts README, the examples of convert_cpu_weights.py (0.7.2), and merge_cpu_weights.py as its --help
# describes it: only the program's name and the paths differ. {bf16}, {fp16}, {fp8} are checkpoints, {out} the output,
# {loose} an earlier loose output.
BF16 = "cpu --input-path {bf16} --input-type bf16 --output {out}"
FP8 = "cpu --input-path {fp8} --input-type fp8 --output {out}"
EXAMPLES = {
    "bf16 to int4": f"{BF16} --quant-method int4",
    "fp16 to int8": "cpu --input-path {fp16} --input-type fp16 --output {out} --quant-method int8",
    "fp8 to int4": f"{FP8} --quant-method int4",
    "resume layer": f"{BF16} --quant-method int4 --no-merge-safetensor --resume-layer 1",
    "Qwen3-Next-80B": f"{BF16} --quant-method int4 --cpuinfer-threads 60 --threadpool-count 2 --no-merge-safetensor",
    "merge": "merge --input-path {loose} --output {out}",
    "merge with original": "merge -i {loose} -o {out} --original-path {bf16} --max-tensors 3000",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, cli: Any, example: Path, write_qwen: Any) -> dict[str, Path]:
    """A checkpoint of each input type, and a loose output."""
    root = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(1)
    plain = {p: rng.standard_normal((2, 256, 256)).astype(np.float16) for p in ("gate", "up", "down")}
    fp8: dict[str, Any] = {}
    for projection in plain:
        fp8[projection] = rng.integers(0, 0x7F, (2, 256, 256), dtype=np.uint8)
        fp8[f"{projection}.weight_scale_inv"] = rng.uniform(1e-3, 1e-2, (2, 2, 2)).astype(np.float32)
    paths = {
        "bf16": example,
        "fp16": write_qwen(root / "fp16", {0: {p: x.view(np.uint16) for p, x in plain.items()}}, "F16"),
        "fp8": write_qwen(root / "fp8", {0: fp8}, "F8_E4M3", quantization_config={"weight_block_size": [128, 128]}),
        "loose": root / "loose",
    }
    cli("cpu", "-i", example, "-o", paths["loose"], "--no-merge-safetensor")
    return paths


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_kt_kernels_readme(name: str, places: dict[str, Path], tmp_path: Path, cli: Any) -> None:
    line = EXAMPLES[name].format(out=tmp_path / "out", **places)
    cli(*shlex.split(line))
    loose = "--no-merge" in line
    assert bool(list((tmp_path / "out").glob("*.safetensors"))) != loose
    assert ((tmp_path / "out" / "_layer_1").is_dir()) == loose
    if name == "resume layer":
        assert not (tmp_path / "out" / "_layer_0").exists()


def test_other_spellings(tmp_path: Path, cli: Any, example: Path, read_tree: Any) -> None:
    cli("cpu", "-i", example, "-o", tmp_path / "a", "--quant-method", "int8", "--threadpool-count", 1)
    words = ("--Output", tmp_path / "b", "--QUANT_METHOD", "INT8", "--threadpool_count", 1, "--input-type", "BF16")
    done = cli("CPU", "--input_path", example, *words, "--LAYERS", "ALL", "--EXECUTOR", "Threads:1", "-q")
    assert read_tree(tmp_path / "a") == read_tree(tmp_path / "b")
    assert done.stdout == done.stderr == ""  # -q


def test_flags_that_mean_nothing_here_are_noted(tmp_path: Path, cli: Any, example: Path) -> None:
    flags = ("--gpu", "--fp8-expert-batch 4", "--profile", "--cpuinfer-threads 4096")
    done = cli("cpu", "-i", example, "-o", tmp_path / "a", *" ".join(flags).split())
    for flag in flags:
        assert f"note: {flag.removesuffix(' 4')}" in done.stderr


@pytest.mark.parametrize("method", ["awq", "moe_int4", "MOE_INT8"])
def test_methods_that_kt_kernel_has_and_we_have_not(method: str, tmp_path: Path, cli: Any, example: Path) -> None:
    done = cli("cpu", "-i", example, "-o", tmp_path / "a", "--quant-method", method, code=3)
    assert "int4 (AMXINT4) and int8 (AMXINT8)" in done.stderr


def test_dry_run_writes_nothing_and_tells_the_graph(tmp_path: Path, cli: Any, example: Path) -> None:
    out = tmp_path / "out"
    done = cli("cpu", "-i", example, "-o", out, "--dry-run")
    assert re.search(r"source -> experts: .* 2 units, 2 to run", done.stdout)
    assert "experts -> assemble" in done.stdout
    assert list(tmp_path.iterdir()) == []
    plan = json.loads(cli("cpu", "-i", example, "-o", out, "--dry-run", "--json").stdout.splitlines()[-1])
    assert [u["unit"] for u in plan["units"]] == ["experts.layer-000", "experts.layer-001"]
    assert all(not u["done"] and u["reason"] == "not made yet" for u in plan["units"])
    assert plan["bytes_in"] == 2 * 8 * 3 * 256 * 256 * 2
    cli("cpu", "-i", example, "-o", out)
    assert "nothing to do" in cli("cpu", "-i", example, "-o", out, "--dry-run").stdout
    assert "nothing to do" in cli("cpu", "-i", example, "-o", out).stderr
    assert "nothing to do" in cli("resume", out).stderr
    cli("cpu", "-i", example, "-o", out, "--quant-method", "int8", "--dry-run", code=7)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["cpu"], 2),
        (["cpu", "-i", "{example}", "-o", "{out}", "--quant-method", "int5"], 2),
        (["cpu", "-i", "{example}", "-o", "{out}", "--no-merge-safetensor", "--non-experts", "copy"], 2),
        (["cpu", "-i", "{out}/missing", "-o", "{out}"], 5),
        (["merge", "-i", "{example}", "-o", "{out}"], 5),
        (["cpu", "-i", "{example}", "-o", "{out}", "--input-type", "fp8"], 5),
        (["resume", "{out}"], 7),
        (["nonsense"], 2),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str], code: int, tmp_path: Path, cli: Any, example: Path
) -> None:
    done = cli(*[a.format(example=example, out=tmp_path / "out") for a in arguments], code=code)
    assert done.stdout == ""
    assert done.stderr
    assert not (tmp_path / "out").exists()


def test_a_forced_isa_that_is_not_there_is_an_error(tmp_path: Path, cli: Any, example: Path) -> None:
    done = cli("cpu", "-i", example, "-o", tmp_path / "out", env={"KTCONVERT_ISA": "avx1024"}, code=2)
    assert "avx1024" in done.stderr
    assert "scalar" in done.stderr


def test_version_and_help(cli: Any) -> None:
    lines = cli("--version").stdout.splitlines()
    heads = ["ktconvert", "Python", "platform", "build", "instruction", "torch", "kt-kernel"]
    assert [line.split()[0] for line in lines] == heads
    assert cli("version").stdout.splitlines() == lines
    found = json.loads(cli("version", "--json").stdout)
    assert f"ktconvert {found['ktconvert']}" == lines[0] and found["build"]["compiler"] in lines[3]
    assert found["instruction_sets"]["built"][0] == found["instruction_sets"]["available"][0] == "scalar"
    assert found["instruction_sets"]["in_use"] in found["instruction_sets"]["available"]
    assert "130/143" in cli("--help").stdout
    for command in ("cpu", "merge", "resume", "verify", "inspect", "doctor"):
        assert "Examples:" in cli(command, "--help").stdout, command


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, cli: Any, example: Path) -> None:
    repo, commit = tmp_path / "hub" / "models--org--tiny", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(example, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    assert "ktconvert cpu -i org/tiny -o tiny-AMXINT4" in cli("inspect", "org/tiny", env=env).stdout
    cli("cpu", "-i", "org/tiny", "-o", tmp_path / "out", "--revision", commit, env=env)
    assert "base_model: org/tiny" in (tmp_path / "out" / "README.md").read_text()
    cli("cpu", "-i", example, "-o", tmp_path / "local")
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "local")
    assert "HF_HUB_OFFLINE" in cli("cpu", "-i", "org/absent", "-o", tmp_path / "x", env=env, code=5).stderr


def test_an_architecture_of_the_users_own(tmp_path: Path, cli: Any, example: Path, packed_example: Any) -> None:
    source = stored.model(example, tmp_path / "in", "BF16")
    stored.configure(source, model_type="mine", architectures=["Mine"])

    def rename(tensors: Any) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[re.sub(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w)\w*_proj.*", r"net.\1.moe.\2.\3", name)] = (
                tensors.pop(name)
            )

    edit_file(source / "model.safetensors", rename)
    cli("cpu", "-i", source, "-o", tmp_path / "x", "--threadpool-count", 1, code=3)
    row = tmp_path / "mine.toml"
    names = [f'{part} = "net.{{layer}}.moe.{{expert}}.{part[0]}"' for part in ("gate", "up", "down")]
    row.write_text("\n".join(['name = "Mine"', 'matches = ["mine"]', "[[stored]]", 'style = "separate"', *names]))
    cli("cpu", "-i", source, "-o", tmp_path / "out", "--threadpool-count", 1, "--arch-file", row)
    assert read_folder(tmp_path / "out") == read_folder(packed_example("int4", 1))


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_what_needs_no_numpy_does_not_import_it(option: str) -> None:
    program = (
        "import sys; from ktconvert.pipeline.cli import main\n"
        f"sys.argv = ['ktconvert', {option!r}]\n"
        "try: main()\n"
        "finally: print('numpy' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "False\n") and "ktconvert" in done.stdout
