"""Checks of an output's tensors: names, dtypes and sizes from headers; and numbers and codes from their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints.archs import MOST_LAYERS
from ktconvert.layouts.checkpoints.match import find_unread_formats
from ktconvert.layouts.encodings.encoding import tensor_suffixes
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.outputs import LOOSE_METHODS, dequantized, mixed
from ktconvert.layouts.outputs.configs import remove_quantization
from ktconvert.layouts.outputs.format import explain_illegal_count
from ktconvert.layouts.outputs.measuring import Measure, formats_by_names
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import SliceId, Slicing, slice_shape
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.tensors import TensorInfo, format_ranges
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural
from ktconvert.pipeline.verify.checks import CHUNK_BYTES, Check
from ktconvert.pipeline.verify.file_checks import check_files, check_index, check_safetensors
from ktconvert.quantizers.packed import count_lowest_codes

# Largest number of NUMA slices that names and the manifest may imply: SLICES_PER_TENSOR for each tensor, or
# SLICES_AT_LEAST. A complete output has three tensors or more for a slice, and a list of all slices that a damaged name
# implies could fill the memory.
SLICES_PER_TENSOR, SLICES_AT_LEAST = 4, 4096


def list_expected_layers(output: Output, measure: Measure) -> Iterator[tuple[Slicing, int]]:
    """Yield every layer that must exist and its number of experts, from manifest and bytes, whichever has more."""
    facts = output.facts
    numa = max(measure.numa, facts.get("numa", 0))
    backward = bool(facts.get("backward", measure.backward))
    forward = (measure.fmt or formats_by_names(output)[0]).forward
    usual_shape = _usual_shape(measure)
    recorded_experts = facts.get("experts")
    largest_count = max(
        [recorded_experts if isinstance(recorded_experts, int) else 0, *(e for e, _, _ in measure.shapes.values())]
    )
    for layer in sorted({*measure.shapes, *facts.get("layers", []), *facts.get("kept_layers", [])}):
        shape = measure.shapes.get(layer, usual_shape)
        experts = shape[0] if _may_vary_by_layer(output, "experts") else largest_count
        width = shape[2] if _may_vary_by_layer(output, "intermediate") else usual_shape[2]
        width = width // measure.numa * numa
        yield Slicing(layer, usual_shape[1], width, numa, backward, forward, gated=measure.gated), experts


def check_tensors(output: Output, measure: Measure) -> Check:
    """Check that every tensor of every NUMA slice exists exactly once, with the dtype and shape of its format."""
    problems = [f"{name} is in {first} and in {second}" for name, first, second in output.duplicates]
    problems += [f"{name} in {file}: {reason}" for name, file, reason in output.strays]
    if not output.tensors:
        return Check("tensors", "", (*problems, "no expert weights"))
    if measure.method == "unknown":
        _, hidden, intermediate = _usual_shape(measure)
        names = [fmt.name for fmt in formats_by_names(output)]
        mismatch = f"fit neither {' nor '.join(names)}" if len(names) > 1 else f"do not fit {names[0]}"
        problems.append(f"weights {mismatch} with hidden size {hidden} and width {intermediate}")
    fmt = measure.fmt or formats_by_names(output)[0]
    used: set[tuple[SliceId, str]] = set()
    expected = list(list_expected_layers(output, measure))
    implied_slices = sum(experts * slicing.numa for slicing, experts in expected)
    tensors = len(output.tensors)
    if implied_slices > SLICES_AT_LEAST + SLICES_PER_TENSOR * tensors:
        largest = max(output.tensors, key=lambda key: (key[0].expert + 1) * (key[0].node + 1))
        cause = f"most of them are missing, or a name is damaged: {output.tensors[largest].name}"
        problems.append(f"the names of {plural(tensors, 'tensor')} imply {implied_slices} slices of experts; {cause}")
        return Check("tensors", "", problems)
    for slicing, experts in expected:
        layer_fmt = fmt.layer_format(slicing.layer)
        for numa_slice in slicing.all_slices(range(experts)):
            for tensor in layer_fmt.encoding.tensors(numa_slice.n, numa_slice.k):
                key = numa_slice.id, tensor.name
                used.add(key)
                stored = output.tensors.get(key)
                where = f" ({output.names.describe(*key)})"
                if stored is None:
                    problems.append(f"{output.names.tensor_name(*key)} is missing{where}")
                elif measure.fmt is not None and stored.nbytes != tensor.nbytes:
                    expected_text = f"{layer_fmt.name} of {numa_slice.n} x {numa_slice.k} has {tensor.nbytes}"
                    problems.append(f"{stored.name} in {stored.file} has {stored.nbytes} bytes, {expected_text}{where}")
                elif stored.dtype != tensor.dtype or (measure.fmt is not None and stored.shape != tensor.shape):
                    stored_text = f"{stored.dtype} of shape {list(stored.shape)}"
                    expected_text = f"{tensor.dtype} {list(tensor.shape)}"
                    problems.append(f"{stored.name} in {stored.file} is {stored_text}, must be {expected_text}{where}")
    problems += [
        f"{s.name} in {s.file} is unexpected ({output.names.describe(*key)})"
        for key, s in output.tensors.items()
        if key not in used
    ]
    problems += list(_find_size_conflicts(output, measure))
    planned = output.facts.get("packed_linears")
    weights = sum(suffix == fmt.encoding.tensors(0, 0)[0].name for _, suffix in output.tensors)
    if planned is not None and weights != planned:
        problems.append(f"{weights} linears are quantized, but {planned} in the plan")
    return Check("tensors", f"{len(used)} tensors in {plural(len(measure.shapes), 'layer')}, no duplicates", problems)


def _find_size_conflicts(output: Output, measure: Measure) -> Iterator[str]:
    """Yield where the measured sizes contradict names of loose files, limits of the format, or the manifest."""
    for prefix in sorted(output.prefixes):
        if LOOSE_METHODS.get(prefix) != measure.method:
            yield f"the files are named {prefix}, but have the sizes of {measure.method}"
    _, hidden, intermediate = _usual_shape(measure)
    for fmt in measure.fmt.layer_formats if measure.fmt is not None and (hidden or intermediate) else ():
        if reason := explain_illegal_count(fmt, [(hidden, intermediate)], measure.numa):
            yield f"{fmt.name} cannot hold these sizes in {measure.numa} NUMA slices: {reason}"
    for name, actual in model_sizes(measure).items():
        recorded = output.facts.get(name)
        one_or_more = [actual] if isinstance(recorded, list) and not isinstance(actual, list) else actual
        if recorded not in (None, "not recorded", one_or_more):
            yield f"the manifest has {name} {recorded}, but the tensors have {actual}"


def model_sizes(measure: Measure) -> dict[str, Any]:
    """Return the measured method and sizes under the names that the manifest uses."""

    def one_or_all(position: int) -> int | list[int]:
        values = sorted({shape[position] for shape in measure.shapes.values()})
        return values[0] if len(values) == 1 else values

    return {
        "method": measure.method,
        **({} if measure.fmt is None else mixed.manifest_methods(measure.fmt, list(measure.shapes))),
        "numa": measure.numa,
        "experts": one_or_all(0),
        "hidden": one_or_all(1),
        "intermediate": one_or_all(2),
        "backward": measure.backward,
    }


def check_metadata(output: Output, measure: Measure) -> Check | None:
    """Check that the metadata of our shards match their tensors."""
    ours = {shard: metadata for shard, metadata in output.metadata.items() if "ktconvert_format" in metadata}
    if not ours:
        return None
    problems: list[str] = []
    by_shard: dict[str, set[int]] = {}
    for (slice_id, _), stored in output.tensors.items():
        by_shard.setdefault(stored.file, set()).add(slice_id.layer)
    for shard, metadata in ours.items():
        expected = {"method": measure.method} | ({} if output.is_whole_model else {"numa": str(measure.numa)})
        if "layer" in metadata and by_shard.get(shard):
            layer = min(by_shard[shard])
            expected |= {"method": measure.layer_method(layer), "layer": str(layer)}
            sizes = zip(("num_experts", "hidden_size", "moe_intermediate_size"), measure.shapes[layer], strict=True)
            expected |= {name: str(size) for name, size in sizes}
        problems += [
            f"{shard}: its metadata has {name} {metadata.get(name)}, but its tensors have {value}"
            for name, value in expected.items()
            if metadata.get(name) != value
        ]
    sources = {metadata.get("source") for metadata in ours.values()}
    if len(sources) > 1:
        problems.append(f"the metadata of the shards name {len(sources)} different sources")
    return Check("metadata", f"{plural(len(ours), 'shard')} match", problems)


def check_config(output: Output, measure: Measure) -> Check | None:
    """Check experts and sizes against config.json next to the weights."""
    config = output.config
    if not config:
        return None
    problems = list(claims.find_size_problems(config, measure.shapes))
    notes = []
    architecture = str(output.facts.get("architecture"))
    if (other_family := claims.find_other_family(config, architecture)) is not None:
        problems.append(
            f"config.json belongs to {other_family}, but the experts to {architecture} according to the manifest"
        )
    manifest = output.manifest
    if manifest is None or (manifest.command == "merge" and manifest.settings.get("layers", "all") == "all"):
        # Neither the checkpoint itself nor the user chose the layers, so the config decides.
        problems += claims.find_layer_problems(config, list(measure.shapes))
    limit = claims.find_layer_count(config) if manifest is None and measure.shapes else None
    missing = (
        [layer for layer in range(min(limit[1], MOST_LAYERS)) if layer not in measure.shapes]
        if limit is not None
        else []
    )
    if limit is not None and missing:
        notes.append(
            f"layers {format_ranges(missing)} of {limit[1]} have no experts, which is right only if they are dense"
        )
    if measure.fmt is not None and not output.is_whole_model:
        problems += measure.fmt.description.check_config(output, measure.fmt, measure.numa)
    return Check("config", "experts and sizes match config.json", problems, notes)


def check_quantization(output: Output, measure: Measure) -> Check | None:
    """Check that loaders of whole models find the quantization that they require in config.json."""
    if measure.fmt is None or not output.is_whole_model:
        return None
    problems = tuple(measure.fmt.description.check_config(output, measure.fmt, measure.numa))
    return Check("quantization", f"{measure.method} in config.json", problems)


def check_options(measure: Measure, numa: int | None, method: str | None, word: str | None) -> Check:
    """Check the NUMA count and the method that the user intends to load; kt-kernel does not check them.

    word  the value of --quant-method, which may have other names for the method
    """
    fmt = measure.fmt
    slices_text = plural(measure.numa, "NUMA slice")
    problems = []
    if numa is not None and numa != measure.numa:
        problems.append(f"the weights are for {slices_text}, not for --numa {numa}")
    if method is not None and method != measure.method:
        problems.append(f"the weights have the sizes of {measure.method}, not of --quant-method {word}")
    if fmt is not None and fmt.arrangement.is_whole_model:
        remedy = f"load it as {measure.method}, or convert again with a different --quant-type"
        return Check("options", f"{measure.method}, as requested", problems, remedy=remedy)
    can_resplit = fmt is not None and fmt.can_resplit and method in (None, measure.method)
    change = "rewrite it with `ktconvert resplit`" if can_resplit else "convert again"
    remedy = f"serve with --kt-method {measure.method} --kt-threadpool-count {measure.numa}, or {change}"
    if fmt is not None and fmt.loose is None:
        remedy = f"load it as {measure.method}, {slices_text}, or {change}"
    return Check("options", f"{measure.method}, {slices_text}, as requested", problems, remedy=remedy)


def check_copied_tensors(output: Output, _measure: Measure) -> Check:
    """Check that an output of `fetch` has as many tensors as the manifest says, and no duplicate."""
    problems = [f"{name} is in {first} and in {second}" for name, first, second in output.duplicates]
    planned = output.facts.get("tensors")
    if planned != len(output.non_expert_tensors):
        problems.append(f"{len(output.non_expert_tensors)} tensors exist, but {planned} in the plan")
    return Check("tensors", f"{plural(len(output.non_expert_tensors), 'tensor')}, no duplicates", problems)


def check_decoded_tensors(output: Output, measure: Measure) -> Check:
    """Check the tensors of an output of `dequantize`, and that all are decoded."""
    check = check_copied_tensors(output, measure)
    undecoded = find_unread_formats(output.non_expert_tensors, output.non_expert_tensors)
    problems = (f"{info.name} in {info.file} is {title}, but was not decoded" for info, title in undecoded)
    return replace(check, problems=[*check.problems, *problems])


def check_decoded_config(output: Output, _measure: Measure) -> Check:
    """Check that config.json of an output of `dequantize` makes no loader look for quantized weights."""
    quantized = remove_quantization(output.config) != output.config
    problems = ("config.json still declares a quantized model",) if quantized else ()
    return Check("config", "not quantized", problems)


# Checks that read no weights. They return None if they do not apply.
StructureCheck = Callable[[Output, Measure], Check | None]
FILE_CHECKS: tuple[StructureCheck, ...] = (check_files, check_index, check_safetensors)
EXPERT_CHECKS: tuple[StructureCheck, ...] = (check_tensors, check_quantization, check_metadata, check_config)
DECODED_CHECKS: tuple[StructureCheck, ...] = (check_decoded_tensors, check_metadata, check_decoded_config)
FETCHED_CHECKS: tuple[StructureCheck, ...] = (check_copied_tensors, check_metadata)


def check_structure(output: Output, measure: Measure) -> list[Check]:
    """Check the files of an output, and its tensors if every weight file can be read."""
    content_checks: tuple[StructureCheck, ...] = ()
    if output.has_all_weights:
        others = FETCHED_CHECKS if measure.method == dequantized.FETCHED else DECODED_CHECKS
        content_checks = EXPERT_CHECKS if output.methods else others
    return [
        check
        for check_function in (*FILE_CHECKS, *content_checks)
        if (check := check_function(output, measure)) is not None
    ]


def _usual_shape(measure: Measure) -> tuple[int, int, int]:
    """Return the most frequent (experts, hidden, intermediate)."""
    shapes = Counter(measure.shapes.values())
    return max(shapes, key=shapes.__getitem__, default=(0, 0, 0))


def _may_vary_by_layer(output: Output, fact: str) -> bool:
    """Return whether manifest or config allow layers to differ in "experts" or "intermediate"."""
    if isinstance(output.facts.get(fact), list):
        return True
    row = claims.find_family(output.config)
    value = cfg.find_value(output.config, row.experts if fact == "experts" else row.width) if row else None
    return value is not None and isinstance(value[1], list)


# --- numbers and codes ----------------------------------------------------------------------------


def check_numbers(output: Output, measure: Measure) -> Check:
    """Check that all numbers are values that quantizing finite weights can give."""
    try:
        problems = tuple(_find_bad_numbers(output, measure))
    except VerificationError as error:
        problems = (error.text,)
    return Check("numbers", "no NaN or Inf", problems)


def _find_bad_numbers(output: Output, measure: Measure) -> Iterator[str]:
    """Yield bad numbers by the format of each layer; if none was measured, by the first whose names match."""
    fmt = measure.fmt or formats_by_names(output)[0]
    for slice_id in dict.fromkeys(slice_id for slice_id, _ in output.tensors):
        encoding = fmt.layer_format(slice_id.layer).encoding
        endings = tensor_suffixes(encoding)
        _, hidden, intermediate = measure.shapes[slice_id.layer]
        n, k = slice_shape(slice_id.projection, hidden, intermediate, measure.numa)  # 0 if they are unknown
        n, k = (k, n) if slice_id.backward else (n, k)
        if encoding.unpack_scales is not None and not n * k:
            continue
        stored = [output.tensors.get((slice_id, suffix)) for suffix in endings]
        if any(
            info is None or info.dtype != tensor.dtype or (n * k and info.nbytes != tensor.nbytes)
            for info, tensor in zip(stored, encoding.tensors(n, k), strict=True)
        ):
            continue  # check_tensors reports it
        read = output.make_reader(slice_id, endings)
        for tensor, find_defect in zip(stored, encoding.defect_checks, strict=True):
            if find_defect is not None and tensor is not None and (problem := find_defect(read, n, k)):
                yield f"{tensor.name} in {tensor.file}: {problem} ({output.names.describe(slice_id, endings[-1])})"


def find_unverified_codes(output: Output, measure: Measure) -> list[TensorInfo]:
    """Return the tensors of an output without a manifest that hold codes of 4 bits from -7 to 7.

    With a manifest they need no check: ktconvert packs no code of -8.
    """
    if output.manifest is not None or measure.fmt is None:
        return []
    encodings = {
        layer: measure.fmt.layer_format(layer).encoding for layer in {slice_id.layer for slice_id, _ in output.tensors}
    }
    code_suffixes = {
        layer: tensor_suffixes(encoding)[0]
        for layer, encoding in encodings.items()
        if encoding.grid.bits == 4 and encoding.grid.has_row_scales
    }
    return [
        tensor for (slice_id, suffix), tensor in output.tensors.items() if code_suffixes.get(slice_id.layer) == suffix
    ]


def check_codes(output: Output, tensors: list[TensorInfo], reporter: Reporter) -> Check:
    """Check that no code is -8, which kt-kernel's AMXINT4 reads as a different number (numerics.md, section 6b)."""
    problems = []
    for tensor in tensors:
        count = 0
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            data = output.read(tensor, start, min(tensor.nbytes, start + CHUNK_BYTES))
            count += count_lowest_codes(data)
            reporter.advance(len(data))
        if count:
            problems.append(f"{tensor.name} in {tensor.file} has {count} codes of -8, which kt-kernel misreads")
    return Check("codes", "all from -7 to 7", problems, remedy="convert the model again with `ktconvert cpu`")
