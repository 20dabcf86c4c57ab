"""Opening of outputs: reading their manifest, config, index and headers, and finding the formats of their names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ktconvert.layouts.checkpoints.adapter import is_adapter
from ktconvert.layouts.errors import PERMISSION, InputError, VerificationError, bad_file
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.files.manifest import Manifest
from ktconvert.layouts.files.unfinished import WORK_FOLDER
from ktconvert.layouts.outputs import FORMATS, Format, dequantized, find_format, loose
from ktconvert.layouts.outputs.linear_names import LinearNames
from ktconvert.layouts.outputs.output import CONVERT_AGAIN, Output
from ktconvert.layouts.outputs.slices import SliceId, TensorNames
from ktconvert.layouts.sources.containers.safetensors import INDEX, read_header, read_index
from ktconvert.layouts.sources.source import explain_lack_of_weights, read_config, read_headers
from ktconvert.layouts.statistics.folder import DOCUMENT
from ktconvert.layouts.tensors import TensorInfo

PACKER = "compressed-tensors"  # quant_method in config.json of an output for the GPU
TRAIN = "train"  # command whose output is an adapter
CALIBRATE = "calibrate"  # command whose output is statistics
FOREIGN_NAME = "kt-kernel does not read this name"
IMPOSSIBLE = "no model has a layer, expert or NUMA slice with this number"

Item = TypeVar("Item")


def is_output(path: Path) -> bool:
    """Return whether a directory contains experts in one of our formats, rather than a checkpoint.

    Outputs that are whole models count, too, and statistics.
    """
    if not path.is_dir():
        return False
    if (record := _read_valid_manifest(path)) is not None:  # otherwise the weights decide
        return record.command not in (*dequantized.COMMANDS, TRAIN)
    if is_statistics(path) or loose.find_layers(path):
        return True
    candidates = _formats_by_names({})
    with contextlib.suppress(InputError):
        return _find_names(candidates, read_index(path / INDEX)[0]) is not None
    for shard in sorted(path.glob("*.safetensors")):
        with contextlib.suppress(InputError):
            return _find_names(candidates, (entry.name for entry in read_header(shard).entries)) is not None
    return False


def is_dequantized(path: Path) -> bool:
    """Return whether `dequantize`, `merge-adapter` or `fetch` wrote a folder, by its manifest.

    Raises VerificationError if the manifest is damaged.
    """
    record = manifest.read_manifest(path) if path.is_dir() else None
    return record is not None and record.command in dequantized.COMMANDS


def is_statistics(path: Path) -> bool:
    """Return whether `calibrate` or --save-statistics wrote a directory; only the former writes a manifest."""
    if (record := _read_valid_manifest(path)) is not None:
        return record.command == CALIBRATE
    return (path / DOCUMENT).is_file() and not (path / "config.json").exists()


def is_whole_model(path: Path) -> bool:
    """Return whether a directory is an output that is a whole model, by its manifest."""
    record = _read_valid_manifest(path)
    return record is not None and _manifest_format(record).arrangement.is_whole_model


def require_model(path: Path, remedy: str) -> None:
    """Raise InputError for a directory with converted experts that is not a whole model."""
    if is_output(path) and not is_whole_model(path):
        raise bad_file(path, "contains converted experts, not a model", remedy)


def require_checkpoint(path: Path, remedy: str) -> None:
    """Raise InputError for an adapter, statistics of `calibrate`, or converted experts.

    remedy  for converted experts
    """
    refuse_adapter(path)
    if is_statistics(path):
        raise bad_file(path, "contains statistics of a model's experts, not a model", "give the model")
    require_model(path, remedy)


def refuse_adapter(path: Path, kind: str = "a model", remedy: str = "give the model that it was trained for") -> None:
    """Raise InputError for a folder with a LoRA adapter and no model; `kind` is what the folder should contain."""
    if is_adapter(path):
        raise bad_file(path, f"is a LoRA adapter, not {kind}", remedy)


def require_directory(path: Path) -> None:
    """Raise InputError for a file where a command needs the directory of a model."""
    if path.is_file():
        has_config = (path.parent / "config.json").exists()
        remedy = f"give the directory {path.parent}" if has_config else "give the directory of a model"
        raise bad_file(path, "is a file, not a model", remedy)


def _read_valid_manifest(path: Path) -> Manifest | None:
    """Read a manifest; return None if there is none, or if it is damaged."""
    with contextlib.suppress(VerificationError):
        return manifest.read_manifest(path)
    return None


def open_output(root: Path, layers: Collection[int] | None = None) -> Output:
    """Open an output, finished or damaged; the result records its defects.

    layers  open only these layers of loose folders

    Raises InputError for a folder without experts in one of our formats, VerificationError for an unreadable manifest.
    """
    if is_statistics(root):
        readers = "`ktconvert experts` and `cpu --scale imatrix --statistics`"
        raise bad_file(root, "contains statistics of a model's experts, but no weights", f"use it with {readers}")
    if not is_output(root):
        quantized = None
        with contextlib.suppress(InputError):
            quantized = read_config(root).get("quantization_config")
        if isinstance(quantized, dict) and quantized.get("quant_method") == PACKER:
            manifest.read_manifest(root)  # raises an error if it is damaged
            remedy = "restore that file or convert again; otherwise give the directory of an output"
            problem = f"is packed by {PACKER}, but has no {manifest.NAME}"
            raise bad_file(root, problem, f"if `ktconvert gpu` wrote it, {remedy}")
        remedy = "give the directory that `ktconvert cpu`, `ktconvert gpu` or kt-kernel wrote"
        if root.is_file():
            is_part = is_output(root.parent) or _read_valid_manifest(root.parent) is not None
            raise bad_file(root, "is a file, not an output", f"give the directory {root.parent}" if is_part else remedy)
        if is_adapter(root):
            raise bad_file(root, "is a LoRA adapter, not an output", remedy)
        if next(root.glob("*.safetensors"), None) is None:
            raise explain_lack_of_weights(root, remedy)
        raise bad_file(root, "is a checkpoint, not an output", remedy)
    record = manifest.read_manifest(root)
    candidates = _formats_by_names({})
    if record is not None:
        _require_trusted(root, record)
        candidates = _formats_by_names(record.facts, _manifest_format(record))
    folders = loose.find_layers(root)
    shards = _list_shards(root)
    is_loose = bool(record.settings.get("no_merge_safetensor")) if record else bool(folders) and not shards
    if layers is not None:
        folders = {layer: folders[layer] for layer in layers}
        is_loose = True
    output = _read_output(root, record, shards, candidates, is_loose)
    if is_loose:
        _read_loose_files(output, folders)
    return output


def open_dequantized(root: Path) -> Output:
    return _read_output(
        root, manifest.read_manifest(root), _list_shards(root), {LinearNames((), native=True): ()}, False
    )


def _read_output(
    root: Path,
    record: Manifest | None,
    shards: list[str],
    candidates: dict[TensorNames, tuple[Format, ...]],
    is_loose: bool,
) -> Output:
    """Read the shards of an output.

    candidates  naming scheme that its tensors may follow -> the formats with these names
    """
    damaged: dict[str, InputError] = {}

    def read_if_readable(name: str, read: Callable[[Path], Item]) -> Item | None:
        try:
            return read(root / name) if (root / name).exists() else None
        except InputError as error:
            damaged[name] = error
            return None

    headers = {} if is_loose else read_headers(root, shards, damaged=damaged)
    names = _find_names(candidates, (entry.name for header in headers.values() for entry in header.entries))
    names = names or next(iter(candidates))
    methods = tuple(fmt.name for fmt in candidates[names])
    is_whole_model = all(fmt.arrangement.is_whole_model for fmt in candidates[names][:1])
    config = read_if_readable("config.json", lambda path: read_config(path.parent)) or {}
    weight_map, total_size = read_if_readable(INDEX, read_index) or (None, None)
    for error in damaged.values():
        if error.remedy == PERMISSION:
            raise error
    output = Output(root, is_loose, methods, names, is_whole_model, record, config, weight_map, total_size, shards)
    output.damaged.update((name, f"{name}: {error.problem}") for name, error in damaged.items())
    output.headers.update(headers)
    for shard, header in headers.items():
        for entry in header.entries:
            parsed = names.parse(entry.name)
            if parsed is None:
                reason = names.explain_stray(entry.name)
                _add_tensor(output, output.non_expert_tensors, entry.name, entry)
            elif not parsed[0].is_possible:
                reason = IMPOSSIBLE
            else:
                # A number with leading zeros is read, but is not the name that kt-kernel looks for.
                reason = None if names.tensor_name(*parsed) == entry.name else FOREIGN_NAME
                _add_tensor(output, output.tensors, parsed, entry)
            if reason is not None:
                output.strays.append((entry.name, shard, reason))
    return output


def _list_shards(root: Path) -> list[str]:
    files = (path.relative_to(root) for path in root.rglob("*.safetensors"))
    return sorted(file.as_posix() for file in files if WORK_FOLDER not in file.parts)


def _manifest_format(record: Manifest) -> Format:
    """Return the format that a manifest names; if it names none of ours, the first format of its command."""
    fmt = find_format(record.facts)
    candidates = (fmt for fmt in FORMATS.values() if fmt.arrangement.command == record.command)
    return fmt or next(candidates, next(iter(FORMATS.values())))


def _formats_by_names(facts: OutputFacts, preferred: Format | None = None) -> dict[TensorNames, tuple[Format, ...]]:
    """Return naming scheme -> the formats with these names; the scheme of the preferred format is the first."""
    candidates: dict[TensorNames, tuple[Format, ...]] = {} if preferred is None else {preferred.make_names(facts): ()}
    for fmt in FORMATS.values():
        names = fmt.make_names(facts)
        candidates[names] = (*candidates.get(names, ()), fmt)
    return candidates


def _find_names(candidates: Iterable[TensorNames], tensors: Iterable[str]) -> TensorNames | None:
    """Return the naming scheme that recognizes one of these tensors as part of an expert; None if none does."""
    candidates = tuple(candidates)
    return next((names for tensor in tensors for names in candidates if names.parse(tensor) is not None), None)


def _require_trusted(root: Path, record: Manifest) -> None:
    """Raise VerificationError for a required fact of a wrong type."""
    facts = record.facts
    has_sizes = {"experts", "hidden", "intermediate"} <= facts.keys()
    if not has_sizes or not _manifest_format(record).arrangement.is_trusted(facts):
        path = root / manifest.NAME
        raise VerificationError(f"{path}: not a manifest that ktconvert wrote; {CONVERT_AGAIN} with --overwrite.")


def _read_loose_files(output: Output, folders: dict[int, Path]) -> None:
    """Add the tensors, stray files and damaged files of per-layer folders to an output."""
    for layer, folder in folders.items():
        count_before = len(output.tensors)
        for path in _list_layer_files(folder):
            name = path.relative_to(output.root).as_posix()
            node = loose.NUMA.fullmatch(path.parent.name)
            match = loose.FILE.fullmatch(path.name)
            if node is None or match is None:
                if path.suffix == ".kt":
                    output.strays.append((path.name, name, FOREIGN_NAME))
                continue
            size = path.stat().st_size
            if size != int(match["nbytes"]):
                output.damaged[name] = f"{name}: contains {size} bytes, but its name states {match['nbytes']}"
            output.prefixes.add(match["prefix"])
            slice_id = SliceId(layer, int(match["expert"]), match["projection"], bool(match["backward"]), int(node[1]))
            if not slice_id.is_possible:
                output.strays.append((path.name, name, IMPOSSIBLE))
                continue
            tensor = loose.describe_tensor(match["word"], size)
            _add_tensor(
                output, output.tensors, (slice_id, tensor.name), msgspec.structs.replace(tensor, name=name, file=name)
            )
        if len(output.tensors) == count_before:
            output.damaged[folder.name] = f"{folder.name} has no .kt files below _numa_N"


def _list_layer_files(folder: Path) -> list[Path]:
    """Return the sorted files in a layer's folder and in the folders directly below it."""
    paths: list[Path] = []
    for entry in folder.iterdir():
        paths += list(entry.iterdir()) if entry.is_dir() else [entry]
    return sorted(path for path in paths if path.is_file())


def _add_tensor(output: Output, tensors: dict[Any, TensorInfo], key: Any, stored: TensorInfo) -> None:
    """Add a tensor; if it is a duplicate, record that, and keep the last one, as kt-kernel's loader does."""
    if key in tensors:
        output.duplicates.append((stored.name, tensors[key].file, stored.file))
    tensors[key] = stored
