"""The plan of `ktconvert merge`: loose layer folders, ours or kt-kernel's, into safetensors that kt-kernel loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.companions import companion_files
from ktconvert.layouts.checkpoints.source import read_config
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.outputs import FORMATS, LOOSE_METHODS, PROJECTIONS, Format, card, cpu_card, format_of, loose
from ktconvert.layouts.outputs.format import one_or_all
from ktconvert.layouts.outputs.parts import Part
from ktconvert.pipeline.engine.plan import CONFIG, Assembly, Conversion, Plan, Request, changed_since, tool_version
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.rewriting import MergeOptions
from ktconvert.pipeline.plans.checkpoint import BASE_MEMORY, companions, number_shards, parse_layers
from ktconvert.pipeline.plans.loose_layers import LooseLayer, measure_layer, require_whole
from ktconvert.pipeline.stages import merge_parts
from ktconvert.pipeline.stages.merge_parts import LooseFile

# The prefix of loose files that can be merged -> kt-kernel's name of the method; others hold backward matrices alone.
MERGED = {prefix: name for prefix, name in LOOSE_METHODS.items() if FORMATS[name].forward}
KEPT_FACTS = (
    "architecture",
    "layout",
    "activation",
    "dtypes",
    "weights_on",
    "scale",
    "imatrix",
    "second_moments",
    "without_counts",
    "calibration",
    "machine",
    "too_few_tokens",
    "equalized",
    "resplit_from",
)  # facts of the layers' manifest that hold for the merged output, too


def plan_merge(request: Request[MergeOptions], hashed: Callable[[int], None] | None = None) -> Plan:
    """Plan the whole merge from names and sizes only.

    Raises InputError for a missing, extra or cut-off file, UnsupportedError where there is nothing to merge.
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
    numbers = parse_layers(options.layers, tuple(folders))
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
    identity = tuple(SourceFile(f.path.relative_to(root).as_posix(), f.nbytes, None, f.mtime_ns) for f in files)
    originals = tuple(SourceFile(name, p.stat().st_size, None, p.stat().st_mtime_ns) for name, p in paths)
    return Plan(
        request=request,
        source=identity + originals,
        reads=(root / manifest.NAME, *(file.path for file in files), *(path for _, path in paths)),
        stages=number_shards([merge_parts.stage(files, options.max_tensors, metadata, root)]),
        facts=facts,
        notes=(),
        assembly=Assembly(
            companions=companions(original, [name for name, _ in paths]) if original else (),
            config=config,
            loose=False,
        ),
        conversion=Conversion(
            changed=lambda: [*changed_since(identity, root), *changed_since(originals, original or root)],
            read_by=lambda unit: {name for name, *_ in unit.inputs},
            peak_memory=lambda threads: BASE_MEMORY + 4 * merge_parts.CHUNK,
            card=lambda stats: card.model_card(lines, None, facts, (), stats, tool_version()),
        ),
    )


def _files_of(layer: int, folder: Path) -> list[LooseFile]:
    """One layer's files in the order of the merged keys. Raises InputError unless every matrix is there on every node,
    UnsupportedError for files that stay loose.
    """
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
    experts = max(e for e, *_ in files) + 1
    nodes = max(n for *_, n, _ in files) + 1
    expected = [
        (e, p, backward, n, what)
        for e in range(experts)
        for p in PROJECTIONS
        for backward in ((False, True) if any(b for _, _, b, _, _ in files) else (False,))
        for n in range(nodes)
        for what in ("weight", "scale")
    ]
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
    recorded = manifest.read(root)
    if recorded is None:
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
