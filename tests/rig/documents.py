"""Every document that the product reads, one row each: how a valid one is made, and what reads it. test_fuzz.py damages
them; a reader without a row fails there. Functions import what only they need: this module is loaded again and again.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import struct
import sys
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints import adapter, hub
from ktconvert.layouts.checkpoints.arch_file import parse_arch
from ktconvert.layouts.checkpoints.archs import ARCHS
from ktconvert.layouts.checkpoints.config import experts_per_token, quantization
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.source import TensorSource, open_checkpoint, read_config, read_quantization
from ktconvert.layouts.errors import KtconvertError
from ktconvert.layouts.outputs.measuring import measure
from ktconvert.layouts.outputs.opening import is_output, open_output
from ktconvert.layouts.statistics import folder as statistics
from ktconvert.layouts.statistics.imatrix import WEIGHT_NAMES, open_imatrix
from ktconvert.layouts.statistics.second_moments import file_name, open_second_moments, tensor_entries
from ktconvert.native_quant.runtime import hot_experts
from ktconvert.pipeline import cli
from ktconvert.pipeline.calibration import chain
from ktconvert.pipeline.cli import status
from ktconvert.pipeline.engine import attempts, dask_executor, journal, lock
from ktconvert.pipeline.engine.existing import compare_plans, read_plan, read_settings, unit_states
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.units import Result, Written
from ktconvert.pipeline.models import evaluate
from ktconvert.pipeline.models.serving.authentication import read_api_key
from ktconvert.pipeline.options.option_groups import Samples
from ktconvert.pipeline.plans.commands import make_options, make_plan, restore_options
from ktconvert.pipeline.verify.tensor_checks import check_structure
from rig import conversion, mutations
from rig.files import touch
from rig.safetensors import header_of, read_file, write_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3-moe-small"
PARTED = ("--threadpool-count", 1)
RTN = ("--quant-method", "rtn", "--quant-type", "w4a16")
INDEX, MANIFEST = "model.safetensors.index.json", "manifest.json"
FIRST = "model-00001-of-0000{}.safetensors"
MODEL = "Org/Model"  # in a cache of the hub
COMMIT = "0123456789" * 4
SHAPES = {0: (2, 4, 6)}  # of statistics: experts, hidden, width
ARCH = """name = "Mine"
matches = ["qwen3_moe"]
activation = "silu"
weights_on = "output"
layers = ["num_hidden_layers"]
experts = ["num_experts"]

