"""Every document that the product reads, in one row: how to make a valid one, and which function reads it.

test_fuzz.py damages the documents, and fails if a function that reads a document has no row. Functions import what only
they need, since this module is imported often.
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

import click
import numpy as np

from ktconvert.layouts.checkpoints import adapter
from ktconvert.layouts.checkpoints.arch_file import parse_arch
from ktconvert.layouts.checkpoints.archs import ARCHS
from ktconvert.layouts.checkpoints.kt_adapter import name_experts
from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import KTConvertError
from ktconvert.layouts.files.documents import encode_indented
from ktconvert.layouts.outputs.measuring import measure_output
from ktconvert.layouts.outputs.opening import is_output, open_output
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.config import find_experts_per_token, parse_quantization
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.sources.source import TensorSource, open_checkpoint, read_config, read_quantization
from ktconvert.layouts.statistics import expert_counts
from ktconvert.layouts.statistics import folder as statistics
from ktconvert.layouts.statistics.imatrix import WEIGHT_NAMES, open_imatrix
from ktconvert.layouts.statistics.second_moments import file_name, open_second_moments, tensor_entries
from ktconvert.native_quant.runtime import expert_placement, hot_experts
from ktconvert.pipeline import cli
from ktconvert.pipeline.calibration import chain
from ktconvert.pipeline.cli import status, up
from ktconvert.pipeline.cli.config_file import read_defaults
from ktconvert.pipeline.engine import attempts, dask_executor, journal, lock
from ktconvert.pipeline.engine.existing import compare_plans, find_unit_states, read_plan, read_settings
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.units import Result, Written
from ktconvert.pipeline.fit.steps import Step
from ktconvert.pipeline.models import evaluate
from ktconvert.pipeline.models.serving.authentication import read_api_key
from ktconvert.pipeline.options.conversion_options import CpuOptions
from ktconvert.pipeline.options.option_groups import Samples
from ktconvert.pipeline.plans.commands import make_options, make_plan, restore_options
from ktconvert.pipeline.verify.tensor_checks import check_structure
from rig import conversion
from rig.files import touch
from rig.mutations import damage_bytes, damage_gguf, damage_json, damage_lines, damage_safetensors, damage_toml
from rig.safetensors import header_of, read_file, write_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3-moe-small"
ONE_SLICE = ("--threadpool-count", 1)
RTN = ("--quant-method", "rtn", "--quant-type", "w4a16")
INDEX, MANIFEST = "model.safetensors.index.json", "manifest.json"
FIRST = "model-00001-of-0000{}.safetensors"
MODEL = "Org/Model"  # the model in the hub's cache
COMMIT = "0123456789" * 4
SHAPES = {0: (2, 4, 6)}  # experts, hidden and width of each layer that has statistics
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
        """Return the plan of the interrupted conversion."""
        return build_plan(self.broken)

    @functools.cached_property
    def opened(self) -> TensorSource:
        return open_checkpoint(self.source)

    def file(self, *names: str) -> tuple[Path, bool]:
        """Return a path in the folder of documents, and whether the file exists; create its parent folders."""
        path = self.root.joinpath("documents", *names)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, path.exists()


def make_inputs(root: Path) -> Inputs:
    """Write the checkpoint and convert it; the last conversion fails because of a NaN."""
    inputs = Inputs(root)
    conversion.checkpoint(inputs.source, layers=2, experts=1)
    for arguments in (
        ["cpu", "-o", root / "output", *ONE_SLICE],  # AMXINT4
        ["cpu", "-o", root / "loose", *ONE_SLICE, "--no-merge-safetensor"],
        ["gpu", "-o", root / "packed", *RTN],
        ["cpu", "-o", root / "panels", *ONE_SLICE, "--quant-method", "mxfp4"],  # in NUMA slices
        ["cpu", "-o", root / "native", *ONE_SLICE, "--quant-method", "fp8", "--layout", "kt"],
    ):
        code, message = run(*arguments, "-i", inputs.source, "-q")
        assert code == 0, message
    shard = inputs.source / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\xc0\x7f")  # NaN
    code, message = run("cpu", "-i", inputs.source, "-o", inputs.broken, *ONE_SLICE, "--cpuinfer-threads", 1, "-q")
    assert code == 5, message
    return inputs


class _ReadableBytes(io.BytesIO):
    """Bytes that can still be read after the streams on them were closed; the command opens and closes its own."""

    def close(self) -> None:
        pass


def run(*arguments: object) -> tuple[int, str]:
    """Run a command in this process like the real one; return its exit code, and what it writes to stderr."""
    written = [_ReadableBytes(), _ReadableBytes()]
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
    """Build the plan of an interrupted conversion again."""
    old = read_plan(locate(output))
    assert old is not None
    return make_plan(restore_options(output, old))


@contextlib.contextmanager
def restore_file(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file that the caller changes; restore bytes and mtime afterwards."""
    data, times = path.read_bytes(), path.stat()
    path.chmod(0o644)
    try:
        yield data
    finally:
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@dataclass(frozen=True)
class Document:
    """A document that the product reads.

    make      writes a valid one, unless it exists, and returns its path
    damage    damages its bytes: a function damage_* of mutations
    read      reads it in this process: returns, or raises KTConvertError
    draws     number of damaged documents in a quick run; a long run multiplies it
    commands  command lines that also read it
    models    `read` imports the libraries that load models
    quick     include the document in a quick run
    """

    make: Callable[[Inputs], Path]
    damage: Callable[[Random, bytes], bytes]
    read: Callable[[Inputs, Path], object]
    draws: int = 100
    commands: Callable[[Inputs], list[list[object]]] | None = None
    models: bool = False
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
    records = journal.read_records(path)
    journal.find_killed_run(records)
    journal.find_assembled_inode(records)
    find_unit_states(inputs.plan, inputs.work)
    show_status(inputs.broken)
    journal.Journal(path).close()


