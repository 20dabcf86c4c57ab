"""The plan of `ktconvert merge`: loose layer folders, ours or kt-kernel's, into safetensors that kt-kernel loads."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.companions import companion_files
from ktconvert.layouts.checkpoints.source import read_config
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.outputs import FORMATS, LOOSE_METHODS, PROJECTIONS, Format, card, cpu_card, format_of, loose
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import one_or_all
from ktconvert.layouts.outputs.parts import Part
from ktconvert.pipeline.engine.plan import CONFIG, Plan, Request, tool_version
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.quantization import MergeOptions
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.stages import merge_parts
from ktconvert.pipeline.stages.merge_parts import LooseFile

# The prefix of loose files that can be merged -> kt-kernel's name of the method; others hold backward matrices alone.
MERGED = {prefix: name for prefix, name in LOOSE_METHODS.items() if FORMATS[name].forward}
# Facts of the layers' manifest that hold for the merged output, too.
KEPT_FACTS = (
    *("architecture", "layout", "activation", "dtypes", "weights_on", *checkpoint.ABOUT_CODES, "without_counts"),
    *("too_few_tokens", "equalized", "resplit_from"),
)


WHAT = ("experts", "hidden size", "expert width")
FACTS = ("experts", "hidden", "intermediate")  # what the manifest calls them
MOST_LAYERS = 10_000  # more is no model
AGAIN = "convert it again"
CLAIM = ", and neither a manifest.json beside them nor --original-path says that they do"
CHOOSE = "if they are left out on purpose, name those to merge with --layers"


def plan_merge(request: Request[MergeOptions], hashed: Callable[[int], None] | None = None) -> Plan:
    """Plan the whole merge from names and sizes only. Raises InputError for a missing, extra or cut-off file,
    UnsupportedError where there is nothing to merge.
    """
    original = request.options.original_path
    request = replace(request, options=with_values(request.options, with_companions=original is not None))
    root, options = Path(request.input), request.options
    folders = loose.layers_in(root) if root.is_dir() else {}
    if root.is_dir():
        loose.require_plain_numbers(root)
    if not folders:
        raise InputError(f"{root}: holds no _layer_N folders; give the output of --no-merge-safetensor.")
    chosen = options.layers != "all"
    numbers = checkpoint.parse_layers(options.layers, tuple(folders))
    by_layer = {layer: _files_of(layer, folders[layer]) for layer in numbers}
    files = [file for layer in by_layer.values() for file in layer]
    prefixes = {loose.FILE.fullmatch(f.path.name)["prefix"] for f in files}  # type: ignore[index]
    if len(prefixes) != 1:
        raise InputError(
            f"{root}: holds {' and '.join(sorted(prefixes)) or 'no .kt'} files; merge one method at a time."
        )
    prefix = prefixes.pop()
    method = MERGED[prefix]
    recorded = recorded_facts(root)
    fmt = format_of({**(recorded or {}), "method": method})
    layers = {layer: measure_layer(own, fmt) for layer, own in by_layer.items()}
    paths = _companions(original)
    source_config = _config(original)
    require_whole(root, layers, recorded, source_config, chosen=chosen)
    facts = _facts(layers, method, fmt, recorded)
    about = cpu_card.AMX if fmt is None else fmt.description
    lines = about.card(facts, None, False, "skip", about.numbers)
    entries = cpu_card.entries_of(facts, tool_version(), per_row=True)
    config = None if source_config is None else card.config_json(source_config, entries, whole=False)
    metadata = {"format": "pt", "ktconvert_format": "1", "method": facts["method"], "numa": str(facts["numa"])}
    read = {f.path: SourceFile(f.path.relative_to(root).as_posix(), f.nbytes, None, f.mtime_ns) for f in files}
    read |= checkpoint.files_below(original, [name for name, _ in paths]) if original else {}
    return Plan(
        request=request,
        files=read,
        reads=(root / manifest.NAME, *read),
        stages=checkpoint.number_shards([merge_parts.stage(files, options.max_tensors, metadata, root)]),
        facts=facts,
        notes=(),
        companions=checkpoint.companions(original, [name for name, _ in paths]) if original else (),
        config=config,
        peak_memory=lambda threads: checkpoint.BASE_MEMORY + 4 * merge_parts.CHUNK,
        card=lambda stats: card.model_card(lines, None, facts, (), stats, tool_version()),
    )


def _files_of(layer: int, folder: Path) -> list[LooseFile]:
    """One layer's files in the order of the merged keys. InputError unless every matrix is there on every node."""
    files: dict[tuple[int, str, bool, int, str], LooseFile] = {}
    for node, name, path in loose.files_in(folder):
        if name["prefix"] not in MERGED:
            raise UnsupportedError(
                f"{path}: there is nothing to merge in {name['prefix']} files: they are backward matrices alone, which "
                f"stay loose; give {', '.join(MERGED)} files."
            )
        what = "weight" if name["what"] == "quant" else "scale"
        part = Part(layer, int(name["expert"]), name["projection"], node, 0, 0, bool(name["backward"]))
        key = (part.expert, part.projection, part.backward, node, what)
        if key in files:
            raise InputError(
                f"{path}: a second file for the same matrix as {files[key].path.name}; remove the wrong one."
            )
        status = path.stat()
        files[key] = LooseFile(part, what, path, status.st_size, status.st_mtime_ns)
    if not files:
        raise InputError(f"{folder}: holds no .kt files below _numa_N; convert this layer again.")
    experts, nodes = range(max(key[0] for key in files) + 1), range(max(key[3] for key in files) + 1)
    both = sorted({False, *(backward for _, _, backward, _, _ in files)})
    expected = [*itertools.product(experts, PROJECTIONS, both, nodes, ("weight", "scale"))]
    for e, p, backward, n, what in expected:
        if (e, p, backward, n, what) not in files:
            raise InputError(
                f"{folder}: the {'backward ' if backward else ''}{what} of expert {e}, {p}_proj, NUMA node {n} is "
                "missing; convert this layer again."
            )
    return [files[key] for key in expected]


