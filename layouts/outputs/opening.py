"""Opening an output: its manifest, config, index and headers; which formats' names its tensors have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.containers.container import Header
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.containers.safetensors_index import INDEX, read_index
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import documents, manifest
from ktconvert.layouts.outputs import FORMATS, Format, decoded, loose
from ktconvert.layouts.outputs.arrangement import Names
from ktconvert.layouts.outputs.output import AGAIN, Output
from ktconvert.layouts.outputs.parts import Place
from ktconvert.layouts.tensors import TensorInfo

STATISTICS = "calibrate"  # the command whose output holds no weights
WORK_INSIDE = ".ktconvert"
PACKER = "compressed-tensors"  # quant_method in config.json of an output for the GPU
FOREIGN_NAME = "not a name that kt-kernel reads"


def is_output(path: Path) -> bool:
    """Whether a directory holds experts in one of our formats (whole or not), rather than a checkpoint.

    What `ktconvert dequantize` wrote is a checkpoint like any other.
    """
    if not path.is_dir():
        return False
    try:
        if (about := manifest.read(path)) is not None:
            return bool(about["command"] != decoded.COMMAND)
    except VerificationError:
        pass  # not our manifest.json; the weights decide
    if loose.layers_in(path):
        return True
    kinds = _by_names({})
    try:
        return _named_by(kinds, read_index(path / INDEX)) is not None
    except InputError:
        pass
    for shard in sorted(path.glob("*.safetensors")):
        try:
            return _named_by(kinds, (entry.name for entry in read_header(shard).entries)) is not None
        except InputError:
            continue
    return False


def is_decoded(path: Path) -> bool:
    """Whether `ktconvert dequantize` wrote a directory, as its manifest says. Raises VerificationError for a manifest
    that cannot be read.
    """
    about = manifest.read(path) if path.is_dir() else None
    return about is not None and about["command"] == decoded.COMMAND


def is_whole_model(path: Path) -> bool:
    """Whether a directory is an output that is a whole model, as its manifest says."""
    try:
        about = manifest.read(path)
    except VerificationError:
        return False
    return about is not None and _format_of(about).arrangement.whole


def open_output(root: Path) -> Output:
    """Open an output, finished or damaged; its defects are recorded in the result, not raised.

    Raises UnsupportedError for a directory that holds no experts in one of our formats, VerificationError for a
    manifest that cannot be read."""
    if not root.is_dir() or not is_output(root):
        quantized = _json(root, "config.json", {}).get("quantization_config")
        if isinstance(quantized, dict) and quantized.get("quant_method") == PACKER:
            manifest.read(root)  # raises where it is damaged
            raise UnsupportedError(
                f"{root}: is packed by {PACKER} and has no {manifest.NAME}; if `ktconvert gpu` wrote it, put that file "
                "back or convert again, else give the directory of an output."
            )
        raise UnsupportedError(f"{root}: holds no expert weights of kt-kernel; give the directory of an output.")
    about = _trusted(root)
    shards = _shards(root)
    folders = loose.layers_in(root)
    is_loose = bool(folders) and not shards
    if about is not None:
        is_loose = bool(about["settings"].get("no_merge_safetensor"))
    damaged: dict[str, str] = {}
    headers = {} if is_loose else dict(_headers(root, shards, damaged))
    kinds = _by_names({} if about is None else about["model"], None if about is None else _format_of(about))
    entries = (entry.name for header in headers.values() for entry in header.entries)
    names = _named_by(kinds, entries) or next(iter(kinds))
    output = Output(
        root,
        is_loose,
        tuple(fmt.name for fmt in kinds[names]),
        names,
        kinds[names][0].arrangement.whole,
        about,
        _json(root, "config.json", damaged),
        *_index(root, damaged),
        shards,
        damaged=damaged,
    )
    if is_loose:
        _walk_loose(output, folders)
    else:
        _walk_shards(output, headers)
    return output


def open_decoded(root: Path) -> Output:
    """Open an output of `ktconvert dequantize`, finished or damaged; its defects are recorded in the result, not
    raised.
    """
    damaged: dict[str, str] = {}
    shards = _shards(root)
    output = Output(
        root,
        False,
        (),
        decoded.NoExperts(),
        True,
        manifest.read(root),
        _json(root, "config.json", damaged),
        *_index(root, damaged),
        shards,
        damaged=damaged,
    )
    _walk_shards(output, dict(_headers(root, shards, damaged)))
    return output


def _shards(root: Path) -> list[str]:
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.safetensors")
        if WORK_INSIDE not in path.relative_to(root).parts
    )


def _format_of(about: Mapping[str, Any]) -> Format:
    """The format that a manifest names; if it names none of ours, the first one of its command."""
    fmt = FORMATS.get(str(about["model"].get("method")))
    candidates = (fmt for fmt in FORMATS.values() if fmt.arrangement.command == about.get("command"))
    return fmt or next(candidates, next(iter(FORMATS.values())))


def _by_names(facts: Mapping[str, Any], first: Format | None = None) -> dict[Names, tuple[Format, ...]]:
    """The formats by their tensors' names, those with the names of `first` first."""
    kinds: dict[Names, tuple[Format, ...]] = {} if first is None else {first.names(facts): ()}
    for fmt in FORMATS.values():
        names = fmt.names(facts)
        kinds[names] = (*kinds.get(names, ()), fmt)
    return kinds