def show_status(output: Path) -> None:
    record = status.read_status(output)
    json.dumps(record)
    status.status_lines(record)


def copy_work(inputs: Inputs, name: str) -> Paths:
    """Copy the work directory of the interrupted conversion."""
    paths = Paths(inputs.root / name, inputs.root / f"{name}{inputs.work.root.name.removeprefix('broken')}", False)
    if not paths.root.exists():
        shutil.copytree(inputs.work.root, paths.root)
    return paths


def make_attempt(inputs: Inputs) -> Path:
    paths = copy_work(inputs, "attempted")
    if not (records := [*paths.attempts.glob("*.json")]):
        begun = attempts.begin_attempt(paths, inputs.plan.units[0], "run")
        written = paths.partial / begun.name / "file"
        written.parent.mkdir()
        written.write_bytes(b"weights")
        result = Result((Written("file", 7, "0" * 64),), 2, {"layer": 1, "gate": {"relative_error": 0.5, "cosine": 1}})
        attempts.record_result(paths, begun, result, ["a warning"])
        records = [*paths.attempts.glob("*.json")]
    return records[0]


def read_attempts(inputs: Inputs, _: Path) -> None:
    paths = copy_work(inputs, "attempted")
    for attempt in attempts.read_attempts(paths):
        attempt.start_record(), attempt.failure_record(), attempt.is_dead(), attempt.is_whole(paths)
        attempts.explain_death(paths, attempt)
    find_unit_states(inputs.plan, paths)
    show_status(paths.output)


def make_lock(inputs: Inputs) -> Path:
    path = copy_work(inputs, "locked").root / "lock.held"
    if not path.exists():
        path.write_bytes(lock.Lock(path.parent).content)
    return path


def read_lock(_: Inputs, path: Path) -> None:
    output = path.parent
    show_status(output.with_name("locked"))
    try:
        lock.acquire(path.parent, output).release()
    except KTConvertError:
        lock.unlock(path.parent, output)


