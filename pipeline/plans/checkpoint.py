"""Parts of every plan that starts from a checkpoint: its files and their identity, companion files, shard numbers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints.expert_function import record_functions
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError, OutputError, UnsupportedError, UsageError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.files.shards import shard_name
from ktconvert.layouts.outputs.configs import CONFIG_FILES
from ktconvert.layouts.outputs.format import collapse_equal
from ktconvert.layouts.sources.companions import require_copyable
from ktconvert.layouts.sources.containers.safetensors import INDEX
from ktconvert.layouts.sources.hub_headers import SHA256
from ktconvert.layouts.sources.remote import RemoteFile
from ktconvert.layouts.sources.source import Shard, TensorSource, open_checkpoint
from ktconvert.layouts.tensors import format_ranges
from ktconvert.pipeline.engine.download import WORTHWHILE, Download
from ktconvert.pipeline.engine.existing import read_settings
from ktconvert.pipeline.engine.plan import CARD, CONFIG, identify_by_stat
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.models.text_datasets import local_files
from ktconvert.pipeline.options.conversion_options import CalibrateOptions, QuantizationOptions
from ktconvert.pipeline.options.declare import convert_value, option_fields, with_values
from ktconvert.pipeline.options.option_groups import ConversionOptions

A = TypeVar("A", bound=QuantizationOptions | CalibrateOptions)

CODE_FACTS = ("scale", "imatrix", "second_moments", "calibration", "machine")  # facts about codes, if present
FORMAT_METADATA = {"format": "pt", "ktconvert_format": "1"}  # metadata of every shard
BASE_MEMORY = 120 << 20  # bytes of the interpreter with NumPy, and of headers


def open_source(options: Any, config: str | None = None) -> TensorSource:
    """Open the checkpoint that options name; its weights are fetched while they are needed if --stream is given.

    config  as for open_checkpoint

    Raises UsageError if that does not fit the other options.
    """
    stream = options.output if options.streaming.stream else None
    source = open_checkpoint(options.input, options.hub.revision, config, stream)
    if source.remote is None:
        return source
    not_with = {
        "--verify-inputs, which reads the whole files": options.verify_inputs,
        "GPTQ, which reads weights several times": isinstance(options, QuantizationOptions) and options.calibrated,
        "workers in other processes": not options.workers.executor.startswith("threads"),
    }
    if reasons := [reason for reason, is_given in not_with.items() if is_given]:
        problem = f"its weights are fetched while they are needed, which does not work with {reasons[0]}"
        raise UsageError(f"{options.input}: {problem}; download the model first.")
    return source


def plan_download(options: Any, source: TensorSource, stages: Sequence[Stage[Any]]) -> Download | None:
    """Return the download of a source that is fetched while it is needed; None if it is local.

    Files are fetched whole for stages that read most of them, unless --stream-ahead is 0.
    """
    if source.remote is None:
        return None
    files = {shard.name: RemoteFile(shard.name, shard.size, _find_sha256(shard)) for shard in source.shards}
    reads: dict[str, tuple[str, ...]] = {}
    whole: set[str] = set()
    for stage in stages:
        stage_reads = {
            unit.fingerprint: tuple(dict.fromkeys(source.tensors[name].file for name, *_ in unit.inputs))
            for unit in stage.units
        }
        names = {name for unit_names in stage_reads.values() for name in unit_names}
        read_bytes = sum(unit.bytes_in for unit in stage.units)
        if options.streaming.stream_ahead and read_bytes >= WORTHWHILE * sum(files[name].size for name in names):
            whole |= stage_reads.keys()
        reads |= stage_reads
    return Download(source.remote, files, reads, whole, options.streaming.stream_ahead)


def _find_sha256(shard: Shard) -> str | None:
    return shard.blob if shard.blob is not None and SHA256.fullmatch(shard.blob) else None


def read_saved_values(options: Any, *names: str) -> dict[str, Any] | None:
    """Return the values of these options that the output was begun or finished with; None for a new output.

    Raises OutputError for damaged values.
    """
    if (saved := read_settings(options.output)) is None:
        return None
    cls: type[ConversionOptions] = type(options)
    by_name = {option_field.name: option_field for option_field in option_fields(cls)}
    try:
        return {name: convert_value(by_name[name], saved[name]) for name in names if name in saved}
    except UsageError as error:
        raise OutputError(
            f"{options.output}: its recorded options cannot be read ({error.text}); start over with --overwrite."
        ) from error


def with_arch_row(options: A) -> A:
    """Return the options with the text of --arch-file, unless it holds a text already."""
    if options.arch_row is not None:
        return options
    return with_values(options, arch_row=options.arch.load_text())


def require_whole(source: TensorSource, feature: str) -> None:
    """Raise UnsupportedError if only the experts of a checkpoint can be read.

    feature  the feature that needs more, for the message
    """
    if source.container.experts_only:
        title = source.container.title
        problem = f"{feature} does not support {title}: llama.cpp's converter permutes and splits non-expert tensors"
        remedy = "use the model's safetensors release"
        raise UnsupportedError(problem, remedy, path=source.shards[0].path)


def require_complete(source: TensorSource, feature: str, reason: str) -> None:
    """Raise UnsupportedError if only the experts of a checkpoint can be read, InputError if it has no config.json.

    feature  the feature that needs more, for the message
    reason   why config.json is needed, for the message
    """
    require_whole(source, feature)
    if not (source.root / CONFIG).is_file():
        raise InputError(f"{source.root}: has no {CONFIG}, {reason}; download it too.")


def parse_layers(text: str, present: tuple[int, ...], flag: str = "--layers") -> tuple[int, ...]:
    """Return the layer numbers in text like "3-60,62" or "all".

    Raises UsageError for other text, UnsupportedError for layers that the model does not have.
    """
    if text == "all":
        return present
    chosen: set[int] = set()
    for item in text.split(","):
        if (match := re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)) is None:
            raise UsageError(f"{flag} {text}: give layer numbers and ranges like 3-60,62.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{flag} {text}: the range {first}-{last} is reversed; write {last}-{first}.")
        missing = [layer for layer in range(first, min(last, first + 100_000) + 1) if layer not in present]
        if missing:
            raise UnsupportedError(
                f"{flag} {text}: layer {missing[0]} has no experts; layers with experts: {format_ranges(present)}."
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def shape_facts(model: MoeModel, layers: Sequence[int]) -> OutputFacts:
    """Return the shape of these layers' experts for the manifest: one number if all layers agree, else a list."""
    experts, hidden, intermediate = map(collapse_equal, zip(*(model.shape(layer) for layer in layers), strict=True))
    return {
        "layers": list(layers),
        "experts": experts,
        "hidden": hidden,
        "intermediate": intermediate,
        "functions": record_functions({layer: model.functions[layer] for layer in layers}),
        "dtypes": sorted(model.dtypes),
        "shared_experts": model.has_shared_experts,
        **({"stacks": dict(model.stacks)} if model.stacks else {}),
    }