[[stored]]
style = "separate"
gate = "{prefix}layers.{layer}.mlp.experts.{expert}.gate_proj.weight"
up   = "{prefix}layers.{layer}.mlp.experts.{expert}.up_proj.weight"
down = "{prefix}layers.{layer}.mlp.experts.{expert}.down_proj.weight"
"""
LORA = {  # as PEFT writes it
    "alora_invocation_tokens": None,
    "alpha_pattern": {r"layers\.1\..*": 3.0},
    "base_model_name_or_path": "model",
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 2,
    "rank_pattern": {},
    "target_modules": ["gate_proj", "up_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}
CHAT = [{"role": "user", "content": "What is a mixture?"}, {"role": "assistant", "content": "Several, weighted."}]


@dataclass(frozen=True)
class Inputs:
    """A folder with a checkpoint, its outputs, and a conversion that was interrupted in its second layer."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def broken(self) -> Path:
        return self.root / "broken"

    @property
    def work(self) -> Paths:
        return locate(self.broken)

    @property
    def new(self) -> Path:
        return self.root / "new"

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of the interrupted conversion."""
        return build_plan(self.broken)

    @functools.cached_property
    def opened(self) -> TensorSource:
        return open_checkpoint(self.source)

    def file(self, *names: str) -> tuple[Path, bool]:
        """A path below a folder of documents, which is there, and whether the file is."""
        path = self.root.joinpath("documents", *names)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, path.exists()


def make_inputs(root: Path) -> Inputs:
    inputs = Inputs(root)
    conversion.checkpoint(inputs.source, layers=2, experts=1)
    for words in (
        ["cpu", "-o", root / "output", *PARTED],  # AMXINT4
        ["cpu", "-o", root / "loose", *PARTED, "--no-merge-safetensor"],
        ["gpu", "-o", root / "packed", *RTN],
        ["cpu", "-o", root / "panels", *PARTED, "--quant-method", "mxfp4"],  # in NUMA slices
        ["cpu", "-o", root / "native", *PARTED, "--quant-method", "fp8", "--layout", "kt"],
    ):
        code, said = run(*words, "-i", inputs.source, "-q")
        assert code == 0, said
    shard = inputs.source / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\xc0\x7f")  # NaN
    code, said = run("cpu", "-i", inputs.source, "-o", inputs.broken, *PARTED, "--cpuinfer-threads", 1, "-q")
    assert code == 5, said
    return inputs


class _Kept(io.BytesIO):
    """Bytes that can be read after the streams on them, of which the command makes its own, were closed."""

    def close(self) -> None:
        pass


def run(*arguments: object) -> tuple[int, str]:
    """Run a command in this process, as the real one; its exit code, and what it writes to stderr."""
    written = [_Kept(), _Kept()]
    out, err = (io.TextIOWrapper(each, encoding="utf-8") for each in written)
    before, sys.argv = sys.argv, ["ktconvert", *map(str, arguments)]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    err.flush()
    return code, written[1].getvalue().decode()


def build_plan(output: Path) -> Plan:
    old = read_plan(locate(output))
    assert old is not None
    return make_plan(restore_options(output, old))


@contextlib.contextmanager
def restored(path: Path) -> Iterator[bytes]:
    """A file that is changed within; its time of change, too, is as before."""
    whole, times = path.read_bytes(), path.stat()
    path.chmod(0o644)
    try:
        yield whole
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@dataclass(frozen=True)
class Document:
    """A document that is read.

    make      writes a valid one, unless it is there, and returns its path
    damage    how it is damaged: one of mutations.of_*
    read      what reads it, in this process: returns, or raises KtconvertError
    draws     how many are damaged in a quick run; a long run makes as many times more of each
    commands  command lines that read it, too
    modules   what `read` imports that takes seconds
    quick     whether a quick run damages any
    """

    make: Callable[[Inputs], Path]
    damage: Callable[[Random, bytes], bytes]
    read: Callable[[Inputs, Path], object]
    draws: int = 100
    commands: Callable[[Inputs], list[list[object]]] | None = None
    modules: tuple[str, ...] = ()
    quick: bool = True


# --- work directories -----------------------------------------------------------------------------


def read_saved_plan(inputs: Inputs, _: Path) -> None:
    read_settings(inputs.broken)
    old = read_plan(inputs.work)
    if old is not None:
        restore_options(inputs.broken, old)
        compare_plans(inputs.plan, old, False)
        show_status(inputs.broken)


def read_journal(inputs: Inputs, path: Path) -> None:
    records = journal.read(path)
    journal.find_killed_run(records)
    journal.find_assembled_inode(records)
    unit_states(inputs.plan, inputs.work)
    show_status(inputs.broken)
    journal.Journal(path).close()


def show_status(output: Path) -> None:
    found = status.read_status(output)
    json.dumps(found)
    status.status_lines(found)


def copy_work(inputs: Inputs, name: str) -> Paths:
    """A copy of the interrupted conversion."""
    paths = Paths(inputs.root / name, inputs.root / f"{name}{inputs.work.root.name.removeprefix('broken')}", False)
    if not paths.root.exists():
        shutil.copytree(inputs.work.root, paths.root)
    return paths


def make_attempt(inputs: Inputs) -> Path:
    paths = copy_work(inputs, "attempted")
    if not (found := [*paths.attempts.glob("*.json")]):
        begun = attempts.begin(paths, inputs.plan.units[0], "run")
        written = paths.partial / begun.name / "file"
        written.parent.mkdir()
        written.write_bytes(b"weights")
        result = Result((Written("file", 7, "0" * 64),), 2, {"layer": 1, "gate": {"relative_error": 0.5, "cosine": 1}})
        attempts.finish(paths, begun, result, ["a warning"])
        found = [*paths.attempts.glob("*.json")]
    return found[0]


def read_attempts(inputs: Inputs, _: Path) -> None:
    paths = copy_work(inputs, "attempted")
    for attempt in attempts.read(paths):
        attempt.start_record(), attempt.failure_record(), attempt.is_dead(), attempt.is_whole(paths)
        attempts.explain_death(paths, attempt)
    unit_states(inputs.plan, paths)
    show_status(paths.output)


def make_lock(inputs: Inputs) -> Path:
    path = copy_work(inputs, "locked").root / "lock.held"
    if not path.exists():
        path.write_bytes(lock.Lock(path.parent).own)
    return path


def read_lock(_: Inputs, path: Path) -> None:
    output = path.parent
    show_status(output.with_name("locked"))
    try:
        lock.acquire(path.parent, output).release()
    except KtconvertError:
        lock.unlock(path.parent, output)


def make_scheduler(inputs: Inputs) -> Path:
    path, there = inputs.file("scheduler.json")
    if not there:
        about = {"type": "Scheduler", "id": "Scheduler-0", "address": "tcp://10.0.0.1:8786", "workers": {}}
        path.write_text(json.dumps(about, indent=2))
    return path


def read_scheduler(_: Inputs, path: Path) -> None:
    dask_executor._client(lambda address: address, str(path))


def read_arrays(_: Inputs, path: Path) -> None:
    chain.read_samples(path)


def make_samples(inputs: Inputs) -> Path:
    path, there = inputs.file("samples.safetensors")
    if not there:
        lengths = np.array([3, 4], np.int64)
        write_file(path, {"input_ids": ("I64", np.arange(7)), "lengths": ("I64", lengths)}, {})
    return path


# --- outputs --------------------------------------------------------------------------------------


def read_output(root: Path) -> None:
    is_output(root)
    output = open_output(root)
    check_structure(output, measure(output))


def load_output(root: Path) -> None:
    from ktconvert.native_quant.runtime.experts import Experts

    read_output(root)
    touch(root)  # what it knows of a directory it keeps until that changes
    Experts.load(root, 0).close()


def read_packed(root: Path) -> None:
    read_output(root)
    evaluate.gpu_method(root)


def of_output(root: Path) -> list[list[object]]:
    resplit = ["resplit", root, root.with_name("new"), "--threadpool-count", 1, "--dry-run"]
    page = ["--report", root.with_name("report.html")]
    return [["inspect", root], ["verify", root, *page], ["resume", root, "--dry-run"], resplit]


def of_packed(inputs: Inputs, root: Path) -> list[list[object]]:
    check = ["verify", root, "--no-load", "--report", inputs.root / "report.html"]
    return [*of_output(root)[::2], of_output(root)[3], check, [*check, "--against", inputs.source]]


def of(
    folder: str,
    file: str,
    damage: Any = mutations.of_json,
    read: Callable[[Path], None] = read_output,
    more: Callable[[Inputs], Any] = lambda _: [],
    draws: int = 25,
) -> Document:
    """A file of an output. more: commands."""

    def commands(inputs: Inputs) -> list[list[object]]:
        root = inputs.root / folder
        return [*(of_packed(inputs, root) if folder == "packed" else of_output(root)), *more(inputs)]

    return Document(
        lambda inputs: inputs.root / folder / file,
        damage,
        lambda inputs, _: read(inputs.root / folder),
        draws,
        commands,
    )


# --- checkpoints ----------------------------------------------------------------------------------


def read_architecture(inputs: Inputs, _: Path) -> None:
    root, opened, config = inputs.source, inputs.opened, read_config(inputs.source)
    source = TensorSource(root, config, opened.shards, opened.tensors, root, quantization(config))
    recognise(source)
    experts_per_token(config, 1, 1)


def make_copies(inputs: Inputs) -> Path:
    """An index beside all tensors in one file, which it names."""
    path, there = inputs.file("copies", INDEX)
    if not there:
        shutil.copy(inputs.source / "config.json", path.parent)
        tensors: dict[str, Any] = {}
        for shard in sorted(inputs.source.glob("*.safetensors")):
            tensors |= read_file(shard)
        write_file(path.with_name("model.safetensors"), tensors, {"format": "pt"})
        path.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    return path


def read_index(_: Inputs, path: Path) -> None:
    with open_checkpoint(path.parent) as source:
        recognise(source)


def make_params(inputs: Inputs) -> Path:
    path, there = inputs.file("params", "params.json")
    if not there:
        path.write_text(json.dumps({"dim": 128, "n_layers": 2, "moe": {"num_experts": 1, "num_experts_per_tok": 1}}))
    return path


def make_quantized(method: str, file: str) -> Callable[[Inputs], Path]:
    """A checkpoint with its experts in 4 bits or FP8."""

    def make(inputs: Inputs) -> Path:
        from rig import stored

        folder = inputs.file(method)[0]
        if not folder.exists():
            whole = conversion.checkpoint(folder.with_name(f"{method} decoded"), layers=1, experts=1)
            tensors: dict[str, Any] = {}
            for shard in sorted(whole.glob("*.safetensors")):
                tensors |= read_file(shard)
                shard.unlink()
            (whole / INDEX).unlink()
            write_file(whole / "model.safetensors", tensors, {"format": "pt"})
            stored.model(whole, folder, method)
            (folder / "quantize_config.json").write_text(json.dumps(stored.CONFIGS[method]))
        return folder / file

    return make


def read_quantized(_: Inputs, path: Path) -> None:
    read_quantization(path.parent)
    with open_checkpoint(path.parent) as source:
        model = recognise(source)
        find_non_expert_tensors(source, model.expert_tensor_names(), source.quantization)


def make_gguf(inputs: Inputs) -> Path:
    path, there = inputs.file("model.gguf")
    if not there:
        from rig import gguf

        tensors = gguf.model([("Q4_0", "Q8_0", "F16")], experts=1, hidden=128, width=128)
        about = gguf.about(1, embedding_length=128, expert_count=1, expert_feed_forward_length=128)
        gguf.write(path, tensors, about)
    return path


def make_arch(inputs: Inputs) -> Path:
    path, there = inputs.file("arch.toml")
    if not there:
        path.write_text(ARCH)
    return path


def read_arch(inputs: Inputs, path: Path) -> None:
    text = make_options("cpu", input=str(inputs.source), output=str(inputs.new), arch_file=str(path)).arch.load_text()
    recognise(inputs.opened, (parse_arch(text), *ARCHS))


def make_snapshot(file: str) -> Callable[[Inputs], Path]:
    """A cache of the hub with a model in it."""

    def make(inputs: Inputs) -> Path:
        model = inputs.file("hub", f"models--{MODEL.replace('/', '--')}", "refs", "main")[0].parents[1]
        snapshot = model / "snapshots" / COMMIT
        if not snapshot.exists():
            shutil.copytree(inputs.source, snapshot)
            (model / "refs" / "main").write_text(COMMIT)
        return model / "refs" / "main" if file == "ref" else snapshot / file

    return make


def read_snapshot(inputs: Inputs, _: Path) -> None:
    cache = {"HF_HUB_CACHE": str(inputs.file("hub")[0]), "HF_HUB_OFFLINE": "1"}
    with unittest.mock.patch.dict(os.environ, cache):  # tests that follow in this process have caches of their own
        hub.resolve(MODEL)


# --- what is given beside a checkpoint ------------------------------------------------------------


def make_mask(inputs: Inputs) -> Path:
    path, there = inputs.file("mask.safetensors")
    if not there:
        write_file(path, {hot_experts.MASK_NAME: ("BOOL", np.array([[True], [False]]))})
    return path


def read_mask(_: Inputs, path: Path) -> None:
    hot_experts.masks_by_layer(str(path), None, {0: 1, 1: 1}, 2)


def make_map(inputs: Inputs) -> Path:
    path, there = inputs.file("map.txt")
    if not there:
        path.write_text("0=int8")
    return path


def read_map(inputs: Inputs, path: Path) -> None:
    """--method-map, which is no file: each of its lines is a value."""
    values = path.read_text("utf-8", "replace").splitlines()
    make_plan(
        make_options("cpu", input=str(inputs.source), output=str(inputs.new), threadpool_count=1, method_map=values)
    )


def make_statistics(file: str) -> Callable[[Inputs], Path]:
    """A folder of statistics, with second moments."""

    def make(inputs: Inputs) -> Path:
        folder = inputs.file("statistics of a model", file)[0].parent
        if not (folder / statistics.DOCUMENT).exists():
            write_statistics(folder)
        return folder / file

    return make


def write_statistics(folder: Path) -> None:
    from rig import gguf
    from rig.statistics import describe

    rng = np.random.default_rng(0)
    (experts, hidden, width) = SHAPES[0]
    tensors = {}
    for part, columns in (("gate", hidden), ("up", hidden), ("down", width)):
        name = f"blk.0.ffn_{part}_exps.weight"
        tensors[f"{name}.in_sum2"] = ("F32", rng.random((experts, columns)).astype(np.float32))
        tensors[f"{name}.counts"] = ("F32", np.full((experts, 1), 3, np.float32))
    about = {"general.type": "imatrix", "imatrix.datasets": ["text"], "imatrix.chunk_count": 1, "imatrix.chunk_size": 8}
    gguf.write(folder / statistics.IMATRIX, tensors, about)
    counts = np.full((1, experts), 3)
    write_file(folder / statistics.COUNTS, {statistics.KEY: ("I64", counts)})
    moments: dict[str, Any] = {}
    for entry in tensor_entries(SHAPES[0]):
        if entry.name == "counts":
            moments[entry.name] = ("I64", counts[0])
        elif entry.name in ("gate_up", "down"):
            k = hidden if entry.name == "gate_up" else width
            values = np.concatenate([row[first:] for first, row in enumerate(np.eye(k, dtype=np.float32))])
            moments[entry.name] = ("F32", np.broadcast_to(values, entry.shape))
        else:
            moments[entry.name] = ("F32", np.ones(entry.shape, np.float32))
    write_file(folder / file_name(0), moments, {"layer": "0"})
    describe(folder, SHAPES)


def read_statistics(_: Inputs, path: Path) -> None:
    statistics.list_files(path.parent)
    found = statistics.read_statistics(path.parent)
    found.require_model("the model", SHAPES, 1)
    use_importance(found.open_imatrix("the model", SHAPES))
    use_importance(found.open_second_moments("the model", SHAPES))


def read_moments(_: Inputs, path: Path) -> None:
    document = path.with_name(statistics.DOCUMENT)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    use_importance(open_second_moments(document, files, "the model", SHAPES))


def use_importance(found: statistics.InputStatistics) -> None:
    found.memory_bytes(2)
    for layer, (experts, _, _) in SHAPES.items():
        found.experts_without_tokens(layer)
        for expert in range(experts):
            for projection in WEIGHT_NAMES:
                found.importance(layer, expert, projection)


def make_imatrix(inputs: Inputs) -> Path:
    path, there = inputs.file("imatrix", statistics.IMATRIX)
    if not there:
        shutil.copy(make_statistics(statistics.IMATRIX)(inputs), path)
    return path


def make_old_imatrix(inputs: Inputs) -> Path:
    path, there = inputs.file("imatrix.dat")
    if not there:
        experts, hidden, width = SHAPES[0]
        data = struct.pack("<i", 3)
        for part, columns in (("gate", hidden), ("up", hidden), ("down", width)):
            name, values = f"blk.0.ffn_{part}_exps.weight".encode(), np.full(experts * columns, 0.5, "<f4")
            data += struct.pack("<i", len(name)) + name + struct.pack("<ii", 3, values.size) + values.tobytes()
        path.write_bytes(data + struct.pack("<ii", 3, 4) + b"text")
    return path


def read_imatrix(_: Inputs, path: Path) -> None:
    use_importance(open_imatrix(path, "the model", SHAPES))


def make_counts(inputs: Inputs) -> Path:
    path, there = inputs.file("counts", statistics.COUNTS)
    if not there:
        write_file(path, {statistics.KEY: ("I64", np.array([[3, 1], [2, 4]]))})
    return path


def read_counts(_: Inputs, path: Path) -> None:
    counts = statistics.read_folder_counts(path.parent)
    if counts.shape[1]:
        hot_experts.hot_fraction(counts, hot_experts.most_used_per_layer(counts, 1))


def write_adapter(folder: Path, modules: Mapping[str, tuple[int, int]]) -> None:
    """An adapter of rank 2 of these linears, as `ktconvert train` writes it."""
    matrices: dict[str, Any] = {}
    for module, (rows, columns) in modules.items():
        matrices[f"base_model.model.{module}.lora_A.weight"] = ("F32", np.ones((2, columns), np.float32))
        matrices[f"base_model.model.{module}.lora_B.weight"] = ("F32", np.ones((rows, 2), np.float32))
    write_file(folder / adapter.WEIGHTS, matrices, {"format": "pt"})
    config = {**LORA, "target_modules": sorted({module.rpartition(".")[2] for module in modules})}
    (folder / adapter.CONFIG).write_text(json.dumps(config))


def make_adapter(file: str) -> Callable[[Inputs], Path]:
    """An adapter of the source's experts."""

    def make(inputs: Inputs) -> Path:
        path, there = inputs.file("adapter", file)
        if not there:
            size = conversion.WIDTH, conversion.HIDDEN
            sizes = {"gate": size, "up": size, "down": size[::-1]}
            write_adapter(path.parent, {f"model.layers.0.mlp.experts.0.{name}_proj": sizes[name] for name in sizes})
        return path

    return make


