"""`ktconvert cpu --scale gptq`: kt-kernel's formats with codes that a calibration run compensates."""

import hashlib
import json
import re
import shutil
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.encodings.encoding import tensor_suffixes
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.slices import Slicing, join_slices
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.tensors import format_ranges
from rig import calibrated, gguf
from rig.model_server import model_server
from rig.safetensors import metadata_of, read_file, read_folder

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

# A family with other names; formats, parts, and tokens that do not suffice. How a source stores its experts does not
# matter to the calibration run (test_gptq.py).
CASES = {
    "bundled int4": ("bundled", ("--threadpool-count", "2")),
    "bundled int8": ("bundled", ("--quant-method", "int8", "--threadpool-count", "1")),
    "bundled mxfp4": ("bundled", ("--quant-method", "mxfp4", "--threadpool-count", "2")),
    "bundled mxfp4 rows": ("bundled", ("--quant-method", "mxfp4", "--layout", "kt")),
    "bundled rawint4": ("bundled", ("--quant-method", "rawint4")),
    "bundled few": ("bundled", ("--threadpool-count", "2", "--min-expert-tokens", "60")),
    "bundled all": ("bundled", ("--threadpool-count", "2", "--calibrate", "all")),
    "bundled routed": ("bundled", ("--threadpool-count", "2", "--calibrate", "routed", "--min-expert-tokens", "1")),
    "mixtral": ("mixtral", ("--threadpool-count", "1")),
    # What predictions feel of gate and up joins the two, so that gate would change with up.
    "scrambled": ("bundled scrambled", ("--threadpool-count", "1", "--gptq-steps", "descent")),
    "equalized": ("bundled scrambled", ("--threadpool-count", "1", "--gptq-steps", "descent", "--equalize")),
}

# One of each format, and the equalized one.
VERIFIED = ("bundled int4", "bundled int8", "bundled mxfp4", "bundled rawint4", "mixtral", "equalized")


