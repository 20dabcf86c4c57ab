"""A checkpoint as one set of named tensors: the file and bytes of each, and views of them through memory maps."""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.errors import (
    InputError,
    KTConvertError,
    UnsupportedError,
    UsageError,
    bad_file,
    explain_unfinished,
    unreadable_file,
)
from ktconvert.layouts.files import documents
from ktconvert.layouts.files.mapped import MappedFiles
from ktconvert.layouts.files.unfinished import WORK_SUFFIX
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources import hub, rotation
from ktconvert.layouts.sources.companions import companion_files
from ktconvert.layouts.sources.containers import CONTAINERS, SAFETENSORS, safetensors
from ktconvert.layouts.sources.containers.container import Container, Header, Selection, refuse_substitute
from ktconvert.layouts.sources.containers.safetensors import INDEX, INDEX_SUFFIX, SINGLE, is_inside, shorten_names
from ktconvert.layouts.sources.hub_headers import Location, find_headers
from ktconvert.layouts.sources.remote import RemoteFiles
from ktconvert.layouts.sources.url_headers import URL, find_url_headers
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import Array

# Bytes: of a longer range Linux reads no more than the device's read-ahead setting, and that is often this much.
READ_AHEAD = 128 << 10

PYTORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")  # which transformers reads without safetensors
PYTORCH_SUFFIXES = (".bin", ".pth", ".pt")

# NumPy types of tensors; dtypes that NumPy lacks are unsigned integers of the same width.
VIEWS: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "BOOL": np.bool_,
    "I16": np.int16,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U64": np.uint64,
    **dict.fromkeys(("BF16", "F16", "U16"), np.uint16),
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), np.uint8),
}


@dataclass(frozen=True)
class Shard:
    """One weight file; size, header hash and blob name (in a Hugging Face cache) identify it in any directory."""

    path: Path
    name: str
    size: int
    header_sha256: str
    mtime_ns: int
    blob: str | None = None


@dataclass(eq=False)
class TensorSource:
    """An opened checkpoint: headers have been read, each weight file is mapped at its first use.

    config           contents of config.json (of params.json if only that exists), else header_config
    header_config    configuration in the headers of the weight files; {} if they contain none
    ignored          files of the same kind in the directory that do not belong to the checkpoint
    is_single_file   whether a file was named, not a directory
    notes            sentences on files that disagree: a second set of weights, an index and headers
    conflict         error that transformers would read other weights of this directory; None if it reads the same
    not_found        error that transformers would find no weights in this directory; None if it finds them
    companion_root   directory of config.json and the other companions: root, unless a different model's were requested
    remote           the weight files, if they are on the hub and only their headers are in root
    """

    root: Path
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    tensors: dict[str, TensorInfo]
    companion_root: Path
    quantization: cfg.Quantization = field(default_factory=cfg.Quantization)
    ignored: tuple[str, ...] = ()
    is_single_file: bool = False
    container: Container = SAFETENSORS
    header_config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    conflict: InputError | None = None
    not_found: InputError | None = None
    remote: RemoteFiles | None = None

    def __post_init__(self) -> None:
        self._by_name = {shard.name: shard for shard in self.shards}
        self._maps = MappedFiles()

    @property
    def has_config(self) -> bool:
        return self.config is not self.header_config and bool(self.config)

    def path(self, info: TensorInfo) -> Path:
        return self._by_name[info.file].path

    def identity(self, info: TensorInfo) -> tuple[object, ...]:
        """Return what identifies a tensor and its file independently of paths, for fingerprints."""
        shard = self._by_name[info.file]
        return info.name, info.dtype, info.shape, (shard.header_sha256, shard.size, shard.blob)

    def array(self, name: str) -> Array:
        return self.view(self.tensors[name])

    def view(self, info: TensorInfo) -> Array:
        """Return a view of the bytes of a tensor, or of a part of one, with its shape; unaligned if the file is."""
        kind = VIEWS.get(info.dtype)
        if kind is None:
            problem = f"is {info.dtype}, which cannot be read; use the BF16 or FP8 release"
            raise UnsupportedError.from_tensor(info.name, problem)
        if self.remote is not None:
            size = self._by_name[info.file].size
            fetched = self.remote.view(info.file, size, info.start, info.start + info.nbytes)
            return np.ndarray(info.shape, kind, buffer=fetched)
        return np.ndarray(info.shape, kind, buffer=self._map(info), offset=info.start)

    def release(self, info: TensorInfo) -> None:
        """Return the tensor's pages to the system; a later access reads them from the file again."""
        if self.remote is not None:
            self.remote.release(info.file, info.start, info.start + info.nbytes)
            return
        # Rounded outward: the pages are read-only and backed by the file, so a neighbour's come back when touched.
        first = info.start - info.start % mmap.PAGESIZE
        if info.nbytes and self.path(info) in self._maps:
            self._map(info).madvise(mmap.MADV_DONTNEED, first, info.start + info.nbytes - first)

    def prefetch(self, info: TensorInfo) -> None:
        if self.remote is not None:
            self.remote.prefetch(info.file, self._by_name[info.file].size, info.start, info.start + info.nbytes)
            return
        mapped, stop = self._map(info), info.start + info.nbytes
        for start in range(info.start - info.start % mmap.PAGESIZE, stop, READ_AHEAD):
            mapped.madvise(mmap.MADV_WILLNEED, start, min(READ_AHEAD, stop - start))

    def companions(self) -> list[str]:
        """List companion files; for a single file of weights only those directly beside it and a config.json."""
        return companion_files(self.companion_root, nested=not self.is_single_file or self.companion_root != self.root)

    def paths(self) -> list[Path]:
        companions = [self.companion_root / name for name in self.companions()]
        return [*(shard.path for shard in self.shards), *sorted(self.root.glob("*.index.json")), *companions]

    def close(self) -> None:
        self._maps.close()
        if self.remote is not None:
            self.remote.close()

    def require_one_reading(self) -> None:
        """Raise InputError if transformers, which loads the rest of a model, would read other weights here."""
        if self.conflict is not None:
            raise self.conflict

    def require_found(self) -> None:
        """Raise InputError if transformers, which reads these files itself, would not find the weights here."""
        if self.not_found is not None:
            raise self.not_found

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _map(self, info: TensorInfo) -> mmap.mmap:
        shard = self._by_name[info.file]
        return self._maps.map(shard.path, shard.size)


