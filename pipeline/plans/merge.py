"""The plan of `ktconvert merge`: from loose layer folders, ours or kt-kernel's, to safetensors for kt-kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.archs import MOST_LAYERS
from ktconvert.layouts.checkpoints.expert_function import read_functions
from ktconvert.layouts.errors import InputError, UnsupportedError, VerificationError, absent_path, bad_file
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import FORMATS, LOOSE_METHODS, cards, configs, loose
from ktconvert.layouts.outputs.format import collapse_equal
from ktconvert.layouts.outputs.measuring import Measure, measure_output
from ktconvert.layouts.outputs.numa import NumaNames
from ktconvert.layouts.outputs.opening import is_output, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import SliceId
from ktconvert.layouts.sources.companions import companion_files
from ktconvert.layouts.sources.source import read_config
from ktconvert.layouts.statistics import expert_counts
from ktconvert.layouts.tensors import PROJECTIONS, TensorInfo, format_ranges
from ktconvert.pipeline.engine.plan import CONFIG, Hooks, Plan, tool_version
from ktconvert.pipeline.options.conversion_options import MergeOptions
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.stages import merge_loose_files

# Prefix of loose files that can be merged -> kt-kernel's name of the method; other files hold only backward matrices
MERGED = {prefix: name for prefix, name in LOOSE_METHODS.items() if FORMATS[name].forward}
# Facts of the layers' manifest that also hold for the merged output
KEPT_FACTS = (
    *("architecture", "layout", "functions", "dtypes", "shared_experts", *checkpoint.CODE_FACTS),
    *("without_counts", "too_few_tokens", "equalized", "resplit_from"),
)
SIZES = ("experts", "hidden", "intermediate")  # their names in a manifest, in the order of Measure.shapes
REMEDY = "convert it again, or name the layers to merge with --layers"


def plan_merge(options: MergeOptions) -> Plan:
    """Build the plan from names and sizes; read no weights. Raises InputError for missing, extra or truncated files."""
    original = options.original_path
    options = with_values(options, with_companions=original is not None)
    root = Path(options.input)
    if not root.exists():
        raise absent_path(root, "give an output of --no-merge-safetensor")
    if root.is_dir():
        loose.require_plain_numbers(root)
    folders = loose.find_layers(root) if root.is_dir() else {}
    if not folders and root.is_dir() and is_output(root):
        raise bad_file(root, "its experts are in safetensors files already", "use it as it is")
    if not folders:
        raise bad_file(root, "has no _layer_N folders", "give an output of --no-merge-safetensor")
    layers = checkpoint.parse_layers(options.layers, tuple(folders))
    names, source_config = _read_original(original)
    recorded = read_manifest_facts(root)
    if options.layers == "all":
        _require_all_layers(root, layers, recorded, source_config)
    output = replace(open_output(root, layers), config=source_config or {})
    measured = _measure_layers(output, options.layers == "all")
    facts = _make_facts(measured, recorded)
    card = cards.AMX if measured.fmt is None else measured.fmt.description.card
    entries = configs.cpu_entries(facts, tool_version(), has_row_scales=True)
    metadata = {**checkpoint.FORMAT_METADATA, "method": facts["method"], "numa": str(facts["numa"])}
    files = _sort_tensors(output)
    files_read = checkpoint.files_in(root, [file.file for file in files])
    counts = [expert_counts.NAME] if (root / expert_counts.NAME).is_file() else []
    files_read |= checkpoint.files_in(root, counts)
    if original:
        names = [name for name in names if name not in counts]
        files_read |= checkpoint.files_in(original, names)
    return Plan(
        options=options,
        files=files_read,
        reads=(root / manifest.NAME, *files_read),
        stages=checkpoint.number_shards([merge_loose_files.make_stage(files, options.max_tensors, metadata, root)]),
        facts=facts,
        notes=(),
        companions=(
            *checkpoint.companions(root, counts),
            *(checkpoint.companions(original, names) if original else ()),
        ),
        config=None if source_config is None else configs.config_json(source_config, entries, is_whole_model=False),
        hooks=Hooks(
            peak_memory=lambda threads: checkpoint.BASE_MEMORY + 4 * merge_loose_files.CHUNK,
            render_card=lambda stats: cards.make_model_card(
                card, facts, None, (), stats, tool_version(), has_counts=bool(counts)
            ),
        ),
    )


def _read_original(original: Path | None) -> tuple[list[str], dict[str, Any] | None]:
    """Return the companion files of the original checkpoint, and its config.json, None if there is none."""
    if original is None:
        return [], None
    if not original.is_dir():
        raise absent_path(original, "give the original checkpoint with --original-path")
    return companion_files(original), read_config(original) if (original / CONFIG).exists() else None


def _sort_tensors(output: Output) -> list[TensorInfo]:
    """Return the loose files as tensors of the merged output, in the order of bytes.md."""
    suffixes = tuple(loose.FILE_WORDS)

    def sort_key(key: tuple[SliceId, str]) -> tuple[object, ...]:
        slice_id, suffix = key
        projection = PROJECTIONS.index(slice_id.projection)
        return slice_id.layer, slice_id.expert, projection, slice_id.backward, slice_id.node, suffixes.index(suffix)

    names = NumaNames(suffixes)
    return [
        msgspec.structs.replace(output.tensors[key], name=names.tensor_name(*key))
        for key in sorted(output.tensors, key=sort_key)
    ]


def _measure_layers(output: Output, everything: bool) -> Measure:
    """Return the layers' format and sizes, from names and sizes.

    everything  whether the user named no layers, so that output.config decides which must exist

    Raises KTConvertError if there is nothing to merge, or if layers are incomplete, of several conversions, or not of
    output.config's model.
    """
    from ktconvert.pipeline.verify.tensor_checks import check_tensors

    root = output.root
    if others := sorted(output.prefixes - {*MERGED}):
        why = f"they contain only backward matrices, which stay loose; give {', '.join(MERGED)} files"
        raise UnsupportedError(f"{root}: {' and '.join(others)} files cannot be merged: {why}.")
    if len(output.prefixes) > 1:
        raise InputError(f"{root}: contains {' and '.join(sorted(output.prefixes))} files; merge one method at a time.")
    measured = measure_output(output)
    shapes = measured.shapes
    if output.manifest is None and not output.config and len({*shapes.values()}) > 1:
        shown = ", ".join(f"{' x '.join(map(str, shape))} in layer {layer}" for layer, shape in shapes.items())
        raise InputError(
            f"{root}: layers differ in experts x hidden size x expert width ({shown}), and neither manifest.json nor "
            "--original-path confirms this; convert the wrong layers again."
        )
    if output.manifest is not None:  # it may list more layers
        facts: dict[str, Any] = {**output.facts, "layers": [*shapes], "kept_layers": []}
        for name, values in zip(SIZES, zip(*shapes.values(), strict=True), strict=True):
            if isinstance(facts[name], list) and {*values} <= {*facts[name]}:
                facts[name] = collapse_equal(values)
        output = replace(output, manifest=msgspec.structs.replace(output.manifest, model=facts, files=()))
    check = check_tensors(output, measured)
    require_sound(root, [*output.damaged.values(), *(() if check is None else check.problems)])
    if output.config:
        about_layers = claims.find_layer_problems(output.config, [*shapes]) if everything else ()
        for problem in (*about_layers, *claims.find_size_problems(output.config, shapes)):
            raise InputError(f"{root}: {problem}; set --original-path to the original of these layers.")
    return measured


def require_sound(root: Path, problems: Sequence[str]) -> None:
    """Raise InputError for the first of these problems of an output, if any."""
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{root}: {problems[0]}{more}; convert it again.")


def _make_facts(measured: Measure, recorded: OutputFacts) -> OutputFacts:
    """Return the facts that follow from names and sizes, and those of the manifest next to the layers."""
    experts, hidden, width = map(collapse_equal, zip(*measured.shapes.values(), strict=True))
    return {
        "architecture": "unknown",
        "method": measured.method,
        "layout_version": FORMATS[measured.method].encoding.version,
        "numa": measured.numa,
        "layers": [*measured.shapes],
        "experts": experts,
        "dtypes": ["not recorded"],
        "bits": FORMATS[measured.method].encoding.grid.bits,
        "hidden": hidden if measured.fmt else "not recorded",
        "intermediate": width if measured.fmt else "not recorded",
        **inherit_facts(recorded),
        "backward": measured.backward,
    }


def inherit_facts(recorded: OutputFacts) -> OutputFacts:
    """Return the facts of an output that also hold for one that is made from it."""
    facts: Mapping[str, Any] = recorded
    return cast("OutputFacts", {key: facts[key] for key in KEPT_FACTS if key in facts})


def read_manifest_facts(root: Path) -> OutputFacts:
    """Return the facts of an output's manifest; {} without one. Raises VerificationError if we did not write it."""
    if (recorded := manifest.read_manifest(root)) is None:
        return {}
    facts = recorded.facts
    try:
        read_functions(facts.get("functions", {}))
    except InputError as error:
        raise VerificationError(f"{root / manifest.NAME}: {error.text}; convert again.") from None
    # read_manifest checks the types of resplit_from and shared_experts.
    for key in (key for key in KEPT_FACTS if key not in ("resplit_from", "shared_experts", "functions")):
        if not all(isinstance(text, str) and text.isprintable() for text in _list_texts(key, facts.get(key, ""))):
            raise VerificationError(
                f"{root / manifest.NAME}: not a manifest that ktconvert wrote ({key}); convert again."
            )
    return facts


