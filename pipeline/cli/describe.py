"""Descriptions of a checkpoint, an output or an unfinished conversion, as `inspect` prints them."""

from __future__ import annotations

import shlex
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.arch_file import parse_arch
from ktconvert.layouts.checkpoints.archs import ARCHS, MOST_LAYERS, Arch
from ktconvert.layouts.checkpoints.expert_function import record_functions
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import FETCH, recognize
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError, UsageError, bad_file
from ktconvert.layouts.files.manifest import is_written_by
from ktconvert.layouts.files.unfinished import find_output
from ktconvert.layouts.outputs import formats_by_option
from ktconvert.layouts.outputs.format import choose_count, explain_illegal_count, legal_counts, output_bytes
from ktconvert.layouts.outputs.measuring import Measure, measure_output
from ktconvert.layouts.outputs.opening import TRAIN, is_output, open_dequantized, open_output, refuse_adapter
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.containers import GGUF, SAFETENSORS
from ktconvert.layouts.sources.source import TensorSource, locate_checkpoint, open_checkpoint
from ktconvert.layouts.sources.url_headers import URL
from ktconvert.native_quant import kernels
from ktconvert.pipeline.cli.status import RUNNING, read_status
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.existing import find_unit_states, read_plan
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.plans.checkpoint import require_whole
from ktconvert.pipeline.plans.commands import make_plan, restore_options
from ktconvert.pipeline.plans.cpu import read_default_slices
from ktconvert.pipeline.plans.gpu import require_one_stack
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.stages.quantize_experts import sample_experts
from ktconvert.pipeline.verify.inputs import measure_dequantized
from ktconvert.pipeline.verify.tensor_checks import check_codes, check_structure, find_unverified_codes
from ktconvert.pipeline.verify.verify import Report, describe_output
from ktconvert.quantizers import equalizing

EXPLAINED = (1, 2, 4, 8)  # numbers of NUMA slices to explain if they are impossible; few machines have different ones


def describe_path(
    name: str, reporter: Reporter, revision: str | None = None, arch_file: str | None = None, *, columns: bool = False
) -> dict[str, Any]:
    """Return a JSON object about a path or hub id; "kind" is "checkpoint", "output" or "unfinished".

    A model that `cpu` and `gpu` cannot convert has "refused" with the reason.

    reporter   shows the progress of reading weights, if any are read
    arch_file  the text of --arch-file
    columns    also measure the columns of a checkpoint's down projections

    Raises InputError for missing or damaged files, and for an adapter; UsageError for `columns` of anything but a
    checkpoint.
    """
    path = Path(name).expanduser()
    output = find_output(path)
    paths = locate(output or path)
    unfinished = output is not None or (paths.plan.exists() and (paths.inside or not path.exists()))
    if not unfinished and not is_output(path) and not is_written_by(path, FETCH):
        refuse_adapter(path)
        if path.is_file() and is_output(path.parent):
            raise bad_file(path, "is one file of an output", f"give the directory {path.parent}")
        return _describe_checkpoint(name, revision, arch_file, columns=columns)
    if columns:
        raise UsageError(f"{path}: --columns is only for unconverted checkpoints; leave it out.")
    return _describe_conversion(paths) if unfinished else _describe_output(path, reporter)


def _describe_checkpoint(name: str, revision: str | None, arch_file: str | None, *, columns: bool) -> dict[str, Any]:
    """Describe a checkpoint from its headers, and list the outputs that can be made from it.

    If it is not here, only headers and configs are fetched, and the weights that `columns` measures.
    """
    rows: Sequence[Arch] = ARCHS if arch_file is None else (parse_arch(arch_file), *ARCHS)
    place = locate_checkpoint(name, revision, streamed=True)
    disk = Path(tempfile.gettempdir())
    with open_checkpoint(name, revision, stream=disk) if columns else open_checkpoint(place.path) as source:
        document: dict[str, Any] = {"kind": "checkpoint", "path": name, **_describe_files(source)}
        document["notes"] = [note for note in (place.note,) if note]
        options = ["--stream"] if URL.fullmatch(name) else []
        options += [] if revision is None else ["--revision", revision]
        document |= dequantize_output(source, name, options)
        try:
            model = recognize(source, rows, to_read=True)
        except UnsupportedError as error:
            return document | {"refused": error.text}
        document |= _describe_experts(model, source)
        document["notes"] += (*model.notes, *model.warnings)
        if columns:
            document |= {"columns": {str(layer): _measure_columns(model, layer) for layer in model.layers}}
        if model.refusal is not None:
            return document | {"refused": model.refusal}
        document |= {"methods": cpu_outputs(model), "convert": cpu_commands(model, name, options)}
        document |= {"gpu": (gpu := gpu_outputs(model))}
        return document | {"convert_gpu": gpu_commands(gpu, name, options)}


