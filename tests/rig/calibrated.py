"""Models converted with GPTQ by the real command line, and by llmcompressor's oneshot, once for all tests."""

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

from rig import conversion, families, forks, oneshot, stored
from rig.safetensors import read_folder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, HELDOUT = ROOT / "examples" / "qwen3-moe-small", ROOT / "examples" / "heldout.txt"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 2048  # of that tokenizer
MAX_LENGTH = 48
TEXTS = (300, 110, 85, 60, 40, 25, 12)  # characters; the first is more than MAX_LENGTH tokens
FEW = (25, 8)
# What a server loads, so that a run takes one second and not seven.
OURS = ("cli.conversion", "plans.cpu", "plans.gpu", "calibration.layered_model", "verify")
MODULES = (
    *("accelerate", "datasets", "compressed_tensors.compressors", "llmcompressor.modifiers.gptq.gptq_quantize"),
    *("transformers.modeling_utils", *(f"ktconvert.pipeline.{name}" for name in OURS)),
)


class Case(NamedTuple):
    """A model, and how it is converted.

    source   what `sources` calls it
    options  for `ktconvert gpu`, beside input, output, kind and data
    few      calibrate with FEW tokens
    oracle   what the library's job has beside model, samples and kind; None where it is not asked
    """

    source: str
    kind: str = "W4A16"
    options: tuple[str, ...] = ()
    few: bool = False
    oracle: Mapping[str, Any] | None = MappingProxyType({})


ROUTED = ("--calibrate", "routed", "--min-expert-tokens")
CASES = {
    "qwen3_moe": Case("qwen3_moe"),
    "qwen3_moe W8A16": Case("qwen3_moe", "W8A16"),
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
# With another number of threads, and each family in both kinds.
LONG = {
    f"{source} {kind}": Case(source, kind)
    for source in (*families.FAMILIES, "qwen3_moe fused", "bundled")
    for kind in ("W4A16", "W8A16")
}
# One of each family, and of each way in which experts are stored.
VERIFIED = (*("qwen3_moe", "qwen3_moe fused", "qwen3_moe FP8", "mixtral"), *("deepseek_v3", "qwen3_next"))
VERIFIED_LONG = ("glm4_moe W4A16", "minimax_m2 W8A16")


def sources(folder: Path) -> dict[str, Path]:
    """The models, each with the bundled one's tokenizer."""
    from safetensors.torch import load_file, save_file

    models = {name: make(name, False, folder / name) for name in families.FAMILIES if name != "qwen3_moe"}
    for name, fused in (("qwen3_moe", False), ("qwen3_moe fused", True)):
        models[name] = make("qwen3_moe", fused, folder / name, num_hidden_layers=3)
    models["bundled"] = Path(shutil.copytree(EXAMPLE, folder / "bundled"))

    models["qwen3_moe FP8"] = stored.model(models["qwen3_moe"], folder / "qwen3_moe FP8", "FP8")
    models["qwen3_moe decoded"] = folder / "qwen3_moe decoded"
    done = conversion.here("dequantize", models["qwen3_moe FP8"], models["qwen3_moe decoded"])
    assert done.exception is None, done.exception
    models["bundled scrambled"] = Path(shutil.copytree(EXAMPLE, folder / "bundled scrambled"))
    path = models["bundled scrambled"] / "model.safetensors"
    save_file(scrambled(load_file(path)), path, metadata={"format": "pt"})
    return models


def small(folder: Path) -> Path:
    """A Qwen3-MoE of three layers with four experts, and the bundled tokenizer."""
    return make("qwen3_moe", False, folder, num_hidden_layers=3, num_experts=4)


def make(family: str, fused: bool, folder: Path, **differs: Any) -> Path:
    """A model of this family, with the bundled one's tokenizer."""
    model: Path = families.make(family, fused, folder, vocab_size=VOCABULARY, **differs)
    for name in TOKENIZER:
        shutil.copy(EXAMPLE / name, model)
    return model


def scrambled(tensors: dict[str, Any]) -> dict[str, Any]:
    """Almost the same function, with columns of down_proj of very different sizes in layer 0."""
    import torch

    generator, converted = torch.Generator().manual_seed(0), dict(tensors)
    for name in (name for name in tensors if "layers.0." in name and "experts" in name and "down_proj" in name):
        sizes = torch.exp(torch.randn(tensors[name].shape[1], generator=generator) / 2)
        up = name.replace("down_proj", "up_proj")
        converted[name] = (tensors[name] * sizes).to(torch.bfloat16)
        converted[up] = (tensors[up] / sizes[:, None]).to(torch.bfloat16)
    return converted


def data(folder: Path, name: str, lengths: Sequence[int]) -> tuple[Path, list[list[int]]]:
    """A data set of texts, as JSON lines in mixed order, and its samples in the order of calibration."""
    from transformers import AutoTokenizer

    text, at, rows = HELDOUT.read_text(), 0, []
    for length in lengths:
        rows.append(text[at : at + length])
        at += length
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in sorted(rows)))
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    ids = [tokenizer(row, add_special_tokens=False)["input_ids"][:MAX_LENGTH] for row in rows]
    assert len({len(sample) for sample in ids}) == len(ids)  # so that there is one order by descending length
    return path, sorted(ids, key=len, reverse=True)