def _named_by(kinds: Iterable[Names], tensors: Iterable[str]) -> Names | None:
    """The names that recognise one of these tensors as a part of an expert; None if none do."""
    kinds = tuple(kinds)
    return next((names for tensor in tensors for names in kinds if names.find(tensor) is not None), None)


def _headers(root: Path, shards: Iterable[str], damaged: dict[str, str]) -> Iterator[tuple[str, Header]]:
    for shard in shards:
        try:
            yield shard, read_header(root / shard, shard)
        except InputError as error:
            damaged[shard] = f"{shard}: {error.problem}"


def _trusted(root: Path) -> dict[str, Any] | None:
    """The manifest, None if there is none.

    Raises VerificationError where a fact that is needed has the wrong type, UnsupportedError for statistics.
    """
    about = manifest.read(root)
    if about is None:
        return None
    if about["command"] == STATISTICS:
        raise UnsupportedError(
            f"{root}: holds statistics of a model's experts, and no weights; `ktconvert experts` and "
            "`cpu --scale imatrix --statistics` read it."
        )
    facts = about["model"]
    if not {"experts", "hidden", "intermediate"} <= facts.keys() or not _format_of(about).arrangement.is_trusted(facts):
        raise VerificationError(
            f"{root / manifest.NAME}: not a manifest that ktconvert wrote; {AGAIN} with --overwrite."
        )
    return about


def _json(root: Path, name: str, damaged: dict[str, str]) -> dict[str, Any]:
    try:
        tree = documents.parse((root / name).read_bytes())
        documents.require_plain(tree)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        damaged[name] = f"{name}: not valid JSON ({str(error)[:100]})"
        return {}
    if not isinstance(tree, dict):
        damaged[name] = f"{name}: must hold a JSON object"
        return {}
    return tree


def _index(root: Path, damaged: dict[str, str]) -> tuple[dict[str, str] | None, int | None]:
    if not (root / INDEX).exists():
        return None, None
    try:
        weight_map = read_index(root / INDEX)
    except InputError as error:
        damaged[INDEX] = f"{INDEX}: {error.problem}"
        return None, None
    about = _json(root, INDEX, damaged).get("metadata")
    total = about.get("total_size") if isinstance(about, dict) else None
    return weight_map, total if isinstance(total, int) else None


def _walk_shards(output: Output, headers: Mapping[str, Header]) -> None:
    for shard, header in headers.items():
        output.metadata[shard] = header.metadata
        for entry in header.entries:
            recognised = output.names.find(entry.name)
            if recognised is None:
                why = output.names.stray(entry.name)
                if why is not None:
                    output.strays.append((entry.name, shard, why))
                _add(output, output.others, entry.name, entry)
                continue
            if output.names.key(*recognised) != entry.name:  # numbers with leading zeros
                output.strays.append((entry.name, shard, FOREIGN_NAME))
            _add(output, output.tensors, recognised, entry)


def _walk_loose(output: Output, folders: dict[int, Path]) -> None:
    for layer, folder in folders.items():
        before = len(output.tensors)
        for path in sorted(_below(folder)):
            name = path.relative_to(output.root).as_posix()
            node = loose.NUMA.fullmatch(path.parent.name)
            match = loose.FILE.fullmatch(path.name)
            if node is None or match is None:
                if path.suffix == ".kt":
                    output.strays.append((path.name, name, FOREIGN_NAME))
                continue
            size = path.stat().st_size
            if size != int(match["nbytes"]):
                output.damaged[name] = f"{name}: holds {size} bytes where its name says {match['nbytes']}"
            output.prefixes.add(match["prefix"])
            place = Place(layer, int(match["expert"]), match["projection"], bool(match["backward"]), int(node[1]))
            tensor = loose.tensor(match["what"], size)
            _add(output, output.tensors, (place, tensor.name), replace(tensor, name=name, file=name))
        if len(output.tensors) == before:
            output.damaged[folder.name] = f"{folder.name} holds no .kt files below _numa_N"


def _below(folder: Path) -> Iterable[Path]:
    return (path for node in folder.iterdir() if node.is_dir() for path in node.iterdir() if path.is_file())


def _add(output: Output, where: dict[Any, TensorInfo], key: Any, stored: TensorInfo) -> None:
    if key in where:
        output.doubles.append((stored.name, where[key].file, stored.file))
    where[key] = stored  # as in kt-kernel's loader, the last one counts
