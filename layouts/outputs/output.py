"""An output on disk, for the CPU (merged or loose, ours or kt-kernel's) or the GPU: which bytes are which part of which expert."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.containers.safetensors import REMEDY, read_header
from ktconvert.layouts.checkpoints.source import INDEX, read_index
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs import LAYOUTS, Layout, gpu_output, loose, merged
from ktconvert.layouts.outputs.parts import Part

Bytes = npt.NDArray[np.uint8]
AGAIN = "convert it again"
WORK_INSIDE = ".ktconvert"
PACKER = "compressed-tensors"  # quant_method in config.json of an output for the GPU

# How loose files start -> kt-kernel's name of the method. What MOE_* bytes mean is known to the library that wrote them only.
METHODS = {x.file_prefix: x.name for x in LAYOUTS.values()} | {"MOE_INT4": "MOE_INT4", "MOE_INT8": "MOE_INT8"}


class Place(NamedTuple):
    """Which matrix of the model: one projection of one expert on one NUMA node; backward: its transpose."""

    layer: int
    expert: int
    projection: str
    backward: bool
    numa: int

    def key(self, what: str) -> str:
        """The name of its "weight" or "scale" in a merged output."""
        return merged.key(Part(self.layer, self.expert, self.projection, self.numa, 0, 0, self.backward), what)

    def told(self, what: str) -> str:
        """For people."""
        backward = "backward " if self.backward else ""
        where = f"layer {self.layer}, expert {self.expert}, {self.projection}_proj, NUMA part {self.numa}"
        return f"{where}, {backward}{what}"


def place_of(part: Part) -> Place:
    """Where a part belongs, whatever its size."""
    return Place(part.layer, part.expert, part.projection, part.backward, part.numa)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor on disk: its key (merged) or file name (loose), dtype and shape as stored, and where its bytes lie.

    file  path relative to the output; start and nbytes in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Output:
    """An opened output; headers and names are known, of the weights nothing is read.

    manifest   manifest.json, None in kt-kernel's own outputs
    config     config.json, {} where there is none
    weight_map what the index says (tensor -> shard); None where there is no index
    total_size what the index says, None where it says nothing
    shards     weight files relative to root, in order
    metadata   shard -> its __metadata__
    tensors    (place, "weight" or "scale") -> where it is
    others     tensors that are no routed experts, by name
    doubles    (name, first file, second file) of what is there twice
    strays     names that stand among the experts but that kt-kernel does not read
    prefixes   how the loose files start
    damaged    file -> why it cannot be read
    names      what packed linears are called, in an output for the GPU; its tensors are (place, suffix), all NUMA part 0
    """

    root: Path
    loose: bool
    manifest: dict[str, Any] | None
    config: dict[str, Any]
    weight_map: dict[str, str] | None = None
    total_size: int | None = None
    shards: list[str] = field(default_factory=list)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    tensors: dict[tuple[Place, str], Stored] = field(default_factory=dict, repr=False)
    others: dict[str, Stored] = field(default_factory=dict, repr=False)
    doubles: list[tuple[str, str, str]] = field(default_factory=list)
    strays: list[tuple[str, str]] = field(default_factory=list)
    prefixes: set[str] = field(default_factory=set)
    damaged: dict[str, str] = field(default_factory=dict)
    names: gpu_output.Names | None = None

    def read(self, stored: Stored, start: int = 0, stop: int | None = None, out: Bytes | None = None) -> Bytes:
        """Bytes start..stop-1 of a tensor (all of it by default), in `out` or in memory of their own.

        Raises VerificationError where the disk or a file that became shorter does not give them.
        """
        stop = stored.nbytes if stop is None else stop
        if out is None:
            out = np.empty(stop - start, np.uint8)
        view, done = memoryview(out.data), 0
        path = self.root / stored.file
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done < out.size and (got := os.preadv(fd, [view[done:]], stored.start + start + done)):
                    done += got
            finally:
                os.close(fd)
        except OSError as error:
            raise VerificationError(f"{path}: cannot be read ({error.strerror}); check the disk.") from error
        if done < out.size:
            raise VerificationError(f"{path}: became shorter while it was read; {AGAIN}.")
        return out


@dataclass(frozen=True)
class Measure:
    """What the bytes of an output say it is.

    method  "AMXINT4", ..., or "unknown" where the sizes fit none; layout is None where we cannot tell what the bytes mean
    numa    T, the number of NUMA parts
    shapes  layer -> (E, H, I)
    """

    method: str
    layout: Layout | None
    numa: int
    backward: bool
    shapes: dict[int, tuple[int, int, int]]


def is_output(path: Path) -> bool:
    """Whether a directory holds expert weights in kt-kernel's layouts (whole or not), rather than a checkpoint."""
    if not path.is_dir():
        return False
    try:
        if manifest.read(path) is not None:
            return True
    except VerificationError:
        pass  # someone else's manifest.json; the weights decide
    if loose.layers_in(path):
        return True
    try:
        return any(merged.KEY.fullmatch(name) for name in read_index(path / INDEX))
    except InputError:
        pass
    for shard in sorted(path.glob("*.safetensors")):
        try:
            return any(merged.KEY.fullmatch(entry.name) for entry in read_header(shard).entries)
        except InputError:
            continue
    return False