def make_scheduler(inputs: Inputs) -> Path:
    path, exists = inputs.file("scheduler.json")
    if not exists:
        document = {"type": "Scheduler", "id": "Scheduler-0", "address": "tcp://10.0.0.1:8786", "workers": {}}
        path.write_text(json.dumps(document, indent=2))
    return path


def read_scheduler(_: Inputs, path: Path) -> None:
    dask_executor._connect_client(lambda address: address, str(path))


def read_arrays(_: Inputs, path: Path) -> None:
    chain.read_samples(path)


def make_samples(inputs: Inputs) -> Path:
    path, exists = inputs.file("samples.safetensors")
    if not exists:
        lengths = np.array([3, 4], np.int64)
        write_file(path, {"input_ids": ("I64", np.arange(7)), "lengths": ("I64", lengths)}, {})
    return path


# --- outputs --------------------------------------------------------------------------------------


def read_output(root: Path) -> None:
    is_output(root)
    output = open_output(root)
    check_structure(output, measure_output(output))


def load_output(root: Path) -> None:
    from ktconvert.native_quant.runtime.experts import KTExperts

    read_output(root)
    touch(root)  # it caches what it knows of a directory until the directory changes
    KTExperts.load(root, 0).close()


def read_packed(root: Path) -> None:
    read_output(root)
    evaluate.gpu_method(root)


def output_commands(root: Path) -> list[list[object]]:
    resplit = ["resplit", root, root.with_name("new"), "--threadpool-count", 1, "--dry-run"]
    page = ["--report", root.with_name("report.html")]
    return [["inspect", root], ["verify", root, *page], ["resume", root, "--dry-run"], resplit]


def packed_commands(inputs: Inputs, root: Path) -> list[list[object]]:
    check = ["verify", root, "--no-load", "--report", inputs.root / "report.html"]
    return [*output_commands(root)[::2], output_commands(root)[3], check, [*check, "--against", inputs.source]]


def output_document(
    folder: str,
    file: str,
    damage: Any = damage_json,
    read: Callable[[Path], None] = read_output,
    more: Callable[[Inputs], Any] = lambda _: [],
    draws: int = 25,
) -> Document:
    """Describe a file of an output. more: further commands that read it."""

    def commands(inputs: Inputs) -> list[list[object]]:
        root = inputs.root / folder
        return [*(packed_commands(inputs, root) if folder == "packed" else output_commands(root)), *more(inputs)]

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
    source = TensorSource(root, config, opened.shards, opened.tensors, root, parse_quantization(config))
    recognize(source)
    find_experts_per_token(config, 1, 1)


def make_copies(inputs: Inputs) -> Path:
    """Write a checkpoint with all tensors in one file, and an index that names it."""
    path, exists = inputs.file("copies", INDEX)
    if not exists:
        shutil.copy(inputs.source / "config.json", path.parent)
        tensors: dict[str, Any] = {}
        for shard in sorted(inputs.source.glob("*.safetensors")):
            tensors |= read_file(shard)
        write_file(path.with_name("model.safetensors"), tensors, {"format": "pt"})
        path.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    return path


def read_index(_: Inputs, path: Path) -> None:
    with open_checkpoint(path.parent) as source:
        recognize(source)


def make_params(inputs: Inputs) -> Path:
    path, exists = inputs.file("params", "params.json")
    if not exists:
        path.write_text(json.dumps({"dim": 128, "n_layers": 2, "moe": {"num_experts": 1, "num_experts_per_tok": 1}}))
    return path


def make_quantized(method: str, file: str) -> Callable[[Inputs], Path]:
    """Return a function that writes a checkpoint with its experts in 4 bits or FP8."""

    def make(inputs: Inputs) -> Path:
        from rig import stored

        folder = inputs.file(method)[0]
        if not folder.exists():
            decoded = conversion.checkpoint(folder.with_name(f"{method} decoded"), layers=1, experts=1)
            tensors: dict[str, Any] = {}
            for shard in sorted(decoded.glob("*.safetensors")):
                tensors |= read_file(shard)
                shard.unlink()
            (decoded / INDEX).unlink()
            write_file(decoded / "model.safetensors", tensors, {"format": "pt"})
            stored.model(decoded, folder, method)
            (folder / "quantize_config.json").write_text(json.dumps(stored.CONFIGS[method]))
        return folder / file

    return make