def open_checkpoint(
    location: str | Path, revision: str | None = None, config: str | None = None, stream: Path | None = None
) -> TensorSource:
    """Open a directory, a file of weights, or a model of the Hugging Face hub; read headers only.

    config  directory or hub model that provides config.json and other companions for a GGUF; UsageError for any other
            checkpoint
    stream  fetch the bytes of a model of the hub when they are needed, into files without a name on the disk of this
            path; None: download the model first

    Raises InputError for files that are missing, damaged or contradict the index, UnsupportedError for other formats.
    """
    place = locate_checkpoint(str(location), revision, streamed=stream is not None)
    path = place.path
    is_single_file = not path.is_dir()
    root = path.parent if is_single_file else path
    container, selection = _select_file(path) if is_single_file else _select_files(path)
    if config is not None and not container.experts_only:
        raise UsageError(f"--config {config}: {path} is {container.title}, whose own config.json counts; leave it out")
    headers = read_headers(root, selection.names, container)
    shards: list[Shard] = []
    tensors: dict[str, TensorInfo] = {}
    copies: dict[str, list[TensorInfo]] = {}  # of tensors that are in several files
    for name, header in headers.items():
        shards.append(Shard(root / name, name, header.size, header.sha256, header.mtime_ns, _blob_name(root / name)))
        for info in header.entries:
            if (first := tensors.setdefault(info.name, info)) is not info:
                copies.setdefault(info.name, [first]).append(info)
    tensors |= {name: _choose_copy(root, selection, infos) for name, infos in copies.items()}
    notes = [note for note in (selection.note, *_describe_disagreements(selection, tensors, copies)) if note]
    conflict, not_found = None, None
    if not is_single_file and not container.experts_only:
        conflict, not_found = _compare_with_transformers(root, selection, tensors, copies)
    if conflict is not None:
        notes.append(conflict.problem)
    if not_found is not None:
        notes.append(f"{not_found.problem}; `run`, `serve`, `eval` and `train` need it")
    container.check(root, selection.names, tuple(headers.values()))
    rotation.refuse_tensors(root, tensors)
    header_config = next((header.config for header in headers.values() if header.config), {})
    if config is None and place.remote is not None:
        companion_root = place.remote.fetch_companions(root)
    else:
        companion_root = root if config is None else hub.resolve(config, companions_only=True)
    if config is not None and not (companion_root / "config.json").is_file():
        remedy = "name the directory of the Hugging Face model, or its id"
        raise InputError(f"--config {companion_root}: has no config.json; {remedy}")
    remote = None
    if stream is not None and place.remote is not None:
        remote = RemoteFiles(place.remote, next(parent for parent in stream.absolute().parents if parent.is_dir()))
    own = read_config(companion_root) or header_config
    shown = own, tuple(shards), tensors, companion_root, read_quantization(companion_root, own)
    return TensorSource(
        root,
        *shown,
        selection.ignored,
        is_single_file,
        container,
        header_config,
        tuple(notes),
        conflict,
        not_found,
        remote,
    )