def read_adapter(inputs: Inputs, path: Path) -> None:
    for delta in adapter.read_adapter(path.parent).values():
        delta.matrices()
    options = {"input": str(inputs.source), "output": str(inputs.new), "adapter": str(path.parent)}
    make_plan(make_options("merge-adapter", **options))


def of_adapter(inputs: Inputs) -> list[list[object]]:
    folder = inputs.root / "documents" / "adapter"
    return [["merge-adapter", inputs.source, "--adapter", folder, "-o", inputs.new, "--dry-run"]]


def make_text(inputs: Inputs) -> Path:
    path, there = inputs.file("text.txt")
    if not there:
        path.write_text("Some text: ü, 漢字.\n" * 3)
    return path


def make_key(inputs: Inputs) -> Path:
    path, there = inputs.file("key")
    if not there:
        path.write_text("sk-0123456789\n")
    return path


# --- data sets and models, which libraries read ---------------------------------------------------


def make_dataset(file: str) -> Callable[[Inputs], Path]:
    def make(inputs: Inputs) -> Path:
        path, there = inputs.file(f"dataset {file}", file)
        if not there:
            rows = [{"messages": CHAT, "source": n} for n in range(3)]
            match path.suffix:
                case ".txt":
                    path.write_text("A first line of text.\nAnd a second: ü.\n" * 5)
                case ".jsonl":
                    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
                case ".json":
                    path.write_text(json.dumps([{"instruction": "Say", "input": "x", "output": "y"}] * 3))
                case ".parquet":
                    import pyarrow
                    import pyarrow.parquet

                    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "One."}, {"text": "Two."}]), path)
        return path

    return make


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EXAMPLE)


