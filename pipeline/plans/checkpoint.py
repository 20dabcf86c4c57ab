"""What every plan that starts from a checkpoint needs: its files, their identity, their companions, numbered shards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints.archs import ARCHS, Arch
from ktconvert.layouts.checkpoints.companions import require_copyable
from ktconvert.layouts.checkpoints.containers.safetensors import INDEX
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import InputError, OutputError, UnsupportedError, UsageError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.files.shards import shard_name
from ktconvert.layouts.outputs.card import CONFIG_FILES, ranges
from ktconvert.layouts.outputs.format import one_or_all
from ktconvert.pipeline.engine.existing import begun_with
from ktconvert.pipeline.engine.plan import CARD, CONFIG, Request, seen
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.models.text_datasets import local_files
from ktconvert.pipeline.options.declare import checked, leaves, paths_read, with_values
from ktconvert.pipeline.options.option_groups import ConversionOptions
from ktconvert.pipeline.options.quantization import CalibrateOptions, QuantizationOptions

A = TypeVar("A", bound=QuantizationOptions | CalibrateOptions)

ABOUT_CODES = ("scale", "imatrix", "second_moments", "calibration", "machine")  # facts, where there are any
BASE_MEMORY = 120 << 20  # bytes: the interpreter with NumPy, and headers


def rows_for(arch_file: str | None) -> tuple[Arch, ...]:
    """The table of architectures, after the row in this text of an --arch-file, which the plan keeps for resume."""
    if not arch_file:
        return ARCHS
    from ktconvert.layouts.checkpoints.arch_file import parse_arch

    return (parse_arch(arch_file), *ARCHS)


def begun_values(request: Request[Any], *names: str) -> dict[str, Any] | None:
    """Values of these options with which the output was begun or finished, or None. OutputError for damaged ones."""
    if (begun := begun_with(request.output)) is None:
        return None
    cls: type[ConversionOptions] = type(request.options)
    known = {leaf.name: leaf for leaf in leaves(cls)}
    try:
        return {name: checked(known[name], begun[name]) for name in names if name in begun}
    except ValueError as error:
        raise OutputError(
            f"{request.output}: what it was begun with cannot be understood ({error}); start over with --overwrite."
        ) from error


def with_arch_row(request: Request[A]) -> Request[A]:
    """The request with the text of --arch-file, unless it has one already."""
    if request.options.arch_row is not None:
        return request
    return replace(request, options=with_values(request.options, arch_row=request.options.arch.text()))


def require_whole(source: TensorSource, what: str) -> None:
    """Raise UnsupportedError where nothing but the experts of a checkpoint can be read; `what` needs more."""
    if source.container.experts_only:
        title = source.container.title
        why = f"{title} is no input of {what}: llama.cpp's converter permutes and splits tensors outside the experts"
        remedy = "use the model's safetensors release"
        raise UnsupportedError(f"{source.root}: {why}; {remedy}.")


def require_complete(source: TensorSource, what: str, why: str) -> None:
    """UnsupportedError where `what` cannot read all of a checkpoint, InputError (and why) without config.json."""
    require_whole(source, what)
    if not (source.root / CONFIG).is_file():
        raise InputError(f"{source.root}: has no {CONFIG}, {why}; download it too.")


def parse_layers(text: str, present: tuple[int, ...], flag: str = "--layers") -> tuple[int, ...]:
    """Layer numbers of `text`, "3-60,62" or "all". Raises UsageError for anything else or a layer that is not there."""
    if text == "all":
        return present
    chosen: set[int] = set()
    for item in text.split(","):
        if (match := re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)) is None:
            raise UsageError(f"{flag} {text}: give layer numbers and ranges like 3-60,62.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{flag} {text}: the range {first}-{last} runs backwards; write {last}-{first}.")
        absent = [n for n in range(first, min(last, first + 100_000) + 1) if n not in present]
        if absent:
            raise UsageError(
                f"{flag} {text}: layer {absent[0]} has no experts here; those that do are {ranges(present)}."
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def shape_facts(model: MoeModel, layers: Sequence[int]) -> dict[str, Any]:
    """What these layers' experts are, for the manifest: a number where all layers agree, else a list of all values."""
    experts, hidden, intermediate = map(one_or_all, zip(*(model.shape(layer) for layer in layers), strict=True))
    return {
        "layers": list(layers),
        "experts": experts,
        "hidden": hidden,
        "intermediate": intermediate,
        "activation": model.activation,
        "weights_on": model.weights_on,
        "dtypes": sorted(model.dtypes),
    }