def read_quantized(_: Inputs, path: Path) -> None:
    read_quantization(path.parent)
    with open_checkpoint(path.parent) as source:
        model = recognize(source)
        find_non_expert_tensors(source, model.expert_tensor_names(), source.quantization)


def make_gguf(inputs: Inputs) -> Path:
    path, exists = inputs.file("model.gguf")
    if not exists:
        from rig import gguf

        tensors = gguf.model([("Q4_0", "Q8_0", "F16")], experts=1, hidden=128, width=128)
        metadata = gguf.model_metadata(1, embedding_length=128, expert_count=1, expert_feed_forward_length=128)
        gguf.write(path, tensors, metadata)
    return path


def make_arch(inputs: Inputs) -> Path:
    path, exists = inputs.file("arch.toml")
    if not exists:
        path.write_text(ARCH)
    return path


def read_arch(inputs: Inputs, path: Path) -> None:
    text = make_options("cpu", input=str(inputs.source), output=str(inputs.new), arch_file=str(path)).arch.load_text()
    recognize(inputs.opened, (parse_arch(text), *ARCHS))


def make_config(inputs: Inputs) -> Path:
    path, exists = inputs.file("ktconvert", "config.toml")
    if not exists:
        path.write_text(
            "[all]\nthreads = 1\nport = 1\n[cpu]\nmethod-map = ['0=int8']\noverwrite = true\nscale = 'mse'\n"
        )
    return path


def read_config_file(_: Inputs, path: Path) -> None:
    with unittest.mock.patch.dict(os.environ, {"XDG_CONFIG_HOME": str(path.parents[1])}):
        read_defaults("cpu", CpuOptions, click.Context(cli.group))


def make_snapshot(file: str) -> Callable[[Inputs], Path]:
    """Return a function that writes a cache of the hub with a model."""

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
    with unittest.mock.patch.dict(os.environ, cache):  # later tests in this process have their own caches
        hub.resolve(MODEL)


# --- files that a user passes besides a checkpoint ------------------------------------------------------------


def make_mask(inputs: Inputs) -> Path:
    path, exists = inputs.file("mask.safetensors")
    if not exists:
        write_file(path, {hot_experts.MASK_NAME: ("BOOL", np.array([[True], [False]]))})
    return path


def read_mask(_: Inputs, path: Path) -> None:
    hot_experts.masks_by_layer(str(path), None, {0: 1, 1: 1}, 2)


def make_map(inputs: Inputs) -> Path:
    path, exists = inputs.file("map.txt")
    if not exists:
        path.write_text("0=int8")
    return path


def read_map(inputs: Inputs, path: Path) -> None:
    """Read --method-map, which is not a file: each line is one value of the option."""
    values = path.read_text("utf-8", "replace").splitlines()
    make_plan(make_options("cpu", input=str(inputs.source), output=str(inputs.new), numa=1, method_map=values))


def make_statistics(file: str) -> Callable[[Inputs], Path]:
    """Return a function that writes a folder of statistics with second moments."""

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
    for projection, columns in (("gate", hidden), ("up", hidden), ("down", width)):
        name = f"blk.0.ffn_{projection}_exps.weight"
        tensors[f"{name}.in_sum2"] = ("F32", rng.random((experts, columns)).astype(np.float32))
        tensors[f"{name}.counts"] = ("F32", np.full((experts, 1), 3, np.float32))
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": ["text"],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": 8,
    }
    gguf.write(folder / statistics.IMATRIX, tensors, metadata)
    counts = np.full((1, experts), 3)
    write_file(folder / statistics.COUNTS, {statistics.COUNTS_KEY: ("I64", counts)})
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
    folder_statistics = statistics.read_statistics(path.parent)
    folder_statistics.require_model("the model", SHAPES, 1)
    use_importance(folder_statistics.open_imatrix("the model", SHAPES))
    use_importance(folder_statistics.open_second_moments("the model", SHAPES))


