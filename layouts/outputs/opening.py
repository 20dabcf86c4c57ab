"""Opening of outputs: their manifest, config, index and headers, and the formats that their tensor names allow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints.containers.safetensors import INDEX, read_header, read_index
from ktconvert.layouts.checkpoints.source import read_config, read_headers
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.files.manifest import Manifest
from ktconvert.layouts.files.publish import WORK_FOLDER
from ktconvert.layouts.outputs import FORMATS, Format, dequantized, find_format, loose
from ktconvert.layouts.outputs.linear_names import LinearNames
from ktconvert.layouts.outputs.output import AGAIN, Output
from ktconvert.layouts.outputs.slices import SliceId, TensorNames
from ktconvert.layouts.tensors import TensorInfo

PACKER = "compressed-tensors"  # quant_method in config.json of an output for the GPU
TRAIN = "train"  # its output is an adapter
FOREIGN_NAME = "kt-kernel does not read this name"
IMPOSSIBLE = "no model has a layer, expert or NUMA slice with this number"

Item = TypeVar("Item")


def is_output(path: Path) -> bool:
    """Return whether a directory holds experts in one of our formats (whole or not), rather than a checkpoint."""
    if not path.is_dir():
        return False
    if (about := _readable_manifest(path)) is not None:  # otherwise the weights decide
        return about.command not in (*dequantized.COMMANDS, TRAIN)
    if loose.find_layers(path):
        return True
    candidates = _formats_by_names({})
    with contextlib.suppress(InputError):
        return _find_names(candidates, read_index(path / INDEX)[0]) is not None
    for shard in sorted(path.glob("*.safetensors")):
        with contextlib.suppress(InputError):
            return _find_names(candidates, (entry.name for entry in read_header(shard).entries)) is not None
    return False


def is_dequantized(path: Path) -> bool:
    """Return whether `dequantize` or `merge-adapter` wrote a folder, by its manifest.

    Raises VerificationError if the manifest is damaged.
    """
    about = manifest.read(path) if path.is_dir() else None
    return about is not None and about.command in dequantized.COMMANDS


def is_whole_model(path: Path) -> bool:
    """Return whether a directory is an output that is a whole model, by its manifest."""
    about = _readable_manifest(path)
    return about is not None and _manifest_format(about).arrangement.whole


def _readable_manifest(path: Path) -> Manifest | None:
    with contextlib.suppress(VerificationError):
        return manifest.read(path)
    return None


def open_output(root: Path, layers: Collection[int] | None = None) -> Output:
    """Open an output, finished or damaged; the result records its defects.

    layers  open only these layers of loose folders

    Raises UnsupportedError if no experts are in one of our formats, VerificationError for an unreadable manifest.
    """
    if not is_output(root):
        with contextlib.suppress(InputError):
            quantized = read_config(root).get("quantization_config")
            if isinstance(quantized, dict) and quantized.get("quant_method") == PACKER:
                manifest.read(root)  # raises an error if it is damaged
                remedy = "restore that file or convert again; otherwise give the directory of an output."
                what = f"is packed by {PACKER}, but has no {manifest.NAME}"
                raise UnsupportedError(f"{root}: {what}; if `ktconvert gpu` wrote it, {remedy}")
        raise UnsupportedError(f"{root}: contains no expert weights of kt-kernel; give the directory of an output.")
    about, candidates = manifest.read(root), _formats_by_names({})
    if about is not None:
        _require_trusted(root, about)
        candidates = _formats_by_names(about.facts, _manifest_format(about))
    folders, shards = loose.find_layers(root), _shards(root)
    is_loose = bool(about.settings.get("no_merge_safetensor")) if about else bool(folders) and not shards
    if layers is not None:
        folders, is_loose = {layer: folders[layer] for layer in layers}, True
    output = _read_output(root, about, shards, candidates, is_loose)
    if is_loose:
        _read_loose_files(output, folders)
    return output


def open_dequantized(root: Path) -> Output:
    return _read_output(root, manifest.read(root), _shards(root), {LinearNames((), native=True): ()}, False)


def _read_output(
    root: Path,
    about: Manifest | None,
    shards: list[str],
    candidates: dict[TensorNames, tuple[Format, ...]],
    is_loose: bool,
) -> Output:
    """Read the shards of an output.

    candidates  naming schemes that its tensors may follow, with the formats of each
    """
    damaged: dict[str, InputError] = {}

    def if_readable(name: str, read: Callable[[Path], Item]) -> Item | None:
        try:
            return read(root / name) if (root / name).exists() else None
        except InputError as error:
            damaged[name] = error
            return None

    headers = {} if is_loose else read_headers(root, shards, damaged=damaged)
    names = _find_names(candidates, (entry.name for header in headers.values() for entry in header.entries))
    names = names or next(iter(candidates))
    methods, whole = (
        tuple(fmt.name for fmt in candidates[names]),
        all(fmt.arrangement.whole for fmt in candidates[names][:1]),
    )
    config = if_readable("config.json", lambda path: read_config(path.parent)) or {}
    weight_map, total_size = if_readable(INDEX, read_index) or (None, None)
    output = Output(root, is_loose, methods, names, whole, about, config, weight_map, total_size, shards)
    output.damaged.update((name, f"{name}: {error.problem}") for name, error in damaged.items())
    output.headers.update(headers)
    for shard, header in headers.items():
        for entry in header.entries:
            recognised = names.parse(entry.name)
            if recognised is None:
                why = names.explain_stray(entry.name)
                _add(output, output.others, entry.name, entry)
            elif not recognised[0].is_possible:
                why = IMPOSSIBLE
            else:
                # A number with leading zeros is read, but is not the name that kt-kernel looks for.
                why = None if names.tensor_name(*recognised) == entry.name else FOREIGN_NAME
                _add(output, output.tensors, recognised, entry)
            if why is not None:
                output.strays.append((entry.name, shard, why))
    return output


def _shards(root: Path) -> list[str]:
    files = (path.relative_to(root) for path in root.rglob("*.safetensors"))
    return sorted(file.as_posix() for file in files if WORK_FOLDER not in file.parts)


def _manifest_format(about: Manifest) -> Format:
    """Return the format that a manifest names; if it names none of ours, the first one of its command."""
    fmt = find_format(about.facts)
    candidates = (fmt for fmt in FORMATS.values() if fmt.arrangement.command == about.command)
    return fmt or next(candidates, next(iter(FORMATS.values())))


def _formats_by_names(facts: OutputFacts, first: Format | None = None) -> dict[TensorNames, tuple[Format, ...]]:
    """Group the formats by the names of their tensors, those with the names of `first` first."""
    candidates: dict[TensorNames, tuple[Format, ...]] = {} if first is None else {first.names(facts): ()}
    for fmt in FORMATS.values():
        names = fmt.names(facts)
        candidates[names] = (*candidates.get(names, ()), fmt)
    return candidates


def _find_names(candidates: Iterable[TensorNames], tensors: Iterable[str]) -> TensorNames | None:
    """Return the naming scheme that recognises one of these tensors as part of an expert; None if none does."""
    candidates = tuple(candidates)
    return next((names for tensor in tensors for names in candidates if names.parse(tensor) is not None), None)


def _require_trusted(root: Path, about: Manifest) -> None:
    """Raise VerificationError for a required fact of a wrong type, UnsupportedError for statistics."""
    if about.command == "calibrate":
        readers = "`ktconvert experts` and `cpu --scale imatrix --statistics`"
        raise UnsupportedError(
            f"{root}: contains statistics of a model's experts, but no weights; use it with {readers}."
        )
    facts = about.facts
    if not {"experts", "hidden", "intermediate"} <= facts.keys() or not _manifest_format(about).arrangement.is_trusted(
        facts
    ):
        path = root / manifest.NAME
        raise VerificationError(f"{path}: not a manifest that ktconvert wrote; {AGAIN} with --overwrite.")


def _read_loose_files(output: Output, folders: dict[int, Path]) -> None:
    for layer, folder in folders.items():
        before = len(output.tensors)
        below = (path for entry in folder.iterdir() for path in (entry.iterdir() if entry.is_dir() else (entry,)))
        for path in sorted(path for path in below if path.is_file()):
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
            tensor = loose.describe_tensor(match["what"], size)
            _add(output, output.tensors, (slice_id, tensor.name), replace(tensor, name=name, file=name))
        if len(output.tensors) == before:
            output.damaged[folder.name] = f"{folder.name} contains no .kt files below _numa_N"


def _add(output: Output, where: dict[Any, TensorInfo], key: Any, stored: TensorInfo) -> None:
    if key in where:
        output.duplicates.append((stored.name, where[key].file, stored.file))
    where[key] = stored  # as in kt-kernel's loader, the last one counts