def _describe_files(source: TensorSource) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for info in source.tensors.values():
        dtypes[info.dtype] += info.nbytes
    return {
        "container": source.container.title,
        "model_type": cfg.list_families(source.config),
        "shards": len(source.shards),
        "tensors": len(source.tensors),
        "total_bytes": sum(info.nbytes for info in source.tensors.values()),
        "dtypes": dict(dtypes.most_common()),
        "ignored_files": list(source.ignored),
    }


def _describe_experts(model: MoeModel, source: TensorSource) -> dict[str, Any]:
    routed = sum(info.nbytes for layer in model.layers for info in model.layer_tensors(layer))
    mtp = sum(source.tensors[name].nbytes for name in model.mtp_tensors if name in source.tensors)
    limit = claims.find_layer_count(source.config, model.arch)
    all_layers = range(limit[1]) if limit is not None and limit[1] <= MOST_LAYERS else range(max(model.layers) + 1)
    moe_layers = set(model.layers)
    shapes = [model.shape(layer) for layer in model.layers]
    return {
        "architecture": model.arch.name,
        "moe_layers": list(model.layers),
        "dense_layers": [n for n in all_layers if n not in moe_layers],
        "mtp_layers": list(model.mtp_layers),
        "mtp_left_out_tensors": len(model.mtp_tensors),
        "experts": sorted({experts for experts, _, _ in shapes}),
        "hidden": sorted({hidden for _, hidden, _ in shapes}),
        "intermediate": sorted({intermediate for _, _, intermediate in shapes}),
        "expert_dtypes": list(model.dtypes),
        "shared_experts": model.has_shared_experts,
        "functions": record_functions(model.functions),
        "plain": model.is_plain,
        "routed_bytes": routed,
        "mtp_bytes": mtp,
        "rest_bytes": sum(info.nbytes for info in source.tensors.values()) - routed - mtp,
    }


def _measure_columns(model: MoeModel, layer: int) -> dict[str, Any]:
    """Return how much the columns of down differ (numerics.md, section 10), in some experts of a layer."""
    spreads = {}
    for expert in sample_experts(model.shape(layer)[0]):
        down = kernels.decode(model.linear(layer, expert, "down"))
        spreads[expert] = equalizing.center_and_spread(equalizing.column_levels(down))[1]
        for info in model.expert_tensors(layer, expert):
            model.source.release(info)
    worst = max(spreads, key=lambda expert: spreads[expert])
    return {
        "experts": len(spreads),
        "median": round(statistics.median(spreads.values()), 3),
        "most": round(spreads[worst], 3),
        "of_expert": worst,
        "above": sum(spread > equalizing.THRESHOLD for spread in spreads.values()),
    }


def _describe_output(path: Path, reporter: Reporter) -> dict[str, Any]:
    """Describe an output and whether it is complete.

    Reads names, sizes and headers, and 4-bit codes of outputs that ktconvert did not write.
    """
    if is_written_by(path, FETCH):
        output = open_dequantized(path)
        measured = measure_dequantized(output)
    else:
        output = open_output(path)
        measured = measure_output(output)
    report = Report(output, measured, check_structure(output, measured))
    return {
        "kind": "output",
        "path": str(path),
        **describe_output(output, measured),
        "architecture": output.facts.get("architecture"),
        "functions": output.facts.get("functions"),
        "expert_dtypes": output.facts.get("dtypes"),
        "settings": output.settings,
        "complete": not report.problems,
        "problems": report.problems,
        "codes": _find_misread_codes(output, measured, reporter),
        "notes": report.notes,
    }


def _find_misread_codes(output: Output, measured: Measure, reporter: Reporter) -> list[str] | None:
    """Return a sentence for each tensor with codes that kt-kernel misreads; None if there is nothing to read."""
    if not output.has_all_weights or not (codes := find_unverified_codes(output, measured)):
        return None
    reporter.begin(sum(tensor.nbytes for tensor in codes), 0)
    try:
        return list(check_codes(output, codes, reporter).problems)
    finally:
        reporter.end()