def _facts(
    layers: Mapping[int, LooseLayer], method: str, fmt: Format | None, recorded: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What is known from names and sizes; H and I follow from the scales of a format that we know."""
    facts: dict[str, Any] = {
        "architecture": "unknown",
        "method": method,
        "layout_version": 1,
        "numa": max(layer.numa for layer in layers.values()),
        "layers": list(layers),
        "experts": one_or_all(layer.experts for layer in layers.values()),
        "activation": "not recorded",
        "dtypes": ["not recorded"],
        "bits": FORMATS[method].encoding.grid.bits,
        "hidden": one_or_all(layer.hidden for layer in layers.values()) if fmt else "not recorded",
        "intermediate": one_or_all(layer.width for layer in layers.values()) if fmt else "not recorded",
    }
    facts |= {key: recorded[key] for key in KEPT_FACTS if recorded and key in recorded}
    facts["backward"] = any(layer.backward for layer in layers.values())
    return facts


def recorded_facts(root: Path) -> dict[str, Any] | None:
    """The facts of an output's manifest, if there is one. Raises VerificationError for one that is not ours."""
    if (recorded := manifest.read(root)) is None:
        return None
    facts = dict(recorded.model)
    for key in (key for key in KEPT_FACTS if key != "resplit_from"):  # whose type manifest.read checks
        if not all(isinstance(text, str) and text.isprintable() for text in _texts(key, facts.get(key, ""))):
            raise VerificationError(
                f"{root / manifest.NAME}: not a manifest that ktconvert wrote ({key}); convert again."
            )
    return facts


def _texts(key: str, value: Any) -> Iterable[Any]:
    """What must be printable text of a fact; of an object, its keys and its values as text."""
    if isinstance(value, list) and key in ("dtypes", "without_counts", "too_few_tokens", "equalized"):
        return value
    if isinstance(value, dict) and key in ("calibration", "machine"):
        return [*value, *map(str, value.values())]
    return [value]


def _companions(original: Path | None) -> list[tuple[str, Path]]:
    if original is None:
        return []
    if not original.is_dir():
        raise InputError(f"{original}: no such directory; give the original checkpoint with --original-path.")
    return [(name, original / name) for name in companion_files(original)]


def _config(original: Path | None) -> dict[str, Any] | None:
    return read_config(original) if original is not None and (original / CONFIG).exists() else None


# Whether a loose folder is whole: its layers among themselves, against its manifest and the original's config.
@dataclass(frozen=True)
class LooseLayer:
    """One layer: NUMA parts, number of experts, whether it has backward matrices; H and I, 0 where not known."""

    numa: int
    experts: int
    backward: bool
    hidden: int
    width: int

    @property
    def shape(self) -> claims.Shape:
        return self.experts, self.hidden, self.width


def measure_layer(files: Sequence[LooseFile], fmt: Format | None) -> LooseLayer:
    """What the files of one layer say by names and sizes. fmt: None where bytes mean nothing to us. Raises InputError
    for a file whose size does not fit the others.
    """
    parts = [file.part for file in files]
    numa, experts = 1 + max(p.numa for p in parts), 1 + max(p.expert for p in parts)
    backward = any(p.backward for p in parts)
    if fmt is None:
        return LooseLayer(numa, experts, backward, 0, 0)
    rows = {
        projection: Counter(
            f.nbytes // 4 for f in files if (f.what, f.part.projection, f.part.backward) == ("scale", projection, False)
        ).most_common(1)[0][0]
        for projection in ("gate", "down")
    }
    hidden, width = rows["down"], rows["gate"]
    for file in files:
        n, k = (hidden, width) if (file.part.projection == "down") != file.part.backward else (width, hidden)
        expected = next(tensor.nbytes for tensor in fmt.encoding.tensors(n, k) if tensor.name == file.what)
        if file.nbytes != expected:
            raise InputError(
                f"{file.path}: {file.nbytes} bytes do not fit hidden size {hidden} and width {width * numa} "
                f"in {numa} parts ({expected} would)."
            )
    return LooseLayer(numa, experts, backward, hidden, width * numa)


def require_whole(
    root: Path,
    layers: Mapping[int, LooseLayer],
    recorded: Mapping[str, Any] | None,
    config: dict[str, Any] | None,
    *,
    chosen: bool,
) -> None:
    """Raise InputError where a layer is missing or is not of the same conversion and model as the others.

    recorded  the facts of the manifest beside the layers, if there is one; config: the config.json of --original-path
    chosen    whether the user named the layers: then others may be missing, and the config does not decide which have
              experts
    """
    for name, what in (("numa", "NUMA parts"), ("backward", "backward matrices"), ("hidden", "hidden size")):
        _require_one(root, what, {n: getattr(layer, name) for n, layer in layers.items()})
    shapes = {n: layer.shape for n, layer in layers.items()}
    for problem in _unlike_manifest(layers, recorded, chosen) if recorded is not None else ():
        raise InputError(f"{root}: manifest.json {problem}; {AGAIN}.")
    if config is not None:
        problems = [
            *(claims.layer_problems(config, list(layers)) if not chosen else ()),
            *claims.size_problems(config, shapes),
        ]
        for problem in problems:
            raise InputError(f"{root}: {problem}; give the original of these layers with --original-path.")
    if not chosen:
        missing = list(islice((n for n in _expected(layers, recorded, config) if n not in layers), MOST_LAYERS))
        if missing:
            which = f"layers {ranges(missing)} are" if len(missing) > 1 else f"layer {missing[0]} is"
            raise InputError(f"{root}: {which} missing, {ranges(list(layers))} there; {AGAIN}, or {CHOOSE}.")
    if recorded is None:
        for at, what in ((0, WHAT[0]), (2, WHAT[2])):
            if config is None or any(claims.sizes(config, n)[what] is None for n in layers):
                _require_one(root, what, {n: shape[at] for n, shape in shapes.items()}, CLAIM)


def _require_one(root: Path, what: str, values: Mapping[int, int], claim: str = "") -> None:
    by_value: dict[int, list[int]] = {}
    for layer, value in values.items():
        by_value.setdefault(value, []).append(layer)
    if len(by_value) > 1:
        shown = "; ".join(f"{_value(value)} in layers {ranges(layers)}" for value, layers in by_value.items())
        raise InputError(f"{root}: layers differ in {what} ({shown}){claim}; convert those that are wrong again.")


def _value(value: int) -> str:
    return ("none", "some")[value] if isinstance(value, bool) else str(value)


def _unlike_manifest(layers: Mapping[int, LooseLayer], recorded: Mapping[str, Any], chosen: bool) -> Iterator[str]:
    """The ways in which the layers contradict the manifest, whose sizes are one number or a list of all that occur."""
    known = recorded_layers(recorded)
    if known is not None and not chosen:
        for layer in layers:
            if layer not in known:
                yield f"names no layer {layer}, and {loose.layer_folder(layer)} is here"
    for layer, measured in layers.items():
        for name, what, size in zip(
            ("numa", *FACTS), ("NUMA parts", *WHAT), (measured.numa, *measured.shape), strict=True
        ):
            value = recorded.get(name)
            allowed = value if isinstance(value, list) else [value]
            if size and isinstance(value, int | list) and size not in allowed:
                yield f"says {name} {value}, layer {layer} has {what} {size}"


def recorded_layers(recorded: Mapping[str, Any]) -> list[int] | None:
    named = [recorded.get("layers"), recorded.get("kept_layers", [])]
    if all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in named):
        return sorted({n for numbers in named for n in numbers or ()})
    return None


def _expected(
    layers: Mapping[int, LooseLayer], recorded: Mapping[str, Any] | None, config: dict[str, Any] | None
) -> Iterable[int]:
    """The layers that must be there: by the manifest, else by the config, else all up to the last one present."""
    if recorded is not None and (known := recorded_layers(recorded)) is not None:
        return known
    by_config = claims.moe_layers(config) if config is not None else None
    if by_config is not None:
        return by_config
    limit = claims.num_layers(config) if config is not None else None
    return range(min(layers), limit[1] if limit is not None and limit[1] < MOST_LAYERS else max(layers) + 1)