def usual(dataset: Path, threads: int = 1) -> list[str]:
    words = ["--dataset", str(dataset), "--max-sequence-length", str(MAX_LENGTH), "--cpuinfer-threads", str(threads)]
    return [*words, "--force-cpu"]


def arguments(model: Path, out: Path, kind: str, dataset: Path, *options: str, threads: int = 1) -> list[str]:
    return ["gpu", "-i", str(model), "-o", str(out), "--quant-type", kind, *usual(dataset, threads), *options]


def scale_gptq(model: Path, out: Path, dataset: Path, *options: str) -> list[str]:
    where = ("-i", str(model), "-o", str(out))
    return ["cpu", *where, "--scale", "gptq", "--min-expert-tokens", "4", *usual(dataset), *options]


def calibrate(model: Path, out: Path, dataset: Path, *options: str) -> list[str]:
    return ["calibrate", str(model), "--output", str(out), *usual(dataset), *options]


class Converted(NamedTuple):
    """Where everything lies: models, outputs of `ktconvert gpu` and of oneshot by the names of cases."""

    root: Path
    cases: Mapping[str, Case]

    def model(self, name: str) -> Path:
        return self.root / "models" / self.cases[name].source

    def ours(self, name: str) -> Path:
        return self.root / "ours" / name

    def theirs(self, name: str) -> Path:
        return self.root / "theirs" / name

    def rounded(self, name: str) -> Path:
        """What --quant-method RTN makes of the same model: of "qwen3_moe" and "bundled", W4A16."""
        return self.root / "rounded" / name

    def output_of(self, name: str) -> str:
        return (self.root / "log" / name).read_text()

    def report(self, name: str) -> Any:
        return json.loads(oneshot.report_of(self.theirs(name)).read_text())

    def verified(self, name: str) -> int:
        """The exit code of `ktconvert verify` of one of VERIFIED or VERIFIED_LONG."""
        return int(json.loads((self.root / "verified.json").read_text())[name])

    def dataset(self, name: str = "texts") -> Path:
        return self.root / f"{name}.jsonl"

    def oracle(self, name: str) -> dict[str, Any]:
        """The library's tensors under the names that our output has."""

        def ours(name: str) -> str:
            if ".block_sparse_moe.experts." in name:
                for theirs, own in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
                    name = name.replace(f".{theirs}.", f".{own}.")
            return name

        return {ours(name): tensor for name, tensor in read_folder(self.theirs(name)).items()}


def convert(converted: Converted, threads: int = 1, extras: bool = True) -> None:
    """Run every conversion that `converted` names. extras: round two models to nearest, too."""
    root = converted.root
    for name in ("models", "ours", "theirs", "log", "rounded"):
        (root / name).mkdir()
    models = sources(root / "models")
    samples = {few: data(root, name, lengths) for few, name, lengths in ((False, "texts", TEXTS), (True, "few", FEW))}
    jobs = [
        oneshot.Job(models[case.source], converted.theirs(name), samples[case.few][1], case.kind, **case.oracle)
        for name, case in converted.cases.items()
        if case.oracle is not None
    ]

    def ours() -> None:
        with forks.Forks([], 1, modules=MODULES) as server:

            def run(name: str, *words: str | Path) -> int:
                return server.run(words, root / "log" / name).returncode

            for name, case in converted.cases.items():
                options = (case.kind, samples[case.few][0], *case.options)
                words = arguments(models[case.source], converted.ours(name), *options, threads=threads)
                assert run(name, *words) == 0, converted.output_of(name)
            if extras:
                for name in ("qwen3_moe", "bundled"):
                    where = ("-i", models[name], "-o", converted.rounded(name))
                    assert run(f"{name} RTN", "gpu", *where, "--quant-method", "RTN", "--quant-type", "W4A16") == 0
            codes = {
                name: run(f"{name} verified", "verify", converted.ours(name), "--against", converted.model(name))
                for name in (*VERIFIED, *VERIFIED_LONG)
                if name in converted.cases
            }
            (root / "verified.json").write_text(json.dumps(codes))

    with ThreadPoolExecutor(2) as pool:
        for running in [pool.submit(oneshot.run, jobs, threads), pool.submit(ours)]:
            running.result()


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that make(folder) fills, in one of the processes that share the tests."""
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
    return Converted(once(tmp_path_factory, "gptq", lambda root: convert(Converted(root, CASES))), CASES)


@pytest.fixture(scope="session")
def converted_long(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    root = once(tmp_path_factory, "gptq-long", lambda root: convert(Converted(root, LONG), threads=2, extras=False))
    return Converted(root, LONG)


def reloaded(path: Path) -> tuple[Any, dict[str, Any]]:
    """A checkpoint in transformers, and what it says of missing and unexpected tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)


def divergence(original: Any, other: Any, text: str) -> float:
    """The mean KL divergence of what two models predict after each token."""
    import torch
    from transformers import AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(EXAMPLE)(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        p, q = (torch.log_softmax(m(ids).logits.float(), -1) for m in (original, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def without_experts(path: Path) -> Any:
    import torch

    model, _ = reloaded(path)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_hook(lambda _m, _given, out: torch.zeros_like(out))
    return model


def python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, which must end well."""
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done