def _list_texts(key: str, value: Any) -> Iterable[Any]:
    """Return the texts in a fact that must be printable: the items of a list, or keys and values of an object."""
    if isinstance(value, list) and key in ("dtypes", "without_counts", "too_few_tokens", "equalized"):
        return value
    if isinstance(value, dict) and key in ("calibration", "machine"):
        return [*value, *map(str, value.values())]
    return [value]


def _require_all_layers(
    root: Path, layers: Sequence[int], recorded: OutputFacts, config: dict[str, Any] | None
) -> None:
    """Raise InputError if a layer is missing, or is not in the manifest.

    The layers must be those of the manifest next to them, or else those of the original's config. Without both, no
    layer between the first and the last may be missing.
    """
    expected = _find_expected_layers(layers, config)
    if "layers" in recorded:
        expected = sorted({*recorded["layers"], *recorded.get("kept_layers", [])})
        if unlisted := [layer for layer in layers if layer not in expected]:
            folder = loose.layer_folder(unlisted[0])
            raise InputError(
                f"{root}: {folder} exists, but manifest.json does not list layer {unlisted[0]}; convert it again."
            )
    missing = list(islice((layer for layer in expected if layer not in layers), MOST_LAYERS))
    if missing:
        subject = f"layers {format_ranges(missing)} are" if len(missing) > 1 else f"layer {missing[0]} is"
        raise InputError(f"{root}: {subject} missing, {format_ranges(layers)} present; {REMEDY}.")


def _find_expected_layers(layers: Sequence[int], config: dict[str, Any] | None) -> Collection[int]:
    if config is not None and (moe_layers := claims.list_moe_layers(config)) is not None:
        return moe_layers
    limit = claims.find_layer_count(config) if config is not None else None
    return range(min(layers), limit[1] if limit is not None and limit[1] < MOST_LAYERS else max(layers) + 1)