def source_identity(source: TensorSource) -> str:
    """One hash for all weight files of a checkpoint, independent of where they lie."""
    return hashlib.sha256("".join(f"{s.header_sha256}{s.size}" for s in source.shards).encode()).hexdigest()


def source_files(source: TensorSource) -> dict[Path, SourceFile]:
    """Every file that is read, weights first."""
    return shards_of(source) | files_below(source.companion_root, source.companions())


def shards_of(source: TensorSource) -> dict[Path, SourceFile]:
    return {s.path: SourceFile(s.name, s.size, s.header_sha256, s.mtime_ns, s.blob) for s in source.shards}


def files_below(root: Path, names: Iterable[str]) -> dict[Path, SourceFile]:
    return {root / name: seen(root / name, name) for name in names}


def files_named(options: ConversionOptions) -> Iterator[Path]:
    """The local files that options name beside the input, such as a data set or a row of the table of architectures."""
    for path in paths_read(options):
        if path.is_dir() and path != Path(options.input):
            with contextlib.suppress(InputError):  # no folder of texts
                yield from local_files(str(path))
        elif path.is_file() and path != Path(options.input):
            yield path


def companions(root: Path, names: Collection[str]) -> tuple[tuple[str, Path], ...]:
    """(name in the output, file) of all these names below root but config.json. InputError if one cannot be copied."""
    for name in names:
        require_copyable(root, name)
    renamed = names_in_output(names)
    copied = {renamed[name]: root / name for name in names if name != CONFIG}
    files = {*copied, CONFIG, CARD, manifest.NAME, INDEX}
    for name, path in copied.items():
        for folder in PurePosixPath(name).parents:
            if str(folder) in files:
                raise InputError(f"{path}: the output has a file {folder}; rename that folder of the checkpoint.")
    return tuple(copied.items())


def names_in_output(names: Collection[str]) -> dict[str, str]:
    """The names of companions in the output. What it has itself, or would be believed of it, is renamed:
    README.md becomes README.source.md, and that of a converted source README.source.source.md.
    """
    renamed = {name: name for name in names}
    for name in (CARD, manifest.NAME, *CONFIG_FILES):
        while name in names:
            stem, _, ending = name.rpartition(".")
            renamed[name] = f"{stem}.source.{ending}"
            name = renamed[name]
    return renamed


def number_shards(stages: Sequence[Stage[Any]]) -> tuple[Stage[Any], ...]:
    """Final names for all shards, in order over all stages."""
    total = sum(unit.kept for stage in stages for unit in stage.units)
    number, named = 0, []
    for stage in stages:
        units = []
        for unit in stage.units:
            number += unit.kept
            units.append(replace(unit, final=shard_name(number, total)) if unit.kept else unit)
        named.append(replace(stage, units=tuple(units)))
    return tuple(named)


def base_model(source: TensorSource) -> str | None:
    """org/name of the checkpoint, by its folder in the hub cache, else by config.json; None if neither has it."""
    for folder in (source.companion_root, *source.companion_root.parents):
        if folder.name.startswith("models--"):
            return "/".join(folder.name.split("--")[1:])
    name = source.config.get("_name_or_path")
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None


def shard_metadata(facts: Mapping[str, Any], source: TensorSource, names: Sequence[str]) -> dict[str, str]:
    """The metadata of every shard: the format, these facts (objects as JSON), and the identity of the source."""
    about = {"format": "pt", "ktconvert_format": "1"}
    values = {name: facts[name] for name in names}
    texts = {name: json.dumps(v, sort_keys=True) if isinstance(v, dict) else str(v) for name, v in values.items()}
    return about | texts | {"source": source_identity(source)}