def source_identity(source: TensorSource) -> str:
    """Return one hash for all weight files of a checkpoint, independent of their paths."""
    return hashlib.sha256("".join(f"{s.header_sha256}{s.size}" for s in source.shards).encode()).hexdigest()


def source_files(source: TensorSource) -> dict[Path, SourceFile]:
    """Return every file that is read, weights first."""
    return shard_files(source) | files_in(source.companion_root, source.companions())


def shard_files(source: TensorSource) -> dict[Path, SourceFile]:
    """Return the identity of each shard."""
    return {s.path: SourceFile(s.name, s.size, s.header_sha256, s.mtime_ns, s.blob) for s in source.shards}


def files_in(root: Path, names: Iterable[str]) -> dict[Path, SourceFile]:
    """Return the identity of each of these files below root."""
    return {root / name: identify_by_stat(root / name, name) for name in names}


def option_files(options: ConversionOptions) -> Iterator[Path]:
    """Yield the local files that options name besides the input, such as a data set or an --arch-file."""
    for path in options.input_paths():
        if path.is_dir() and path != Path(options.input):
            with contextlib.suppress(InputError):  # the folder contains no texts
                yield from local_files(str(path))
        elif path.is_file() and path != Path(options.input):
            yield path


def companions(root: Path, names: Collection[str]) -> tuple[tuple[str, Path], ...]:
    """Return (name in the output, file) of these files below root but config.json. Raises InputError for clashes."""
    for name in names:
        require_copyable(root, name)
    renamed = rename_companions(names)
    copied = {renamed[name]: root / name for name in names if name != CONFIG}
    files = {*copied, CONFIG, CARD, manifest.NAME, INDEX}
    for name, path in copied.items():
        for folder in PurePosixPath(name).parents:
            if str(folder) in files:
                raise InputError(f"{path}: the output has a file named {folder}; rename that folder of the checkpoint.")
    return tuple(copied.items())


def rename_companions(names: Collection[str]) -> dict[str, str]:
    """Return the names of companion files in the output; rename those that clash with ours or would mislead loaders.

    README.md becomes README.source.md, and that of a source which is an output itself README.source.source.md.
    """
    renamed = {name: name for name in names}
    for name in (CARD, manifest.NAME, *CONFIG_FILES):
        while name in names:
            stem, _, ending = name.rpartition(".")
            renamed[name] = f"{stem}.source.{ending}"
            name = renamed[name]
    return renamed


def number_shards(stages: Sequence[Stage[Any]]) -> tuple[Stage[Any], ...]:
    """Return the stages with final names for all shards, numbered in order over all stages."""
    total = sum(unit.in_output for stage in stages for unit in stage.units)
    number = 0
    named_stages = []
    for stage in stages:
        units = []
        for unit in stage.units:
            number += unit.in_output
            units.append(replace(unit, final=shard_name(number, total)) if unit.in_output else unit)
        named_stages.append(replace(stage, units=tuple(units)))
    return tuple(named_stages)


def base_model(source: TensorSource) -> str | None:
    """Return org/name of the checkpoint from its folder in the hub cache, else from config.json; None if unknown."""
    for folder in (source.companion_root, *source.companion_root.parents):
        if folder.name.startswith("models--"):
            return "/".join(folder.name.split("--")[1:])
    name = source.config.get("_name_or_path")
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None


def shard_metadata(facts: Mapping[str, object], source: TensorSource, names: Sequence[str]) -> dict[str, str]:
    """Return the metadata of every shard: the format, these facts (objects as JSON), and the identity of the source."""
    texts = {}
    for name in names:
        value = facts[name]
        texts[name] = json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)
    return FORMAT_METADATA | texts | {"source": source_identity(source)}