def locate_checkpoint(name: str, revision: str | None, *, streamed: bool) -> Location:
    """Return a checkpoint here, or if `streamed` the headers of one that is not. Raises UsageError for other URLs."""
    if URL.fullmatch(name):
        if not streamed:
            reads = "only `fetch`, commands with --stream, `fit`, `inspect`, and `verify` of CPU experts read it"
            raise UsageError(f"{name}: is a URL; {reads}; download the model.")
        return find_url_headers(name, revision)
    return find_headers(name, revision) if streamed else Location(hub.resolve(name, revision))


def read_headers(
    root: Path, names: Iterable[str], container: Container = SAFETENSORS, damaged: dict[str, InputError] | None = None
) -> dict[str, Header]:
    """Read the headers of these files.

    damaged  receives the errors of files that cannot be read; None: they are raised
    """
    headers: dict[str, Header] = {}
    for name in names:
        try:
            headers[name] = container.read_header(root / name, name)
        except InputError as error:
            if damaged is None:
                raise
            damaged[name] = error
    return headers


def _select_file(path: Path) -> tuple[Container, Selection]:
    for container in CONTAINERS:
        if path.suffix == container.suffix:
            return container, container.select_file(path)
    suffixes = " or ".join(container.suffix for container in CONTAINERS)
    problem, folder = f"not a {suffixes} file", path.parent
    if path.suffix in PYTORCH_SUFFIXES:
        raise UnsupportedError(f"{path}: {problem}; use the safetensors release")
    remedy = f"give the directory {folder}" if (folder / "config.json").exists() else "give a model's directory"
    raise bad_file(path, problem, remedy)


def _select_files(root: Path) -> tuple[Container, Selection]:
    try:
        files = sorted(p.name for p in root.iterdir() if not p.name.startswith("."))
    except OSError as e:
        raise InputError(f"{root}: cannot be listed ({e.strerror}); check its permissions") from None
    named = _weights_file_in_config(root)
    if named is not None and (selection := safetensors.select(root, files, named)) is not None:
        return SAFETENSORS, selection
    for container in CONTAINERS:
        if (selection := container.select(root, files)) is not None:
            return container, selection
    for suffix in PYTORCH_SUFFIXES:
        if any(f.endswith(suffix) for f in files):
            problem = f"holds PyTorch {suffix} weights only, which are not an input"
            raise UnsupportedError(f"{root}: {problem}; use the safetensors release")
    raise explain_lack_of_weights(root, "give the directory of a downloaded checkpoint")


def explain_lack_of_weights(root: Path, remedy: str) -> KTConvertError:
    """Return the error for a directory without weights, which may be unfinished.

    If a directory in it has some, the remedy names that one instead of the given `remedy`.
    """
    if (error := explain_unfinished(root)) is not None:
        return error
    for pattern in ("*/*.safetensors", "*/*/*.safetensors"):  # also of the hub's cache: snapshots/COMMIT
        for file in sorted(root.glob(pattern)):
            parts = file.parent.relative_to(root).parts
            if not any(part.startswith(".") or part.endswith(WORK_SUFFIX) for part in parts):
                remedy = f"give a directory that has one, such as {file.parent}"
                return bad_file(root, "has no .safetensors file", remedy)
    return bad_file(root, "has no .safetensors file", remedy)


def _weights_file_in_config(root: Path) -> str | None:
    """Return the existing file of weights, or index, that config.json names for transformers; None if there is none.

    Our own outputs for the CPU name none, so that transformers does not load them by itself.
    """
    with contextlib.suppress(InputError):
        named = read_config(root).get("transformers_weights")
        if isinstance(named, str) and named.endswith((".safetensors", INDEX_SUFFIX)):
            return named if is_inside(named) and (root / named).is_file() else None
    return None


def _choose_copy(root: Path, selection: Selection, infos: Sequence[TensorInfo]) -> TensorInfo:
    """Return the copy of a tensor that the index names. Raises InputError if it names none."""
    shard = (selection.index or {}).get(infos[0].name)
    for info in infos:
        if info.file == shard:
            return info
    problem = f"is in {infos[0].file} and in {infos[1].file}, and no index says which one counts"
    remedy = "give one of the files, or download the index"
    raise InputError.from_tensor(infos[0].name, problem, remedy, root)


def _describe_disagreements(
    selection: Selection, tensors: Mapping[str, TensorInfo], copies: Mapping[str, Sequence[TensorInfo]]
) -> Iterator[str]:
    """Yield a sentence for each way in which an index and the headers of its files differ."""
    if selection.index is None:
        return
    index = selection.index
    names_by_description = {
        "that no file holds": [name for name in index if name not in tensors],
        "in other files than those that hold them": [
            name for name, info in tensors.items() if index.get(name, info.file) != info.file
        ],
    }
    for location, names in names_by_description.items():
        if names:
            yield f"{selection.decider} names {_tensor_count(names)} {location}, such as {names[0]} ({index[names[0]]})"
    if unnamed := [name for name in tensors if name not in index]:
        yield f"{selection.decider} does not name {_tensor_count(unnamed)} of its files, such as {unnamed[0]}"
    if several := [*copies]:
        kept = index[several[0]]
        others = ", ".join(info.file for info in copies[several[0]] if info.file != kept)
        problem = f"{_tensor_count(several)} in several files: {several[0]} is read from {kept}, not from {others}"
        yield f"{selection.decider} chooses among copies of {problem}"


