"""Models that are converted once for all tests: with GPTQ by the real command line, and by llmcompressor's oneshot."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from rig import conversion, families, oneshot, stored
from rig.model_server import model_server
from rig.safetensors import read_folder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, HELDOUT = ROOT / "examples" / "qwen3-moe-small", ROOT / "examples" / "heldout.txt"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 2048  # size of that tokenizer's vocabulary
MAX_LENGTH = 48
TEXTS = (300, 110, 85, 60, 40, 25, 12)  # lengths in characters; the first text exceeds MAX_LENGTH tokens
FEW = (25, 8)


class Case(NamedTuple):
    """A model, and the options to convert it.

    source   key in the dictionary that write_sources returns
    options  options of `ktconvert gpu` besides input, output, kind and dataset
    few      calibrate with the texts of FEW
    oracle   fields of the library's oneshot.Job besides model, samples and kind; None to skip the library
    """

    source: str
    kind: str = "W4A16"
    options: tuple[str, ...] = ()
    few: bool = False
    oracle: Mapping[str, Any] | None = MappingProxyType({})


ROUTED = ("--calibrate", "routed", "--min-expert-tokens")
CASES = {
    "qwen3_moe": Case("qwen3_moe"),
    "qwen3_moe W8A16": Case("qwen3_moe", "W8A16", oracle=None),  # compared with the oracle's in LONG
    "qwen3_moe fused": Case("qwen3_moe fused", oracle=None),
    "qwen3_moe FP8": Case("qwen3_moe FP8", oracle=None),
    "qwen3_moe decoded": Case("qwen3_moe decoded", oracle=None),
    "qwen3_moe routed": Case("qwen3_moe", options=(*ROUTED, "1"), few=True, oracle={"calibrate_all": False}),
    "qwen3_moe floor": Case("qwen3_moe", options=(*ROUTED, "4"), few=True, oracle=None),
    "qwen3_moe g32": Case("qwen3_moe", options=("--group-size", "32"), few=True, oracle={"group": 32}),
    "qwen3_moe float32": Case("qwen3_moe", "W8A16", options=("--rounding", "float32"), oracle=None),
    "qwen3_moe unrepaired": Case("qwen3_moe", options=("--engine", "oneshot"), oracle={"repaired": False}),
    "bundled": Case("bundled"),
    "mixtral": Case("mixtral"),
    "deepseek_v3": Case("deepseek_v3", "W8A16"),
    "qwen3_next": Case("qwen3_next"),
}
# Run with a different number of threads: each family in both kinds.
LONG = {
    f"{source} {kind}": Case(source, kind)
    for source in (*families.FAMILIES, "qwen3_moe fused", "bundled")
    for kind in ("W4A16", "W8A16")
}
# One case of each family, and of each way in which checkpoints store experts.
VERIFIED = (*("qwen3_moe", "qwen3_moe fused", "qwen3_moe FP8", "mixtral"), *("deepseek_v3", "qwen3_next"))
VERIFIED_LONG = ("glm4_moe W4A16", "minimax_m2 W8A16")


def write_sources(folder: Path) -> dict[str, Path]:
    """Write the models, each with the tokenizer of the bundled model; return their paths by name."""
    from safetensors.torch import load_file, save_file

    models = {name: write_model(name, False, folder / name) for name in families.FAMILIES if name != "qwen3_moe"}
    for name, fused in (("qwen3_moe", False), ("qwen3_moe fused", True)):
        models[name] = write_model("qwen3_moe", fused, folder / name, num_hidden_layers=3)
    models["bundled"] = Path(shutil.copytree(EXAMPLE, folder / "bundled"))

    models["qwen3_moe FP8"] = stored.model(models["qwen3_moe"], folder / "qwen3_moe FP8", "FP8")
    models["qwen3_moe decoded"] = folder / "qwen3_moe decoded"
    result = conversion.run_in_process("dequantize", models["qwen3_moe FP8"], models["qwen3_moe decoded"])
    assert result.exception is None, result.exception
    models["bundled scrambled"] = Path(shutil.copytree(EXAMPLE, folder / "bundled scrambled"))
    path = models["bundled scrambled"] / "model.safetensors"
    save_file(scramble(load_file(path)), path, metadata={"format": "pt"})
    return models


def write_small_model(folder: Path) -> Path:
    """Write a Qwen3-MoE with three layers, four experts and the bundled tokenizer."""
    return write_model("qwen3_moe", False, folder, num_hidden_layers=3, num_experts=4)


def write_model(family: str, fused: bool, folder: Path, **overrides: Any) -> Path:
    """Write a model of this family, with the tokenizer of the bundled model."""
    model: Path = families.make(family, fused, folder, vocab_size=VOCABULARY, **overrides)
    for name in TOKENIZER:
        shutil.copy(EXAMPLE / name, model)
    return model


def scramble(tensors: dict[str, Any]) -> dict[str, Any]:
    """Scale the columns of down_proj of layer 0 very differently, and undo it in up_proj: almost the same function."""
    import torch

    generator, scaled = torch.Generator().manual_seed(0), dict(tensors)
    for name in (name for name in tensors if "layers.0." in name and "experts" in name and "down_proj" in name):
        sizes = torch.exp(torch.randn(tensors[name].shape[1], generator=generator) / 2)
        up = name.replace("down_proj", "up_proj")
        scaled[name] = (tensors[name] * sizes).to(torch.bfloat16)
        scaled[up] = (tensors[up] / sizes[:, None]).to(torch.bfloat16)
    return scaled


def write_dataset(folder: Path, name: str, lengths: Sequence[int]) -> tuple[Path, list[list[int]]]:
    """Write a data set (JSON lines in mixed order); return its path, and its samples in the order of calibration."""
    from transformers import AutoTokenizer

    text, start, rows = HELDOUT.read_text(), 0, []
    for length in lengths:
        rows.append(text[start : start + length])
        start += length
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in sorted(rows)))
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    samples = [tokenizer(row, add_special_tokens=False)["input_ids"][:MAX_LENGTH] for row in rows]
    assert len({len(sample) for sample in samples}) == len(samples)  # so that there is one order by descending length
    return path, sorted(samples, key=len, reverse=True)


def data_options(dataset: Path, threads: int = 1) -> list[str]:
    """Return the options for calibration data that all commands share."""
    options = ["--dataset", str(dataset), "--sequence-length", str(MAX_LENGTH), "--cpuinfer-threads", str(threads)]
    return [*options, "--force-cpu"]


def gpu_arguments(model: Path, out: Path, kind: str, dataset: Path, *options: str, threads: int = 1) -> list[str]:
    """Return the arguments of `ktconvert gpu` with GPTQ."""
    return ["gpu", "-i", str(model), "-o", str(out), "--quant-type", kind, *data_options(dataset, threads), *options]


def scale_gptq_arguments(model: Path, out: Path, dataset: Path, *options: str) -> list[str]:
    """Return the arguments of `ktconvert cpu --scale gptq`."""
    where = ("-i", str(model), "-o", str(out))
    return ["cpu", *where, "--scale", "gptq", "--min-expert-tokens", "4", *data_options(dataset), *options]


def calibrate_arguments(model: Path, out: Path, dataset: Path, *options: str) -> list[str]:
    """Return the arguments of `ktconvert calibrate`."""
    return ["calibrate", str(model), "--output", str(out), *data_options(dataset), *options]


class Converted(NamedTuple):
    """The folder with the models, and the outputs of `ktconvert gpu` and of oneshot, by the names of cases."""

    root: Path
    cases: Mapping[str, Case]

    def model(self, name: str) -> Path:
        return self.root / "models" / self.cases[name].source

    def ours(self, name: str) -> Path:
        return self.root / "ours" / name

    def theirs(self, name: str) -> Path:
        return self.root / "theirs" / name

    def rounded(self, name: str) -> Path:
        """Return the output of --quant-method RTN as W4A16, for "qwen3_moe" or "bundled"."""
        return self.root / "rounded" / name

    def log_text(self, name: str) -> str:
        return (self.root / "log" / name).read_text()

    def report(self, name: str) -> Any:
        return json.loads(oneshot.report_path(self.theirs(name)).read_text())

    def verified(self, name: str) -> int:
        """Return the exit code of `ktconvert verify` for one of VERIFIED or VERIFIED_LONG."""
        return int(json.loads((self.root / "verified.json").read_text())[name])

    def dataset(self, name: str = "texts") -> Path:
        return self.root / f"{name}.jsonl"

    def oracle(self, name: str) -> dict[str, Any]:
        """Return the library's tensors under the names of our output."""

        def our_name(name: str) -> str:
            if ".block_sparse_moe.experts." in name:
                for theirs, ours in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
                    name = name.replace(f".{theirs}.", f".{ours}.")
            return name

        return {our_name(name): tensor for name, tensor in read_folder(self.theirs(name)).items()}