def open_output(root: Path) -> Output:
    """Open an output, finished or damaged; what is wrong with it is in the result, not raised.

    Raises UnsupportedError for a directory that holds no expert weights of kt-kernel, VerificationError for a manifest that cannot be read.
    """
    if not root.is_dir() or not is_output(root):
        quantized = _json(root, "config.json", {}).get("quantization_config")
        if isinstance(quantized, dict) and quantized.get("quant_method") == PACKER:
            raise UnsupportedError(
                f"{root}: is packed by {PACKER} and has no {manifest.NAME}; if `ktconvert gpu` wrote it, put that file back or "
                "convert again, else give the directory of an output."
            )
        raise UnsupportedError(f"{root}: holds no expert weights of kt-kernel; give the directory of an output.")
    made = _trusted(root)
    shards = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.safetensors")
        if WORK_INSIDE not in path.relative_to(root).parts
    )
    folders = loose.layers_in(root)
    is_loose = bool(folders) and not shards
    if made is not None:
        is_loose = bool(made["settings"].get("no_merge_safetensor"))
    damaged: dict[str, str] = {}
    output = Output(
        root,
        is_loose,
        made,
        _json(root, "config.json", damaged),
        *_index(root, damaged),
        shards,
        damaged=damaged,
        names=gpu_output.Names(made["model"]["linear_names"]) if made is not None and gpu_output.of_gpu(made) else None,
    )
    if is_loose:
        _walk_loose(output, folders)
    else:
        _walk_shards(output)
    return output


def measure(output: Output) -> Measure:
    """Method, T, E, H and I, as most of the tensors have them: a few damaged ones do not mislead.

    INT4 and INT8 share names and dtypes; only byte counts tell them apart. H and I follow from the scales: gate has I/T rows, down H.
    """
    if output.names is not None:
        return _measure_gpu(output)
    places = {place for place, _ in output.tensors}
    numa = 1 + max((place.numa for place in places), default=0)
    experts: dict[int, int] = {}
    for place in places:
        experts[place.layer] = max(experts.get(place.layer, 0), place.expert + 1)
    found: dict[tuple[int | None, str], Counter[int]] = {}
    for (place, what), stored in output.tensors.items():
        if not place.backward:
            kind = what if what == "weight" else "down" if place.projection == "down" else "gate"
            for layer in (place.layer, None):
                found.setdefault((layer, kind), Counter())[stored.nbytes] += 1

    def usual(layer: int, kind: str) -> int:
        seen = found.get((layer, kind)) or found.get((None, kind))
        return seen.most_common(1)[0][0] if seen else 0

    shapes, bits = {}, Counter[float]()
    for layer in sorted(experts):
        rows, hidden = usual(layer, "gate") // 4, usual(layer, "down") // 4
        shapes[layer] = (experts[layer], hidden, rows * numa)
        bits[8 * usual(layer, "weight") / (rows * hidden) if rows and hidden else 0] += 1
    usual_bits = bits.most_common(1)[0][0] if bits else 0
    layout = next((x for x in LAYOUTS.values() if x.quantizer.bits == usual_bits), None)
    method = layout.name if layout else "unknown"
    foreign = {METHODS.get(p, p) for p in output.prefixes} | {m.get("method", "") for m in output.metadata.values()}
    opaque = sorted(name for name in foreign if name.startswith("MOE_"))
    if opaque:
        method, layout = opaque[0], None
    return Measure(method, layout, numa, any(place.backward for place in places), shapes)


def _measure_gpu(output: Output) -> Measure:
    assert output.manifest is not None
    facts = output.manifest["model"]
    scales = (
        (place.layer, place.expert, place.projection, stored.shape)
        for (place, what), stored in output.tensors.items()
        if what == "weight_scale"
    )
    return Measure(facts["method"], None, 1, False, gpu_output.shapes_of(scales, facts["group_size"]))


