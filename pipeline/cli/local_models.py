"""Local checkpoints, outputs and unfinished conversions, described from headers, configs and manifests."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ktconvert.layouts import errors
from ktconvert.layouts.checkpoints import adapter
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, KTConvertError, UnsupportedError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.unfinished import find_output
from ktconvert.layouts.outputs import formats_by_option, mixed
from ktconvert.layouts.outputs.measuring import measure_output
from ktconvert.layouts.outputs.opening import CALIBRATE, is_output, is_statistics, open_output
from ktconvert.layouts.outputs.output import list_files
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.config import list_families
from ktconvert.layouts.sources.containers.gguf import OTHER, split_names
from ktconvert.layouts.sources.containers.safetensors import INDEX, INDEX_SUFFIX, PART, SINGLE, read_header, read_index
from ktconvert.layouts.sources.source import PYTORCH, open_checkpoint, read_config
from ktconvert.layouts.statistics.folder import COUNTS, read_counts
from ktconvert.pipeline.cli.status import read_status
from ktconvert.pipeline.engine.existing import read_plan
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import CONFIG, SavedPlan
from ktconvert.pipeline.report.text import plural, summarize

CHECKPOINT, ADAPTER = "checkpoint", "adapter"
# Command that wrote an output -> its kind, unless that is the command's name
KINDS = {"merge": "cpu", "resplit": "cpu", CALIBRATE: "statistics", "train": ADAPTER}
COMPLETE, INCOMPLETE, UNFINISHED = "complete", "incomplete", "unfinished"
DAMAGED, UNSUPPORTED = "damaged", "unsupported"
MAX_MISSING = 10_000  # shards to look for, however many a file's name claims


@dataclass(frozen=True)
class LocalModel:
    """A checkpoint, an output or an unfinished conversion.

    name    hub id, or the path below a given folder
    path    absolute path
    kind    "checkpoint", "cpu", "gpu", "dequantize", "adapter", ...
    method  method of quantization, or dtype of most weights; "" if it is unknown
    bytes   size of the files
    state   "complete", "incomplete", "unfinished", "damaged" or "unsupported"
    detail  what is missing or wrong; "" if it is complete
    """

    name: str
    path: str
    kind: str
    method: str = ""
    bytes: int = 0
    state: str = COMPLETE
    detail: str = ""


def find_models(folders: Iterable[Path]) -> Iterator[LocalModel]:
    """Yield the models in the hub's cache, then those directly below these folders; or a folder that is a model itself.

    Reads headers, configs and manifests. A damaged entry is described as such. A folder with weights but without a
    config is a model only if no model is below it: the weights may be any file.
    """
    yield from _find_cached_models()
    for folder in folders:
        kind = _find_kind(folder)
        is_certain = kind is not None and (kind != CHECKPOINT or (folder / CONFIG).exists())
        below = [] if is_certain else [(path, str(path)) for path in sorted(folder.iterdir())]
        models = [model for path, name in below for model in _describe_directory(path, name)]
        if kind is None or is_certain or not models:
            yield from _describe_directory(folder, str(folder))
        yield from models


def _find_cached_models() -> Iterator[LocalModel]:
    """Yield a model for each snapshot; all but the one of `main` are named with their commit."""
    for repository in sorted(hub.cache_root().glob("models--*")):
        name = repository.name.removeprefix("models--").replace("--", "/")
        main = hub.find_snapshot(name)
        try:
            snapshots = sorted(path for path in (repository / "snapshots").iterdir() if path.is_dir())
        except OSError:
            snapshots = []
        if not snapshots:
            yield LocalModel(name, str(repository), CHECKPOINT, state=INCOMPLETE, detail="no snapshot")
        for snapshot in snapshots:
            title = name if snapshot == main else f"{name}@{snapshot.name[:12]}"
            models = list(_describe_directory(snapshot, title, ":", "**/*.gguf"))
            yield from models or [_describe(snapshot, title, CHECKPOINT)]


def _describe_directory(
    path: Path, name: str, separator: str = "/", gguf_pattern: str = "*.gguf"
) -> Iterator[LocalModel]:
    """Yield the model of a directory, or those of its GGUF files; nothing if it has none.

    separator  stands between the name of the directory and that of a GGUF file
    """
    try:
        kind = _find_kind(path)
        files = [] if kind else [file for file in sorted(path.glob(gguf_pattern)) if not OTHER.search(file.name)]
    except OSError:  # of a directory that this user may not read
        return
    if kind is not None:
        yield _describe(path, str(find_output(path) or name), kind)
    for file in dict.fromkeys(file.with_name(split_names(file.name, 1)[0]) for file in files):
        yield _describe(file, f"{name}{separator}{file.relative_to(path)}", CHECKPOINT)


def _find_kind(path: Path) -> str | None:
    """Return the key of READERS for a directory; None if it is no model, or has only GGUF files."""
    if not path.is_dir():
        return None
    if find_output(path) is not None or ((paths := locate(path)).inside and paths.plan.exists()):
        return UNFINISHED
    has_weights = any(any(path.glob(pattern)) for pattern in (*hub.WEIGHTS, f"*{INDEX}", "_layer_*", *PYTORCH))
    try:
        if manifest.read_manifest(path) is not None:
            return "output"
    except KTConvertError:
        if has_weights:
            return "output"
    if is_statistics(path):
        return KINDS[CALIBRATE]
    if (path / adapter.CONFIG).exists():
        return ADAPTER
    if has_weights:
        return "cpu" if is_output(path) else CHECKPOINT
    with contextlib.suppress(InputError):
        if list_families(read_config(path)) and not any(path.glob("*.gguf")):
            return CHECKPOINT
    return None


def _describe(path: Path, name: str, kind: str) -> LocalModel:
    model = LocalModel(name, str(path.absolute()), kind, bytes=_count_bytes(path))
    try:
        return READERS[kind](model, path)
    except (KTConvertError, OSError) as error:
        state = UNSUPPORTED if isinstance(error, UnsupportedError) else DAMAGED
        if isinstance(error, KTConvertError) and error.remedy == errors.INCOMPLETE:
            state = INCOMPLETE
        text = error.text if isinstance(error, KTConvertError) else str(error)
        return replace(model, state=state, detail=text.removeprefix(f"{path}/").removeprefix(f"{path}: "))


def _count_bytes(path: Path) -> int:
    """Return the size of a directory's files, or of all files of a split GGUF."""
    names = list_files(path) if path.is_dir() else split_names(path.name)
    total = 0
    for name in names:
        with contextlib.suppress(OSError):
            total += ((path if path.is_dir() else path.parent) / name).stat().st_size
    return total