def read_dataset(_: Inputs, path: Path) -> None:
    from ktconvert.pipeline.models.text_datasets import read_samples

    options = Samples(dataset=str(path), num_calibration_samples=4, max_sequence_length=16)
    read_samples(options, tokenizer())


def make_model(file: str) -> Callable[[Inputs], Path]:
    """The bundled model; its weights are a link."""

    def make(inputs: Inputs) -> Path:
        path = inputs.file("model", file)[0]
        for own in EXAMPLE.iterdir():
            if not (there := path.with_name(own.name)).exists():
                there.symlink_to(own) if own.suffix == ".safetensors" else shutil.copyfile(own, there)
        return path

    return make


def load_model(_: Inputs, path: Path) -> None:
    """Load a model with `run`, and let it write two tokens."""
    code, said = run("run", path.parent, "--prompt", "def ", "--max-new-tokens", 2)
    if code:
        raise KtconvertError(said)


def make_model_adapter(file: str) -> Callable[[Inputs], Path]:
    """An adapter of the bundled model's attention."""

    def make(inputs: Inputs) -> Path:
        path, there = inputs.file("adapter of a model", file)
        if not there:
            shapes = {name: about.get("shape") for name, about in header_of(EXAMPLE / "model.safetensors").items()}
            names = [name for name in shapes if name.endswith("q_proj.weight")]
            write_adapter(path.parent, {name.removesuffix(".weight"): shapes[name] for name in names})
        return path

    return make