def convert(converted: Converted, threads: int = 1, extras: bool = True) -> None:
    """Run every conversion that `converted` lists. extras: also convert two models with RTN."""
    root = converted.root
    for name in ("models", "ours", "theirs", "log", "rounded"):
        (root / name).mkdir()
    models = write_sources(root / "models")
    samples = {
        few: write_dataset(root, name, lengths) for few, name, lengths in ((False, "texts", TEXTS), (True, "few", FEW))
    }
    jobs = [
        oneshot.Job(models[case.source], converted.theirs(name), samples[case.few][1], case.kind, **case.oracle)
        for name, case in converted.cases.items()
        if case.oracle is not None
    ]

    server = model_server()  # started before the two threads, each of which would start one

    def run_ours() -> None:
        def run(name: str, *arguments: str | Path) -> int:
            return server.run(arguments, root / "log" / name).returncode

        for name, case in converted.cases.items():
            options = (case.kind, samples[case.few][0], *case.options)
            arguments = gpu_arguments(models[case.source], converted.ours(name), *options, threads=threads)
            assert run(name, *arguments) == 0, converted.log_text(name)
        if extras:
            for name in ("qwen3_moe", "bundled"):
                where = ("-i", models[name], "-o", converted.rounded(name))
                assert run(f"{name} RTN", "gpu", *where, "--quant-method", "RTN", "--quant-type", "W4A16") == 0
        text = root / "text.txt"  # one sample of 128 tokens, which takes a quarter of the time of the usual four
        text.write_text(HELDOUT.read_text()[:500])
        codes = {}
        for name in (*VERIFIED, *VERIFIED_LONG):
            if name in converted.cases:
                arguments = ["verify", converted.ours(name), "--against", converted.model(name), "--text", text]
                codes[name] = run(f"{name} verified", *arguments)
        (root / "verified.json").write_text(json.dumps(codes))

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(oneshot.run, jobs, threads), pool.submit(run_ours)]:
            future.result()


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that make(folder) fills once, in one of the processes that share the tests."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        folder = factory.mktemp(name)
        make(folder)
        return folder
    folder = factory.getbasetemp().parent / f"{name}-{session}"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Convert all CASES."""
    return Converted(make_once(tmp_path_factory, "gptq", lambda root: convert(Converted(root, CASES))), CASES)


@pytest.fixture(scope="session")
def converted_long(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Convert all cases of LONG."""
    root = make_once(
        tmp_path_factory, "gptq-long", lambda root: convert(Converted(root, LONG), threads=2, extras=False)
    )
    return Converted(root, LONG)


def load_with_info(path: Path) -> tuple[Any, dict[str, Any]]:
    """Load a checkpoint with transformers; return the model, and its report of missing and unexpected tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)


def divergence(original: Any, other: Any, text: str) -> float:
    """Return the mean KL divergence between the next-token predictions of two models."""
    import torch
    from transformers import AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(EXAMPLE)(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        p, q = (torch.log_softmax(m(ids).logits.float(), -1) for m in (original, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def load_without_experts(path: Path) -> Any:
    """Load a model whose experts return zeros."""
    import torch

    model, _ = load_with_info(path)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_hook(lambda _module, _inputs, out: torch.zeros_like(out))
    return model


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in its own process, and require that it succeeds."""
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result