# --- kinds ----------------------------------------------------------------------------------------


def _read_conversion(model: LocalModel, path: Path) -> LocalModel:
    output = find_output(path) or path
    status, saved = read_status(output), read_plan(locate(output))
    if saved is None:  # it ended meanwhile
        return _read_output(replace(model, path=str(output.absolute())), output)
    return replace(
        model,
        path=str(output.absolute()),
        kind=KINDS.get(saved.command, saved.command),
        method=_name_method(saved),
        bytes=status["bytes"],
        state=UNFINISHED,
        detail=f"{status['done']} of {status['units']}",
    )


def _name_method(saved: SavedPlan) -> str:
    """Return the method of an unfinished conversion, as its manifest will name it; "" for one without a method."""
    settings = saved.settings
    if settings.get("method_map"):
        return mixed.NAME
    word = str(settings.get("quant_type") or settings.get("quant_method") or "")
    formats = formats_by_option(saved.command, settings.get("layout"))
    return formats[word].name if word in formats else word


def _read_output(model: LocalModel, path: Path) -> LocalModel:
    record = manifest.read_manifest(path)
    if record is None:
        raise InputError(f"{path}: changed while it was read")
    model = replace(model, kind=KINDS.get(record.command, record.command), method=str(record.facts.get("method") or ""))
    if missing := [file.name for file in record.files if not (path / file.name).is_file()]:
        return replace(model, state=INCOMPLETE, detail=_describe_missing(missing))
    changed = [file.name for file in record.files if (path / file.name).stat().st_size != file.size]
    if manifest.compute_actual_digest(record) != record.sha256:
        changed.append(manifest.NAME)
    if changed:
        return replace(model, state=DAMAGED, detail=f"{changed[0]} differs from what was written")
    return _read_adapter(model, path) if model.kind == ADAPTER else model