def load_adapter(inputs: Inputs, path: Path) -> None:
    """Load an adapter as `run` does, and as `serve`."""
    from ktconvert.pipeline.models import adapter_loading, loading

    model = str(make_model("config.json")(inputs).parent)
    loading.load(loading.ModelChoice(model, adapter=path.parent))
    adapter_loading.Adapters(loading.load(loading.ModelChoice(model))[0], {"tuned": path.parent}, model)


def build_walk(_: Inputs, path: Path) -> None:
    """Build a model as `calibrate` and GPTQ do."""
    from ktconvert.pipeline.calibration.layered_model import LayeredModel

    with open_checkpoint(path.parent) as source:
        model = recognise(source)
        others = find_non_expert_tensors(source, model.expert_tensor_names(), source.quantization).tensors
        walk = LayeredModel(source, others)
        walk.tokenizer()


# --- the table ------------------------------------------------------------------------------------

of_bytes, of_gguf, of_json, of_lines, of_safetensors, of_toml = (
    mutations.of_bytes, mutations.of_gguf, mutations.of_json, mutations.of_lines, mutations.of_safetensors,
    mutations.of_toml,
)  # fmt: skip


def of_source(inputs: Inputs) -> list[list[object]]:
    source, new = inputs.source, inputs.new
    return [
        ["inspect", source],
        ["cpu", "-i", source, "-o", new, *PARTED, "--dry-run"],
        ["gpu", "-i", source, "-o", new, *RTN, "--dry-run"],
        ["merge", "-i", inputs.root / "loose", "-r", source, "-o", new, "--dry-run"],
        ["verify", inputs.root / "output", "--against", source, "--report", inputs.root / "report.html"],
    ]