def read_moments(_: Inputs, path: Path) -> None:
    document = path.with_name(statistics.DOCUMENT)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    use_importance(open_second_moments(document, files, "the model", SHAPES))


def use_importance(input_statistics: statistics.InputStatistics) -> None:
    input_statistics.memory_bytes(2)
    for layer, (experts, _, _) in SHAPES.items():
        input_statistics.experts_without_tokens(layer)
        for expert in range(experts):
            for projection in WEIGHT_NAMES:
                input_statistics.read_importance(layer, expert, projection)


def make_imatrix(inputs: Inputs) -> Path:
    path, exists = inputs.file("imatrix", statistics.IMATRIX)
    if not exists:
        shutil.copy(make_statistics(statistics.IMATRIX)(inputs), path)
    return path


def make_old_imatrix(inputs: Inputs) -> Path:
    path, exists = inputs.file("imatrix.dat")
    if not exists:
        experts, hidden, width = SHAPES[0]
        data = struct.pack("<i", 3)
        for projection, columns in (("gate", hidden), ("up", hidden), ("down", width)):
            name, values = f"blk.0.ffn_{projection}_exps.weight".encode(), np.full(experts * columns, 0.5, "<f4")
            data += struct.pack("<i", len(name)) + name + struct.pack("<ii", 3, values.size) + values.tobytes()
        path.write_bytes(data + struct.pack("<ii", 3, 4) + b"text")
    return path


def read_imatrix(_: Inputs, path: Path) -> None:
    use_importance(open_imatrix(path, "the model", SHAPES))


def make_counts(inputs: Inputs) -> Path:
    path, exists = inputs.file("counts", statistics.COUNTS)
    if not exists:
        write_file(path, {statistics.COUNTS_KEY: ("I64", np.array([[3, 1], [2, 4]]))})
    return path


def read_counts(_: Inputs, path: Path) -> None:
    counts = statistics.read_folder_counts(path.parent)
    if counts.shape[1]:
        hot_experts.hot_fraction(counts, hot_experts.most_used_per_layer(counts, 1))


def make_expert_counts(inputs: Inputs) -> Path:
    path, exists = inputs.file("expert counts", expert_counts.NAME)
    if not exists:
        path.write_bytes(expert_counts.encode_counts(np.array([[3, 1], [2, 4]])))
    return path


def make_recording(inputs: Inputs) -> Path:
    """Write what SGLang's recorder writes in the mode stat."""
    import torch

    path, exists = inputs.file("recording", "expert_distribution_recorder_1.pt")
    if not exists:
        torch.save({"rank": 0, "logical_count": torch.ones(3, 2, 4, dtype=torch.int64)}, path)
    return path


def write_adapter(folder: Path, modules: Mapping[str, tuple[int, int]]) -> None:
    """Write an adapter of rank 2 for these linears, as `ktconvert train` does."""
    matrices: dict[str, Any] = {}
    for module, (rows, columns) in modules.items():
        matrices[f"base_model.model.{module}.lora_A.weight"] = ("F32", np.ones((2, columns), np.float32))
        matrices[f"base_model.model.{module}.lora_B.weight"] = ("F32", np.ones((rows, 2), np.float32))
    write_file(folder / adapter.WEIGHTS, matrices, {"format": "pt"})
    config = {**LORA, "target_modules": sorted({module.rpartition(".")[2] for module in modules})}
    (folder / adapter.CONFIG).write_text(json.dumps(config))


def make_adapter(file: str) -> Callable[[Inputs], Path]:
    """Return a function that writes an adapter of the source's experts."""

    def make(inputs: Inputs) -> Path:
        path, exists = inputs.file("adapter", file)
        if not exists:
            size = conversion.WIDTH, conversion.HIDDEN
            sizes = {"gate": size, "up": size, "down": size[::-1]}
            write_adapter(path.parent, {f"model.layers.0.mlp.experts.0.{name}_proj": sizes[name] for name in sizes})
        return path

    return make