def _read_foreign_output(model: LocalModel, path: Path) -> LocalModel:
    output = open_output(path)
    problems = list(output.damaged_files.values())
    return replace(
        model,
        method=measure_output(output).method,
        state=DAMAGED if problems else COMPLETE,
        detail=summarize(problems) if problems else "",
    )


def _read_adapter(model: LocalModel, path: Path) -> LocalModel:
    settings = adapter.read_settings(path, adapter.RUN)
    for file in path.glob("*.safetensors"):
        read_header(file)
    return replace(model, method=f"LoRA, rank {settings['r']}")


def _read_statistics(model: LocalModel, path: Path) -> LocalModel:
    read_counts(path / COUNTS)
    return model


def _read_checkpoint(model: LocalModel, path: Path) -> LocalModel:
    if missing := _find_missing(path):
        return replace(model, state=INCOMPLETE, detail=_describe_missing(missing))
    try:
        with open_checkpoint(path) as source:
            with contextlib.suppress(UnsupportedError):  # dense models, too, are complete
                recognize(source, to_read=True)
            dtypes: Counter[str] = Counter()
            for info in source.tensors.values():
                dtypes[info.dtype] += info.nbytes
            return replace(model, method=source.quantization.method or max(dtypes, key=dtypes.__getitem__, default=""))
    except InputError:
        if path.is_dir() and not any(any(path.glob(pattern)) for pattern in (*hub.WEIGHTS, f"*{INDEX}")):
            return replace(model, state=INCOMPLETE, detail="no weights")
        raise


def _describe_missing(names: Collection[str]) -> str:
    return f"{plural(len(names), 'file')} missing: {min(names)}{', ...' if len(names) > 1 else ''}"


def _find_missing(path: Path) -> set[str]:
    """Return the files that a checkpoint lacks, by its index, the names of its shards, and links to nothing."""
    if not path.is_dir():
        return {name for name in split_names(path.name) if not path.with_name(name).exists()}
    names = {file.name for file in path.iterdir()}
    missing = {name for name in names if not (path / name).exists()}
    if not names & {"config.json", "params.json"}:
        missing.add("config.json")
    if INDEX in names:
        with contextlib.suppress(InputError):  # the checkpoint's reader reports it
            missing |= {shard for shard in {*read_index(path / INDEX)[0].values()} if not (path / shard).exists()}
        return missing
    parts = {(match[1], match[3]): match[2] for name in names if (match := PART.fullmatch(name))}
    for (stem, total), number in parts.items():
        shards = (f"{stem}-{i:0{len(number)}}-of-{total}.safetensors" for i in range(1, int(total) + 1))
        missing.update(itertools.islice((shard for shard in shards if shard not in names), MAX_MISSING))
    if parts and not missing and SINGLE not in names and not any(name.endswith(INDEX_SUFFIX) for name in names):
        missing.add(INDEX)
    return missing


READERS: Mapping[str, Callable[[LocalModel, Path], LocalModel]] = {
    UNFINISHED: _read_conversion,
    "output": _read_output,
    "cpu": _read_foreign_output,
    KINDS[CALIBRATE]: _read_statistics,
    ADAPTER: _read_adapter,
    CHECKPOINT: _read_checkpoint,
}