def of_broken(inputs: Inputs) -> list[list[object]]:
    return [["inspect", inputs.broken], ["resume", inputs.broken, "--dry-run"], ["status", inputs.broken]]


def of_file(inputs: Inputs) -> list[list[object]]:
    path = make_gguf(inputs)
    where = ["-i", path, "-o", inputs.new]
    return [["inspect", path], ["cpu", *where, *PARTED, "--dry-run"], ["gpu", *where, *RTN, "--dry-run"]]


def of_quantized(method: str) -> Callable[[Inputs], list[list[object]]]:
    def commands(inputs: Inputs) -> list[list[object]]:
        where = ["-i", inputs.root / "documents" / method, "-o", inputs.new]
        return [
            ["inspect", where[1]],
            ["cpu", *where, *PARTED, "--dry-run"],
            ["gpu", *where, *RTN, "--dry-run"],
            ["dequantize", where[1], inputs.new, "--dry-run"],
        ]

    return commands


def of_statistics(inputs: Inputs) -> list[list[object]]:
    return [["experts", inputs.root / "documents" / "statistics of a model", "-n", 1, "-o", inputs.new]]


DOCUMENTS: Mapping[str, Document] = {
    "plan": Document(
        lambda i: i.work.plan, of_json, read_saved_plan, commands=lambda i: [*of_broken(i), ["verify", i.broken]]
    ),
    "journal": Document(lambda i: i.work.journal, of_lines, read_journal, 60, of_broken),
    "attempt": Document(make_attempt, of_json, read_attempts, 60),
    "lock": Document(make_lock, of_json, read_lock, 60),
    "scheduler file": Document(make_scheduler, of_json, read_scheduler),
    "samples of a chain": Document(make_samples, of_safetensors, read_arrays),
    "index": Document(lambda i: i.source / INDEX, of_json, read_index, 60, of_source),
    "index of one file": Document(make_copies, of_json, read_index, 60),
    "config": Document(lambda i: i.source / "config.json", of_json, read_architecture, 60, of_source),
    "params": Document(make_params, of_json, lambda _, path: read_config(path.parent)),
    "config of GPTQ": Document(
        make_quantized("GPTQ_INT4", "config.json"), of_json, read_quantized, 60, of_quantized("GPTQ_INT4")
    ),
    "quantize_config": Document(
        make_quantized("GPTQ_INT4", "quantize_config.json"), of_json, read_quantized, 60, of_quantized("GPTQ_INT4")
    ),
    "config of compressed-tensors": Document(
        make_quantized("RAWINT4", "config.json"), of_json, read_quantized, 60, of_quantized("RAWINT4")
    ),
    "config of FP8": Document(make_quantized("FP8", "config.json"), of_json, read_quantized, 60, of_quantized("FP8")),
    "header": Document(
        lambda i: i.source / FIRST.format(3), of_safetensors, lambda _, path: read_header(path), commands=of_source
    ),
    "GGUF": Document(make_gguf, of_gguf, lambda _, path: recognise(open_checkpoint(path)), 100, of_file),
    "hub's index": Document(make_snapshot(INDEX), of_json, read_snapshot, 60),
    "hub's ref": Document(make_snapshot("ref"), of_bytes, read_snapshot, 60),
    "arch file": Document(
        make_arch,
        of_toml,
        read_arch,
        60,
        lambda i: [[*words, "--arch-file", make_arch(i)] for words in of_source(i)[:3]],
    ),
    "method map": Document(make_map, of_bytes, read_map, 30),
    "mask": Document(make_mask, of_safetensors, read_mask),
    "statistics": Document(make_statistics(statistics.DOCUMENT), of_json, read_statistics, 60, of_statistics),
    "second moments": Document(make_statistics(file_name(0)), of_safetensors, read_moments, 60),
    "imatrix": Document(make_imatrix, of_gguf, read_imatrix, 60),
    "imatrix.dat": Document(make_old_imatrix, of_gguf, read_imatrix, 60),
    "counts": Document(make_counts, of_safetensors, read_counts),
    "adapter_config": Document(make_adapter(adapter.CONFIG), of_json, read_adapter, 60, of_adapter),
    "adapter": Document(make_adapter(adapter.WEIGHTS), of_safetensors, read_adapter, 60, of_adapter),
    "text": Document(make_text, of_bytes, lambda _, path: evaluate.read_text(path)),
    "API key": Document(make_key, of_bytes, lambda _, path: read_api_key(path)),
    # The same files of other outputs.
    "manifest": of(
        "output",
        MANIFEST,
        more=lambda i: [["cpu", "-i", i.source, "-o", i.root / "output", *PARTED, "--dry-run"]],
        draws=60,
    ),
    "manifest of a packed output": of(
        "packed", MANIFEST, more=lambda i: [["gpu", "-i", i.source, "-o", i.root / "packed", *RTN, "--dry-run"]]
    ),
    "manifest of a loose output": of(
        "loose", MANIFEST, more=lambda i: [["merge", "-i", i.root / "loose", "-o", i.new, "--dry-run"]]
    ),
    "index of an output": of("output", INDEX),
    "config of an output": of("output", "config.json"),
    "config of a packed output": of("packed", "config.json", read=read_packed),
    "header of an output": of("output", FIRST.format(2), of_safetensors),
    "header of a packed output": of("packed", FIRST.format(3), of_safetensors),
    "manifest of panels": of("panels", MANIFEST, read=load_output),
    "header of panels": of("panels", FIRST.format(2), of_safetensors, load_output),
    "header of a native output": of("native", FIRST.format(2), of_safetensors, load_output),
}
DOCUMENTS |= {
    f"data set {file}": Document(make_dataset(file), damage, read_dataset, 10, modules=conversion.MODELS)
    for file, damage in {"a.txt": of_bytes, "a.parquet": of_bytes, "a.jsonl": of_lines, "a.json": of_json}.items()
}
DOCUMENTS |= {
    f"{file} of a model": Document(make_model(file), of_json, load_model, 4, modules=conversion.MODELS, quick=False)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
}
DOCUMENTS |= {
    f"{file} beside a model": Document(
        make_model_adapter(file), damage, load_adapter, 4, modules=conversion.MODELS, quick=False
    )
    for file, damage in {adapter.CONFIG: of_json, adapter.WEIGHTS: of_safetensors}.items()
}
DOCUMENTS["config.json of a walk"] = Document(
    make_model("config.json"), of_json, build_walk, 4, modules=conversion.MODELS, quick=False
)