def read_adapter(inputs: Inputs, path: Path) -> None:
    names = name_experts(recognize(open_checkpoint(inputs.source)))
    for delta in adapter.read_adapter(path.parent, names).values():
        delta.matrices()
    options = {"input": str(inputs.source), "output": str(inputs.new), "adapter": str(path.parent)}
    make_plan(make_options("merge-adapter", **options))
    copy = inputs.root / "adapter as PEFT's"
    shutil.rmtree(copy, ignore_errors=True)
    adapter.write_peft_adapter(path.parent, copy, names)


def adapter_commands(inputs: Inputs) -> list[list[object]]:
    folder = inputs.root / "documents" / "adapter"
    return [["merge-adapter", inputs.source, "--adapter", folder, "-o", inputs.new, "--dry-run"]]


def make_text(inputs: Inputs) -> Path:
    path, exists = inputs.file("text.txt")
    if not exists:
        path.write_text("Some text: ü, 漢字.\n" * 3)
    return path


def make_setup(inputs: Inputs) -> Path:
    path, exists = inputs.file("setup", up.SETUP)
    if not exists:
        steps = [Step("convert", "ktconvert cpu -i a -o b", "b"), Step("launch", "ktconvert serve a --cpu-weights b")]
        path.write_bytes(encode_indented(up.Setup({"model": "a", "revision": None, "target": [1]}, steps, 1)))
    return path


def make_key(inputs: Inputs) -> Path:
    path, exists = inputs.file("key")
    if not exists:
        path.write_text("sk-0123456789\n")
    return path


# --- data sets and models that libraries read ---------------------------------------------------


def make_dataset(file: str) -> Callable[[Inputs], Path]:
    def make(inputs: Inputs) -> Path:
        path, exists = inputs.file(f"dataset {file}", file)
        if not exists:
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

    options = Samples(dataset=str(path), num_calibration_samples=4, sequence_length=16)
    read_samples(options, tokenizer())


def make_model(file: str) -> Callable[[Inputs], Path]:
    """Return a function that copies the bundled model; its weights are a link."""

    def make(inputs: Inputs) -> Path:
        path = inputs.file("model", file)[0]
        for original in EXAMPLE.iterdir():
            copy = path.with_name(original.name)
            if copy.exists():
                continue
            if original.suffix == ".safetensors":
                copy.symlink_to(original)
            else:
                shutil.copyfile(original, copy)
        return path

    return make


def load_model(_: Inputs, path: Path) -> None:
    """Load a model with `run`, and generate two tokens."""
    code, message = run("run", path.parent, "--prompt", "def ", "--max-new-tokens", 2)
    if code:
        raise KTConvertError(message)


def make_model_adapter(file: str) -> Callable[[Inputs], Path]:
    """Return a function that writes an adapter of the bundled model's attention."""

    def make(inputs: Inputs) -> Path:
        path, exists = inputs.file("adapter of a model", file)
        if not exists:
            shapes = {name: about.get("shape") for name, about in header_of(EXAMPLE / "model.safetensors").items()}
            names = [name for name in shapes if name.endswith("q_proj.weight")]
            write_adapter(path.parent, {name.removesuffix(".weight"): shapes[name] for name in names})
        return path

    return make


def load_adapter(inputs: Inputs, path: Path) -> None:
    """Load an adapter as `run` and `serve` do."""
    from ktconvert.pipeline.models import adapter_loading, loading

    model = str(make_model("config.json")(inputs).parent)
    loading.load_model_and_tokenizer(loading.ModelChoice(model, adapter=path.parent))
    adapter_loading.Adapters(
        loading.load_model_and_tokenizer(loading.ModelChoice(model))[0], {"tuned": path.parent}, model
    )


def build_calibration_model(_: Inputs, path: Path) -> None:
    """Build a model as `calibrate` and GPTQ do."""
    from ktconvert.pipeline.calibration.layered_model import LayeredModel

    with open_checkpoint(path.parent) as source:
        model = recognize(source)
        others = find_non_expert_tensors(source, model.expert_tensor_names(), source.quantization).tensors
        LayeredModel(source, others).tokenizer()