def _describe_conversion(paths: Paths) -> dict[str, Any]:
    """Describe the state of a conversion: every unit if its source is readable, else the journal."""
    saved = read_plan(paths)
    assert saved is not None
    records = journal.read_records(paths.journal)
    killed_run = journal.find_killed_run(records)
    is_running = read_status(paths.output)["state"] == RUNNING
    document = {
        "kind": "unfinished",
        "path": str(paths.output),
        "work_directory": str(paths.root),
        "command": saved.command,
        "input": saved.input,
        "settings": saved.settings,
        "units_done": len(journal.find_finished_units(records)),
        "running": is_running,
        "died_in": list(killed_run[1]) if killed_run and not is_running else [],
        "resume": shlex.join(["ktconvert", "resume", str(paths.output)]),
    }
    if saved.command == TRAIN:  # its plan needs the model
        return document | {"units": saved.units, "bytes_left": 0, "units_left": []}
    try:
        plan = make_plan(with_values(restore_options(paths.output, saved), verify_inputs=False))
        states = find_unit_states(plan, paths)
    except KTConvertError as error:
        return document | {"units": None, "source_problem": error.text}
    remaining = [state.unit for state in states if not state.done]
    return document | {
        "units": len(states),
        "units_done": len(states) - len(remaining),
        "bytes_left": sum(unit.bytes_in for unit in remaining),
        "units_left": [unit.name for unit in remaining],
    }


def _name_output(source_name: str) -> str:
    """Return the beginning of the name that a printed command gives an output: the checkpoint's name."""
    name = Path(source_name).expanduser().resolve().name.rpartition(":")[2]
    return name.removesuffix(SAFETENSORS.suffix).removesuffix(GGUF.suffix)


def cpu_outputs(model: MoeModel) -> list[dict[str, Any]]:
    """Return for each method the legal numbers of NUMA slices, why others are not, and the output's size by number."""
    shapes = [model.shape(layer)[1:] for layer in model.layers]
    outputs = []
    for fmt in formats_by_option("cpu").values():
        counts = legal_counts(fmt, shapes)
        reasons = {slices: explain_illegal_count(fmt, shapes, slices) for slices in EXPLAINED}
        outputs.append(
            {
                "quant_method": fmt.option,
                "method": fmt.name,
                "legal": list(counts),
                "illegal": {str(slices): reason for slices, reason in reasons.items() if reason is not None},
                "bytes": {str(slices): output_bytes(model, fmt, slices) for slices in counts},
            }
        )
    return outputs


def gpu_outputs(model: MoeModel) -> list[dict[str, Any]]:
    """Return for each --quant-type of `ktconvert gpu` the size of the output, or the reason if it is refused."""
    shapes = [model.shape(layer)[1:] for layer in model.layers]
    types: list[dict[str, Any]] = []
    for fmt in formats_by_option("gpu").values():
        try:
            require_whole(model.source, "`ktconvert gpu`")
            require_one_stack(model)
            reason = explain_illegal_count(fmt, shapes, 1)
            others = find_non_expert_tensors(
                model.source, model.expert_tensor_names(), model.quantization
            ).output_tensors()
        except (InputError, UnsupportedError) as error:
            reason = error.text
            others = ()
        nbytes = 0 if reason else output_bytes(model, fmt, 1) + sum(tensor.entry.nbytes for tensor in others)
        types.append({"quant_type": fmt.option, "refused": reason, "bytes": nbytes})
    return types


def gpu_commands(types: list[dict[str, Any]], source_name: str, options: Sequence[str]) -> list[str]:
    """Return a `ktconvert gpu` command with these options for each possible output."""
    output_name = _name_output(source_name)
    lines = []
    for quant_type in (row["quant_type"] for row in types if row["refused"] is None):
        words = ["ktconvert", "gpu", "-i", source_name, "-o", f"{output_name}-{quant_type}"]
        lines.append(shlex.join([*words, "--quant-method", "RTN", "--quant-type", quant_type, *options]))
    return lines


def dequantize_output(source: TensorSource, source_name: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the size of the output of `ktconvert dequantize`, and its command; {} if there is nothing to decode."""
    try:
        require_whole(source, "`ktconvert dequantize`")
        tensors = find_non_expert_tensors(source, (), source.quantization).output_tensors()
    except (InputError, UnsupportedError):
        return {}
    if not any(isinstance(tensor.stored, Weight) for tensor in tensors):
        return {}
    command = ["ktconvert", "dequantize", source_name, f"{_name_output(source_name)}-dequantized", *options]
    return {
        "dequantized_bytes": sum(tensor.entry.nbytes for tensor in tensors),
        "dequantize": [shlex.join(command)],
    }


def cpu_commands(model: MoeModel, source_name: str, options: Sequence[str]) -> list[str]:
    """Return a `ktconvert cpu` command with these options for each possible output, for this machine's NUMA nodes."""
    pools = read_default_slices()
    shapes = [model.shape(layer)[1:] for layer in model.layers]
    lines = []
    for option, fmt in formats_by_option("cpu").items():
        if not legal_counts(fmt, shapes):
            continue
        slices = choose_count([(fmt, sizes) for sizes in shapes], pools)
        output = f"{_name_output(source_name)}-{fmt.name}"
        words = ["ktconvert", "cpu", "-i", source_name, "-o", output, "--quant-method", option]
        lines.append(shlex.join([*words, "--numa", str(slices), *options]))
    return lines