def _tensor_count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"


def _compare_with_transformers(
    root: Path, selection: Selection, tensors: Mapping[str, TensorInfo], copies: Mapping[str, Sequence[TensorInfo]]
) -> tuple[InputError | None, InputError | None]:
    """Return `conflict` and `not_found` of a TensorSource."""
    decider = selection.decider
    if decider in (SINGLE, INDEX) or (decider and decider == _weights_file_in_config(root)):
        return _find_other_copy(root, selection, tensors, copies), None
    other = next((name for name in PYTORCH if (root / name).is_file()), None)
    if other is not None:
        problem = f"{selection.names[0]} is read here, and transformers would read {other}"
        return InputError(problem, "give a directory that holds only one of them", path=root), None
    return None, _explain_not_found(root, selection)


def _explain_not_found(root: Path, selection: Selection) -> InputError:
    """Return the error that transformers would not find the selected files."""
    problem = f"{INDEX} is missing, by which transformers finds the weights in {shorten_names(selection.names)}"
    if selection.decider:
        remedy = f"copy {selection.decider} to {INDEX}"
    elif len(selection.names) == 1:
        remedy = f"rename {selection.names[0]} to {SINGLE}"
    else:
        remedy = "download it"
    return bad_file(root, problem, remedy)


def _find_other_copy(
    root: Path, selection: Selection, tensors: Mapping[str, TensorInfo], copies: Mapping[str, Sequence[TensorInfo]]
) -> InputError | None:
    """Return an error if transformers would read a different copy of a tensor, else None.

    If files contain several copies of a tensor, it takes the one in the last file by name, whatever an index says.
    """
    transformers_files = (SINGLE,) if SINGLE in selection.names else selection.names
    for name, infos in copies.items():
        last = [info.file for info in infos if info.file in transformers_files][-1:]
        if last and last[0] != (our_file := tensors[name].file):
            problem = (
                f"is read from {our_file}, as {selection.decider} says, "
                f"and transformers would read its copy in {last[0]}"
            )
            remedy = f"`ktconvert dequantize {root} OUT` writes a model with one copy of each tensor"
            return InputError.from_tensor(name, problem, remedy, root)
    return None


def read_config(root: Path) -> dict[str, Any]:
    """Read config.json, or params.json, of a directory; return {} if there is neither.

    Raises InputError for a file that is not a JSON object.
    """
    for name in ("config.json", "params.json"):
        if (root / name).exists():
            return read_json_object(root / name)
    return {}


def read_quantization(root: Path, config: dict[str, Any] | None = None) -> cfg.Quantization:
    """Read how weights are quantized, from config.json and quantize_config.json.

    Raises InputError if these are wrong or contradict each other, RotatedError if the model rotates while it computes.
    """
    config, other = read_config(root) if config is None else config, root / cfg.QUANTIZE_CONFIG
    declared = cfg.parse_quantization(config)
    rotation.refuse_config(root / "config.json", config)
    if not other.exists():
        return declared
    of_file = read_json_object(other)
    rotation.refuse_config(other, {cfg.QUANTIZATIONS[0]: of_file})
    try:
        return cfg.merge_quantization_files(declared, of_file)
    except ValueError as error:
        raise InputError(f"{other}: {error}; correct the one that is wrong") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file of a checkpoint.

    Raises InputError if it cannot be read, is not an object, or could not be written again.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise unreadable_file(path, e) from None
    refuse_substitute(path, data, "JSON")
    if not data.strip():
        raise bad_file(path, "is empty")
    try:
        # Infinity and NaN are let through: configurations of released models hold them.
        tree = documents.parse_json(data)
        documents.require_plain(tree)
    except json.JSONDecodeError as e:
        raise bad_file(path, f"not valid JSON (line {e.lineno}, column {e.colno})") from None
    except ValueError:
        raise bad_file(path, "not valid JSON") from None
    if not isinstance(tree, dict):
        raise bad_file(path, "must hold a JSON object")
    return tree


def _blob_name(path: Path) -> str | None:
    """Return the blob that a link of a Hugging Face cache snapshot points to; its name is the hash of its contents."""
    with contextlib.suppress(OSError):
        if (target := path.readlink()).parent.name == "blobs":
            return target.name
    return None