# --- the table ------------------------------------------------------------------------------------


def source_commands(inputs: Inputs) -> list[list[object]]:
    source, new = inputs.source, inputs.new
    return [
        ["inspect", source],
        ["cpu", "-i", source, "-o", new, *ONE_SLICE, "--dry-run"],
        ["gpu", "-i", source, "-o", new, *RTN, "--dry-run"],
        ["merge", "-i", inputs.root / "loose", "-r", source, "-o", new, "--dry-run"],
        ["verify", inputs.root / "output", "--against", source, "--report", inputs.root / "report.html"],
        ["models", inputs.root],
    ]


def broken_commands(inputs: Inputs) -> list[list[object]]:
    return [
        ["inspect", inputs.broken],
        ["resume", inputs.broken, "--dry-run"],
        ["status", inputs.broken],
        ["models", inputs.root],
    ]


def gguf_commands(inputs: Inputs) -> list[list[object]]:
    path = make_gguf(inputs)
    where = ["-i", path, "-o", inputs.new]
    return [["inspect", path], ["cpu", *where, *ONE_SLICE, "--dry-run"], ["gpu", *where, *RTN, "--dry-run"]]


def quantized_commands(method: str) -> Callable[[Inputs], list[list[object]]]:
    def commands(inputs: Inputs) -> list[list[object]]:
        where = ["-i", inputs.root / "documents" / method, "-o", inputs.new]
        return [
            ["inspect", where[1]],
            ["cpu", *where, *ONE_SLICE, "--dry-run"],
            ["gpu", *where, *RTN, "--dry-run"],
            ["dequantize", where[1], inputs.new, "--dry-run"],
        ]

    return commands


def statistics_commands(inputs: Inputs) -> list[list[object]]:
    return [["experts", inputs.root / "documents" / "statistics of a model", "-n", 1, "-o", inputs.new]]


