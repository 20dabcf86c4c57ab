"""Paths that commands read: if one does not exist, every command says so, with the exit code of InputError."""

import shutil
from collections.abc import Iterator

import click
import numpy as np
import pytest

from ktconvert.layouts.errors import InputError, VerificationError
from ktconvert.pipeline.cli import COMMANDS, group
from ktconvert.pipeline.options.types import FilePath, OutputPath, PathOrHubId
from rig import gguf
from rig.conversion import run_in_process
from rig.safetensors import write_file

# Command -> arguments with which it reads all of its paths; its positional argument comes first; {out} does not exist
ARGUMENTS = {
    "cpu": "-i {gguf} -o {out} --scale imatrix",
    **dict.fromkeys(("gpu", "calibrate", "dequantize", "fetch"), "-i {model} -o {out}"),
    "merge-adapter": "-i {model} -o {out} --adapter {adapter}",
    "convert-adapter": "{adapter} --model {model} -o {out}",
    "merge": "-i {loose} -o {out}",
    "resplit": "-i {converted} -o {out} --numa 2",
    **dict.fromkeys(("resume", "status", "bench", "verify"), "{converted}"),
    **dict.fromkeys(("inspect", "models"), "{model}"),
    **dict.fromkeys(("fit", "up"), "{gguf}"),
    "experts": "{counts} -o {out}.json --num-gpu-experts 1 --format sglang",
    "train": "-i {model} -o {out} --dataset {text}",
    "run": "{model} --cpu-weights {converted} --prompt x",
    "serve": "{model} --cpu-weights {converted}",
    "eval": "{model} --text {text} --cpu-weights {converted}",
    "doctor": "",
}
EXCEPTIONS = {
    ("cpu", "--dataset"): "-i {model} -o {out} --scale gptq",
    ("eval", "--gpu-weights"): "{model} --text {text}",
    ("models", "--check"): "",
}
OUTPUTS = {"resume", "status", "bench", "verify"}  # their argument may be an unfinished output, which does not exist


def list_paths() -> Iterator[tuple[str, str]]:
    """Yield each command with each argument or option that names a path to read."""
    context = click.Context(group)
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            is_argument = isinstance(parameter, click.Argument)
            is_read = not isinstance(parameter.type, OutputPath) or (is_argument and name in OUTPUTS)
            if isinstance(parameter.type, FilePath | PathOrHubId) and is_read:
                yield name, parameter.opts[0]


@pytest.fixture(scope="module")
def places(tmp_path_factory, example, packed_example):
    """Return the paths in ARGUMENTS by name."""
    root = tmp_path_factory.mktemp("places")
    (root / "text.txt").write_text("A text. " * 200)
    (root / "adapter").mkdir()
    for file in ("adapter_config.json", "fused_expert_lora.safetensors"):
        (root / "adapter" / file).touch()
    write_file(root / "counts.safetensors", {"counts": ("I64", np.ones((2, 8), np.int64))})
    return {
        "model": example,
        "out": root / "out",
        "text": root / "text.txt",
        "adapter": root / "adapter",
        "counts": root / "counts.safetensors",
        "gguf": gguf.write(root / "model.gguf", *gguf.quantize_example(example)),
        "converted": packed_example("int4", 1),
        "loose": packed_example("int4", 1, "--no-merge-safetensor"),
    }


def run_with(name, path, value, places):
    """Run a command with a value for one of its paths; return its error."""
    words = EXCEPTIONS.get((name, path), ARGUMENTS[name]).format(**places).split()
    if path in words:
        words[words.index(path) + 1] = value
    elif path.startswith("-"):
        words += [path, value]
    elif words[0] == "-i":
        words[:2] = [value]
        del words[words.index("-o")]
    else:
        words[0] = value
    return run_in_process(name, *words).exception


@pytest.mark.parametrize(("name", "path"), list_paths())
def test_a_missing_path_has_one_exit_code(name, path, places, tmp_path):
    missing = str(tmp_path / "absent.safetensors")
    error = run_with(name, path, missing, places)
    assert type(error) is InputError, error
    assert missing in str(error) and "does not exist" in str(error)


@pytest.mark.parametrize(("name", "path"), [("cpu", "-i"), ("run", "--cpu-weights"), ("verify", "--against")])
def test_a_name_too_long_for_that_of_a_work_directory_is_absent(name, path, places, tmp_path):
    """The suffix makes it longer than file systems allow."""
    error = run_with(name, path, str(tmp_path / ("a" * 252)), places)
    assert type(error) is InputError and "does not exist" in str(error), error


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory, write_qwen, random_experts):
    """Return an output whose conversion stopped after layer 0, since layer 1 has a NaN."""
    layers = {n: random_experts(2, 128, 128, n) for n in (0, 1)}
    layers[1]["down"][1, 5, 6] = 0x7FC0
    root = tmp_path_factory.mktemp("unfinished")
    source, output = write_qwen(root / "model", layers), root / "out"
    result = run_in_process("cpu", source, output, "--numa", 1, "--threads", 1)
    assert isinstance(result.exception, InputError) and output.with_name("out.work").is_dir()
    return output