def files_of(root: Path) -> Iterator[str]:
    """Every file of an output, relative to it, less what hidden folders hold."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(files):
            yield (Path(folder) / name).relative_to(root).as_posix()


def _trusted(root: Path) -> dict[str, Any] | None:
    """The manifest, if what is asked of it has the types that it must have. Raises VerificationError."""
    made = manifest.read(root)
    if made is None:
        return None
    facts = made["model"]
    sizes = [facts.get(name) for name in ("experts", "hidden", "intermediate")]
    good = (
        isinstance(made.get("command"), str)
        and isinstance(made.get("tool"), dict)
        and (gpu_output.is_trusted(facts) if gpu_output.of_gpu(made) else isinstance(facts.get("numa"), int))
        and all(type(n) is int for name in ("layers", "kept_layers") for n in facts.get(name, []))
        and all(isinstance(size, int | list | str) for size in sizes)
        and all(isinstance(file, dict) for file in made["source"])
    )
    if not good:
        raise VerificationError(
            f"{root / manifest.NAME}: not a manifest that ktconvert wrote; {AGAIN} with --overwrite."
        )
    return made


def _json(root: Path, name: str, damaged: dict[str, str]) -> dict[str, Any]:
    try:
        tree = json.loads((root / name).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
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
        damaged[INDEX] = _sentence(root, error)
        return None, None
    about = _json(root, INDEX, damaged).get("metadata")
    total = about.get("total_size") if isinstance(about, dict) else None
    return weight_map, total if isinstance(total, int) else None


def _sentence(root: Path, error: InputError) -> str:
    """What is wrong with a file of ours, in the words for a downloaded one less their remedy, and without the directory."""
    return str(error).replace(f"; {REMEDY}", "").replace(f"{root}/", "")


def _walk_shards(output: Output) -> None:
    for shard in output.shards:
        try:
            header = read_header(output.root / shard)
        except InputError as error:
            output.damaged[shard] = _sentence(output.root, error)
            continue
        output.metadata[shard] = header.metadata
        for entry in header.entries:
            stored = Stored(entry.name, entry.dtype, entry.shape, shard, entry.start, entry.nbytes)
            if output.names is not None:
                part = output.names.find(entry.name)
                if part is None:
                    _add(output, output.others, entry.name, stored)
                else:
                    _add(output, output.tensors, (Place(*part[:3], False, 0), part[3]), stored)
                continue
            match = merged.KEY.fullmatch(entry.name)
            if match is None:
                if "ffn_" in entry.name and "_exps" in entry.name:
                    output.strays.append((entry.name, shard))
                _add(output, output.others, entry.name, stored)
                continue
            layer, expert, node = (int(match[name]) for name in ("layer", "expert", "numa"))
            place = Place(layer, expert, match["projection"], bool(match["backward"]), node)
            if place.key(match["what"]) != entry.name:  # numbers with leading zeros
                output.strays.append((entry.name, shard))
            _add(output, output.tensors, (place, match["what"]), stored)


def _walk_loose(output: Output, folders: dict[int, Path]) -> None:
    for layer, folder in folders.items():
        before = len(output.tensors)
        for path in sorted(_below(folder)):
            name = path.relative_to(output.root).as_posix()
            node = loose.NUMA.fullmatch(path.parent.name)
            match = loose.FILE.fullmatch(path.name)
            if node is None or match is None:
                if path.suffix == ".kt":
                    output.strays.append((path.name, name))
                continue
            size = path.stat().st_size
            if size != int(match["nbytes"]):
                output.damaged[name] = f"{name}: holds {size} bytes where its name says {match['nbytes']}"
            output.prefixes.add(match["prefix"])
            place = Place(layer, int(match["expert"]), match["projection"], bool(match["backward"]), int(node[1]))
            what = "weight" if match["what"] == "quant" else "scale"
            dtype, shape = ("I8", (size,)) if what == "weight" else ("F32", (size // 4,))
            _add(output, output.tensors, (place, what), Stored(name, dtype, shape, name, 0, size))
        if len(output.tensors) == before:
            output.damaged[folder.name] = f"{folder.name} holds no .kt files below _numa_N"


def _below(folder: Path) -> Iterable[Path]:
    return (path for node in folder.iterdir() if node.is_dir() for path in node.iterdir() if path.is_file())


def _add(output: Output, where: dict[Any, Stored], key: Any, stored: Stored) -> None:
    if key in where:
        output.doubles.append((stored.name, where[key].file, stored.file))
    where[key] = stored  # as in kt-kernel's loader, the last one counts
