"""Which safetensors files of a directory make up a checkpoint: those of its index, else all of one set of shards."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath

from ktconvert.layouts.checkpoints.containers.container import Selection
from ktconvert.layouts.checkpoints.containers.reading import LFS_MAGIC, LFS_REMEDY
from ktconvert.layouts.errors import InputError, damaged_file

INDEX = "model.safetensors.index.json"
PART = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})\.safetensors")


def select(root: Path, files: list[str]) -> Selection | None:
    """The safetensors files that are a checkpoint. InputError where one is missing, or there are several sets."""
    present = [f for f in files if f.endswith(".safetensors")]
    indexes = [f for f in files if f.endswith(".safetensors.index.json")]
    if indexes and INDEX not in indexes and len(indexes) > 1:
        raise InputError(f"{root}: several indexes ({', '.join(indexes)}); keep one, named {INDEX}")
    if indexes:
        chosen = INDEX if INDEX in indexes else indexes[0]
        index, _ = read_index(root / chosen)
        names = sorted(set(index.values()))
        for name in names:
            if not (root / name).exists():
                raise damaged_file(root / chosen, f"names {name}, which is missing")
        return Selection(names, index, tuple(f for f in present if f not in names))
    if not present:
        return None
    # Mistral releases hold the same weights twice, as model-* and as consolidated*.
    main = [f for f in present if not f.startswith("consolidated")] or present
    _complete(root, main)
    return Selection(main, None, tuple(f for f in present if f not in main))


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """(tensor name -> shard in the index's directory, total_size or None) of an index. Raises InputError."""
    try:
        data = path.read_bytes()
        if data.startswith(LFS_MAGIC):
            raise damaged_file(path, "a Git LFS pointer, not the index", LFS_REMEDY)
        tree = json.loads(data.decode("utf-8"))
    except OSError as e:
        raise damaged_file(path, f"cannot be read ({e.strerror})") from None
    except (ValueError, RecursionError):
        raise damaged_file(path, "not valid JSON") from None
    weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged_file(path, "has no weight_map")
    places = {shard if isinstance(shard, str) else repr(shard): name for name, shard in weight_map.items()}
    for shard, name in places.items():
        if not isinstance(weight_map[name], str) or not _inside(shard):
            raise damaged_file(path, f"places tensor {name!r} in {shard[:200]!r}, outside this directory")
        if not shard.endswith(".safetensors"):
            raise damaged_file(path, f"places tensor {name!r} in {shard!r}, not a .safetensors file")
    about = tree.get("metadata")
    total = about.get("total_size") if isinstance(about, dict) else None
    return weight_map, total if isinstance(total, int) else None


def _inside(shard: str) -> bool:
    pure = PurePosixPath(shard)
    plain = shard.isprintable() and "\\" not in shard
    return plain and bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and str(pure) == shard


def _complete(root: Path, names: list[str]) -> None:
    """Without an index, files called …-00002-of-00005 still say how many there must be."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := PART.fullmatch(name):
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    if len(sets) > 1:
        totals = ", ".join(f"{stem}-*-of-{total}" for stem, total in sorted(sets))
        raise InputError(f"{root}: holds the shards of several checkpoints ({totals}); keep one set")
    for (stem, total), numbers in sets.items():
        # Stops at the first gap: the total is what a file's name claims, and may be anything.
        missing = next((n for n in range(1, int(total) + 1) if n not in numbers), None)
        if missing is not None:
            raise damaged_file(root, f"{stem}-{missing:05d}-of-{total}.safetensors is missing", "download it again")