@pytest.mark.parametrize(
    ("name", "path"), [pair for pair in list_paths() if pair[0] not in {"resume", "status", "inspect"}]
)
def test_an_unfinished_output_has_to_be_resumed(name, path, places, unfinished):
    error = run_with(name, path, str(unfinished), places)
    assert type(error) is VerificationError, error
    assert str(error) == f"{unfinished}: is not finished; run `ktconvert resume {unfinished}`."


@pytest.mark.parametrize("words", ["verify {work}", "run {model} --cpu-weights {work} --prompt x", "cpu {work} {out}"])
def test_a_work_directory_leads_to_its_output(words, places, unfinished):
    work = unfinished.with_name("out.work")
    error = run_in_process(*words.format(**places, work=work).split()).exception
    assert type(error) is VerificationError, error
    remedy = f"run `ktconvert resume {unfinished}`"
    assert str(error) == f"{work}: is the work directory of an unfinished conversion; {remedy}."


def test_every_command_with_a_path_has_a_case():
    assert {name for name, _ in list_paths()} == {*ARGUMENTS}


@pytest.mark.parametrize(
    "words",
    [
        *(f"{name} {{empty}} {{out}}" for name in ("cpu", "gpu", "calibrate", "dequantize", "fetch")),
        *(f"{name} {{empty}}" for name in ("verify", "bench", "inspect", "fit")),
        "resplit {empty} {out} --numa 2",
        "verify {converted} --against {empty}",
        "run {empty} --prompt x",
        "run {model} --cpu-weights {empty} --prompt x",
    ],
)
def test_a_directory_without_weights_has_one_exit_code(words, places, tmp_path):
    error = run_in_process(*words.format(**places, empty=tmp_path).split()).exception
    assert type(error) is InputError and str(error).startswith(f"{tmp_path}: has no "), error


@pytest.mark.parametrize(
    "words", ["cpu {parent} {out}", "verify {parent}", "run {model} --cpu-weights {parent} --prompt x"]
)
def test_a_directory_of_models_leads_to_one_of_them(words, places, tmp_path):
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    shutil.copytree(places["converted"], folder)
    for hidden in (".cache", "int8.work"):
        (folder.parent / hidden).mkdir()
        (folder.parent / hidden / "model.safetensors").touch()
    for parent in (folder.parent, folder.parent.parent):
        error = run_in_process(*words.format(**places, parent=parent).split()).exception
        assert type(error) is InputError, error
        assert str(error) == f"{parent}: has no .safetensors file; give a directory that has one, such as {folder}."


@pytest.mark.parametrize(
    "words",
    [
        *(f"{name} {{file}} {{out}}" for name in ("cpu", "gpu", "calibrate", "dequantize", "fetch")),
        *(f"{name} {{file}}" for name in ("inspect", "fit", "up")),
        "train {file} {out} --dataset {text}",
        "verify {converted} --against {file}",
        "run {file} --prompt x",
        "serve {file}",
    ],
)
def test_a_file_of_a_model_leads_to_its_directory(words, places):
    file = places["model"] / "config.json"
    error = run_in_process(*words.format(**places, file=file).split()).exception
    assert type(error) is InputError, error
    assert str(error).startswith(f"{file}: ") and str(error).endswith(f"; give the directory {places['model']}.")


WITHOUT_SHARD = {  # command -> its arguments and exit code for converted experts without their second shard
    "run": ("{model} --cpu-weights {broken} --prompt x", InputError.exit_code),
    "eval": ("{model} --cpu-weights {broken} --text {text}", InputError.exit_code),
    "bench": ("{broken}", InputError.exit_code),
    "resplit": ("{broken} {out} --numa 2", InputError.exit_code),
    **dict.fromkeys(("verify", "status", "resume"), ("{broken}", VerificationError.exit_code)),
}


@pytest.mark.parametrize("command", WITHOUT_SHARD)
@pytest.mark.parametrize("options", [(), ("--max-shard-size", "1MiB")], ids=["layers", "halves of layers"])
def test_a_missing_shard_has_one_exit_code_where_it_is_read(options, command, places, packed_example, tmp_path):
    arguments, code = WITHOUT_SHARD[command]
    broken = shutil.copytree(packed_example("int8", 1, *options), tmp_path / "broken")
    shard = sorted(broken.glob("model-*.safetensors"))[1]
    shard.unlink()
    words = arguments.format(**{**places, "broken": broken, "out": tmp_path / "out"}).split()
    result = run_in_process(command, *words)
    assert f"{shard.name} is missing" in f"{result.output} {result.exception}"
    assert getattr(result.exception, "exit_code", result.exit_code) == code


@pytest.mark.parametrize(
    "words", ["inspect {link}", "cpu {link} {out}", "run {link} --prompt x", "fit {link}", "eval {model} --text {link}"]
)
def test_a_link_to_nothing_is_named(words, places, tmp_path, monkeypatch):
    """Also if its name could be a hub id. Its own name is no correction of itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for link in ("broken", "models/broken"):
        (tmp_path / link).symlink_to("nowhere")
        error = run_in_process(*words.format(**{**places, "link": link, "out": "out"}).split()).exception
        assert type(error) is InputError, error
        assert str(error).endswith("broken: is a link to nowhere, which does not exist; correct the link.")