DOCUMENTS: Mapping[str, Document] = {
    "plan": Document(
        lambda i: i.work.plan,
        damage_json,
        read_saved_plan,
        commands=lambda i: [*broken_commands(i), ["verify", i.broken]],
    ),
    "journal": Document(lambda i: i.work.journal, damage_lines, read_journal, 60, broken_commands),
    "attempt": Document(make_attempt, damage_json, read_attempts, 60),
    "lock": Document(make_lock, damage_json, read_lock, 60),
    "scheduler file": Document(make_scheduler, damage_json, read_scheduler),
    "samples of a chain": Document(make_samples, damage_safetensors, read_arrays),
    "index": Document(lambda i: i.source / INDEX, damage_json, read_index, 60, source_commands),
    "index of one file": Document(make_copies, damage_json, read_index, 60),
    "config": Document(lambda i: i.source / "config.json", damage_json, read_architecture, 60, source_commands),
    "params": Document(make_params, damage_json, lambda _, path: read_config(path.parent)),
    "config of GPTQ": Document(
        make_quantized("GPTQ_INT4", "config.json"), damage_json, read_quantized, 60, quantized_commands("GPTQ_INT4")
    ),
    "quantize_config": Document(
        make_quantized("GPTQ_INT4", "quantize_config.json"),
        damage_json,
        read_quantized,
        60,
        quantized_commands("GPTQ_INT4"),
    ),
    "config of compressed-tensors": Document(
        make_quantized("RAWINT4", "config.json"), damage_json, read_quantized, 60, quantized_commands("RAWINT4")
    ),
    "config of FP8": Document(
        make_quantized("FP8", "config.json"), damage_json, read_quantized, 60, quantized_commands("FP8")
    ),
    "header": Document(
        lambda i: i.source / FIRST.format(3),
        damage_safetensors,
        lambda _, path: read_header(path),
        commands=source_commands,
    ),
    "GGUF": Document(make_gguf, damage_gguf, lambda _, path: recognize(open_checkpoint(path)), 100, gguf_commands),
    "hub's index": Document(make_snapshot(INDEX), damage_json, read_snapshot, 60),
    "hub's ref": Document(make_snapshot("ref"), damage_bytes, read_snapshot, 60),
    "arch file": Document(
        make_arch,
        damage_toml,
        read_arch,
        60,
        lambda i: [[*command, "--arch-file", make_arch(i)] for command in source_commands(i)[:3]],
    ),
    "config file": Document(make_config, damage_toml, read_config_file, 60),
    "method map": Document(make_map, damage_bytes, read_map, 30),
    "mask": Document(make_mask, damage_safetensors, read_mask),
    "statistics": Document(make_statistics(statistics.DOCUMENT), damage_json, read_statistics, 60, statistics_commands),
    "second moments": Document(make_statistics(file_name(0)), damage_safetensors, read_moments, 60),
    "imatrix": Document(make_imatrix, damage_gguf, read_imatrix, 60),
    "imatrix.dat": Document(make_old_imatrix, damage_gguf, read_imatrix, 60),
    "counts": Document(make_counts, damage_safetensors, read_counts),
    "expert counts": Document(
        make_expert_counts, damage_json, lambda _, path: expert_counts.read_counts_file(path), 60
    ),
    "recording": Document(make_recording, damage_bytes, lambda _, path: expert_placement.read_recording(path), 60),
    "adapter_config": Document(make_adapter(adapter.CONFIG), damage_json, read_adapter, 60, adapter_commands),
    "adapter": Document(make_adapter(adapter.WEIGHTS), damage_safetensors, read_adapter, 60, adapter_commands),
    "text": Document(make_text, damage_bytes, lambda _, path: evaluate.read_text(path)),
    "setup of a server": Document(make_setup, damage_json, lambda _, path: up.read_setup(path.parent)),
    "API key": Document(make_key, damage_bytes, lambda _, path: read_api_key(path)),
    # Files of other outputs.
    "manifest": output_document(
        "output",
        MANIFEST,
        more=lambda i: [["cpu", "-i", i.source, "-o", i.root / "output", *ONE_SLICE, "--dry-run"]],
        draws=60,
    ),
    "manifest of a packed output": output_document(
        "packed", MANIFEST, more=lambda i: [["gpu", "-i", i.source, "-o", i.root / "packed", *RTN, "--dry-run"]]
    ),
    "manifest of a loose output": output_document(
        "loose", MANIFEST, more=lambda i: [["merge", "-i", i.root / "loose", "-o", i.new, "--dry-run"]]
    ),
    "index of an output": output_document("output", INDEX),
    "config of an output": output_document("output", "config.json"),
    "config of a packed output": output_document("packed", "config.json", read=read_packed),
    "header of an output": output_document("output", FIRST.format(2), damage_safetensors),
    "header of a packed output": output_document("packed", FIRST.format(3), damage_safetensors),
    "manifest of panels": output_document("panels", MANIFEST, read=load_output),
    "header of panels": output_document("panels", FIRST.format(2), damage_safetensors, load_output),
    "header of a native output": output_document("native", FIRST.format(2), damage_safetensors, load_output),
}
DOCUMENTS |= {
    f"data set {file}": Document(make_dataset(file), damage, read_dataset, 10, models=True)
    for file, damage in {
        "a.txt": damage_bytes,
        "a.parquet": damage_bytes,
        "a.jsonl": damage_lines,
        "a.json": damage_json,
    }.items()
}
DOCUMENTS |= {
    f"{file} of a model": Document(make_model(file), damage_json, load_model, 4, models=True, quick=False)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
}
DOCUMENTS |= {
    f"{file} beside a model": Document(make_model_adapter(file), damage, load_adapter, 4, models=True, quick=False)
    for file, damage in {adapter.CONFIG: damage_json, adapter.WEIGHTS: damage_safetensors}.items()
}
DOCUMENTS["config.json of a calibration run"] = Document(
    make_model("config.json"), damage_json, build_calibration_model, 4, models=True, quick=False
)