@pytest.fixture(scope="session")
def outputs(converted: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an output and the messages of each case."""

    def make(root: Path) -> None:
        server = model_server()
        for name, (source, options) in CASES.items():
            model = converted.root / "models" / source
            words = calibrated.scale_gptq_arguments(model, root / name, converted.dataset(), *options)
            result = server.run(words, root / f"{name}.said")
            assert result.returncode == 0, result.stderr
            if name in VERIFIED:
                result = server.run(["verify", root / name, "--against", model, "--full"], root / f"{name}.verified")
                assert result.returncode == 0, result.stderr

    return calibrated.make_once(tmp_path_factory, "gptq-cpu", make)


def tensors(output: Path, ending: str) -> dict[str, Any]:
    return {name: bytes(each[2]) for name, each in read_folder(output).items() if name.endswith(ending)}


@pytest.mark.parametrize("name", VERIFIED)
def test_codes_are_in_range(name, outputs):
    """-8 and -128 never occur, and `verify` holds each linear against the source."""
    stored = tensors(outputs / name, ".weight")
    symmetric = "mxfp4" not in name and "rawint4" not in name
    assert stored or not symmetric
    for data in stored.values() if symmetric else ():
        codes = np.frombuffer(data, np.uint8)
        if "int8" in name:
            assert not (codes == 0x80).any()
        else:
            assert not (codes & 15 == 8).any() and not (codes >> 4 == 8).any()
    said = (outputs / f"{name}.verified").read_text()
    assert "with codes in their range and errors of at most" in said


def test_mxfp4_has_the_same_numbers_in_both_layouts(outputs):
    """Parts share no scale, and a linear is compensated as a whole."""
    parted, whole = (open_output(outputs / name) for name in ("bundled mxfp4", "bundled mxfp4 rows"))
    for expert, projection in product(range(8), ("gate", "up", "down")):
        numbers = []
        for output, parts in ((parted, 2), (whole, 1)):
            encoding, each = FORMATS[output.methods[0]].encoding, []
            for part in Slicing(1, 256, 256, parts).slices(expert, projection):
                stored = [output.read(output.tensors[part.id, suffix]) for suffix in tensor_suffixes(encoding)]
                each.append(encoding.decode(stored, part.n, part.k, slice(None)))
            numbers.append(join_slices(projection, each))
        np.testing.assert_array_equal(*numbers)


def test_experts_are_equalized_before_they_run(outputs):
    """The calibration run reads equalized experts, which compute the same; compensation then reduces the error."""
    manifest = json.loads((outputs / "equalized" / "manifest.json").read_bytes())
    assert manifest["model"]["equalized"] == ["layer 0: 0-7"]
    assert "8 experts are equalized" in (outputs / "equalized.verified").read_text()
    ours, theirs = (tensors(outputs / name, ".weight") for name in ("equalized", "scrambled"))
    gate = {name for name in ours if "blk.0.ffn_gate_" in name}
    assert gate and all(ours[name] == theirs[name] for name in gate)


def test_experts_with_too_few_tokens_are_listed(outputs):
    """The model card and the messages list them; they are rounded, with scales by importance."""
    card = (outputs / "bundled few" / "README.md").read_text()
    assert "gate and up saw every token, down those routed to its expert" in card
    said = (outputs / "bundled few.said").read_text()
    assert "experts not compensated in down, because fewer than 60 tokens were routed to them" in said
    few, enough = (tensors(outputs / name, ".weight") for name in ("bundled few", "bundled int4"))
    same = [name for name in few if few[name] == enough[name]]
    assert same and len(same) < len(few)


def test_codes_depend_on_the_inputs_of_an_expert(outputs):
    mixed, every, routed = (tensors(outputs / f"bundled {name}", ".weight") for name in ("int4", "all", "routed"))
    first = [name for name in mixed if name.startswith("blk.0.")]
    gate = [name for name in first if "down" not in name]
    assert all(mixed[name] == every[name] for name in gate)  # the tokens are the same before the first layer
    assert any(mixed[name] != every[name] for name in first if "down" in name)
    assert any(mixed[name] != routed[name] for name in gate)


def test_the_manifest_records_the_calibration(outputs):
    """Data, options and machine: in the manifest, the metadata of each shard and the model card."""
    output = outputs / "bundled int4"
    manifest = json.loads((output / "manifest.json").read_text())
    facts, settings = manifest["model"], manifest["settings"]
    assert facts["scale"] == settings["scale"] == "gptq"
    assert facts["machine"] == settings["machine"] and settings["machine"]["threads"] == 1
    assert (settings["calibrate"], settings["min_expert_tokens"]) == ("mixed", 4)
    calibration = facts["calibration"]
    assert (calibration["calibrate"], calibration["max_length"]) == ("mixed", calibrated.MAX_LENGTH)
    shards = list(output.glob("*.safetensors"))
    assert shards
    for shard in shards:
        metadata = metadata_of(shard)
        assert metadata["scale"] == "gptq"
        assert (
            json.loads(metadata["calibration"]) == calibration and json.loads(metadata["machine"]) == facts["machine"]
        )
    card = (output / "README.md").read_text()
    samples = re.search(r"(\d+) samples, (\d+) tokens of (\S+), at most", card)
    assert samples and int(samples[2]) > int(samples[1]) and samples[3] == calibration["dataset"]
    assert f"device {facts['machine']['device']}" in card and "threads 1" in card
    assert re.search(r"\| 0 \| 0\.\d+ \| 0\.\d+ \| 0\.\d+ \|", card)  # the error of the layer


def listed(said: str) -> list[str]:
    """Return the message about experts with too few tokens, as the manifest should have it."""
    found = re.findall(
        r"layer (\d+): \d+ of 8 experts not compensated in down, because fewer .*: ([\d, ]+)$", said, re.M
    )
    return [f"layer {layer}: {format_ranges([int(number) for number in few.split(', ')])}" for layer, few in found]


def test_resplit_keeps_the_record(outputs, example, tmp_path, cli):
    """Resplit, and the experts that had too few tokens; what converting again gives is not known."""
    few = json.loads((outputs / "bundled few" / "manifest.json").read_text())["model"]
    assert few["too_few_tokens"] == listed((outputs / "bundled few.said").read_text()) != []
    one = tmp_path / "one"
    cli("resplit", str(outputs / "bundled few"), str(one), "--threadpool-count", "1")
    facts, card = json.loads((one / "manifest.json").read_text())["model"], (one / "README.md").read_text()
    assert [name for name in ("scale", "calibration", "machine", "too_few_tokens") if facts[name] != few[name]] == []
    assert "gate and up saw every token" in card and all(each in card for each in few["too_few_tokens"])
    assert "too few tokens" in cli("verify", str(one), "--against", str(example)).stdout
    assert json.loads(metadata_of(min(one.glob("*.safetensors")))["calibration"]) == few["calibration"]
    words = ("resplit", str(one), str(tmp_path / "x"), "--threadpool-count", "2", "--against", str(example))
    assert "--scale gptq, which needs a calibration run" in cli(*words, code=3).stderr


@pytest.mark.parametrize(("suffix", "byte", "words"), [("weight", 8, "-7 to 7"), ("scale", 0xFF, "not finite")])
def test_verify_finds_impossible_codes_and_scales(suffix, byte, words, outputs, example, tmp_path, cli):
    """A code of -8 and a scale that is NaN are found although the hashes of the manifest match."""
    output = tmp_path / "out"
    shutil.copytree(outputs / "bundled int4", output)
    name = f"blk.1.ffn_down_exps.3.numa.1.{suffix}"
    shard = next(path for path in output.glob("*.safetensors") if name in read_file(path))
    start = next(entry.start for entry in read_header(shard).entries if entry.name == name)
    data = bytearray(shard.read_bytes())
    data[start : start + 4] = [byte] * 4
    shard.write_bytes(data)
    manifest = json.loads((output / "manifest.json").read_text())
    (file,) = (file for file in manifest["files"] if file["name"] == shard.name)
    file["sha256"] = hashlib.sha256(data).hexdigest()
    (output / "manifest.json").write_text(json.dumps(manifest))
    checks = json.loads(cli("verify", str(output), "--against", str(example), "--json", code=6).stdout)["checks"]
    (problem,) = next(check["problems"] for check in checks if check["name"] == "source")
    assert name.removesuffix(suffix) in problem and words in problem


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--layers", "0"), 2, "runs the whole model: leave out --layers"),
        (("--save-backward-weights",), 2, "has no matrices for fine-tuning"),
        (("--max-shard-size", "1MB"), 2, "leave out --max-shard-size"),
        (("--quant-method", "fp8"), 2, "--scale gptq is for --quant-method int4, int8"),
        (("--imatrix", __file__), 2, "--imatrix is not for --scale gptq"),
        (("--dataset", "nowhere.jsonl"), 5, "nowhere.jsonl"),
        ((), 3, "--scale gptq does not support GGUF"),
    ],
)
def test_unsupported_options_are_refused(options, code, words, example, tmp_path, cli):
    stored = gguf.model([("Q4_0", "Q8_0", "F16")], experts=1, hidden=128, width=128)
    about = gguf.model_metadata(1, embedding_length=128, expert_count=1, expert_feed_forward_length=128)
    source = gguf.write(tmp_path / "model.gguf", stored, about) if "GGUF" in words else example
    text = example.parent / "heldout.txt"
    whole = calibrated.scale_gptq_arguments(source, tmp_path / "out", text, "--threadpool-count", "1", *options)
    assert words in cli(*whole, code=code).stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"model.gguf"}
