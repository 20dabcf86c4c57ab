"""What names, sizes and headers tell of an output, against its index, metadata, config and manifest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ktconvert.layouts.checkpoints import claims
from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.archs import MOST_LAYERS
from ktconvert.layouts.checkpoints.containers.safetensors import INDEX, PART
from ktconvert.layouts.checkpoints.match import unread_formats
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.manifest import OutputFile
from ktconvert.layouts.outputs import LOOSE_METHODS, mixed
from ktconvert.layouts.outputs.card import ranges, unquantized
from ktconvert.layouts.outputs.format import illegal_reason
from ktconvert.layouts.outputs.measuring import Measure, formats_by_names
from ktconvert.layouts.outputs.output import Output, files_of
from ktconvert.layouts.outputs.parts import ExpertGrid, Place
from ktconvert.pipeline.report.text import plural
from ktconvert.pipeline.verify.checks import Check

# Parts of experts that names and manifest may imply for each tensor, and in any case: a whole output has three tensors
# or more for a part, and to list all that a damaged name implies would fill memory.
PARTS_PER_TENSOR, PARTS_AT_LEAST = 4, 4096
LOOSE = re.compile(r"\.kt$|(^|/)_layer_\d+/")
LEFT_BEHIND = re.compile(r"\.safetensors$|\.kt$|\.index\.json$|^_layer_\d+/")


def check_files(output: Output, _measure: Measure) -> Check:
    """Every file of the manifest with its size, every file readable, and none that does not belong."""
    notes: list[str] = []
    listed = {file.name for file in listed_files(output)}
    problems = list(unreadable(output).values())
    present = [name for name in files_of(output.root) if name not in listed and name != manifest.NAME]
    if not output.loose:
        stale = sorted(name for name in {*listed, *present} if LOOSE.search(name))
        problems += [
            f"{name} is a file of loose weights, in an output of safetensors: move it elsewhere" for name in stale
        ]
        present = [name for name in present if name not in stale]
    if output.manifest is not None:
        strange = [name for name in present if LEFT_BEHIND.search(name)]
        if rest := [name for name in present if name not in strange]:
            more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
            notes.append(f"not of the manifest: {', '.join(rest[:3])}{more}")
    else:
        known = "there is no manifest, as in kt-kernel's own outputs"
        notes.append(f"{known}: contents can be checked with --against SOURCE only")
        strange = _strange_without_manifest(output)
    problems += [f"{name} does not belong here, and kt-kernel may load it: move it elsewhere" for name in strange]
    number = f"{len(listed)} files of the manifest" if listed else f"{len(output.shards) or len(output.tensors)} files"
    return Check("files", f"{number}, none too many", problems, notes)


def listed_files(output: Output) -> tuple[OutputFile, ...]:
    return () if output.manifest is None else output.manifest.files


def unreadable(output: Output) -> dict[str, str]:
    """Files that are missing, cut off or damaged -> what is wrong with them."""
    problems = {}
    for file in listed_files(output):
        path = output.root / file.name
        if not path.is_file():
            problems[file.name] = f"{file.name} is missing"
        elif path.stat().st_size != file.size:
            problems[file.name] = f"{file.name} has {path.stat().st_size} bytes, the manifest says {file.size}"
    return output.damaged | problems


def weights_whole(output: Output) -> bool:
    """Whether every weight file is there and can be read, so that what is in them can be judged."""
    return not any(name.endswith((".safetensors", ".kt")) for name in unreadable(output))


def _strange_without_manifest(output: Output) -> list[str]:
    if output.loose:
        known = {*output.damaged, *(s.file for s in output.tensors.values()), *(file for _, file, _ in output.strays)}
        return [name for name in files_of(output.root) if name.endswith(".kt") and name not in known]
    if output.weight_map is not None:
        named = set(output.weight_map.values())
        return [shard for shard in output.shards if shard not in named]
    totals = {match[3] for shard in output.shards if (match := PART.fullmatch(shard))}
    unfinished = [shard for shard in output.shards if "PLACEHOLDER" in shard]
    if unfinished or len(totals) < 2:
        return unfinished
    return [s for s in output.shards if (m := PART.fullmatch(s)) and m[3] != max(totals)]


def check_index(output: Output, _measure: Measure) -> Check | None:
    """The index names every tensor of every shard, no other, and the true total size."""
    if output.loose or INDEX in output.damaged:
        return None
    if output.weight_map is None:  # where the manifest has one, check_files says that it is missing
        none = Check("index", "none", notes=("there is no index, as after merge_cpu_weights.py; kt-kernel needs none",))
        return none if output.manifest is None else None
    bad, notes = unreadable(output), list[str]()
    gone = sorted(set(output.weight_map.values()) - {*output.shards, *bad})
    problems = [f"{INDEX} names {shard}, which is missing" for shard in gone]
    stored = {s.name: s for s in (*output.tensors.values(), *output.others.values())}
    for name, shard in output.weight_map.items():
        if shard in bad or shard not in output.shards:
            continue
        if name not in stored:
            problems.append(f"{INDEX} names {name} in {shard}, which does not hold it")
        elif stored[name].file != shard:
            problems.append(f"{INDEX} names {name} in {shard}, but {stored[name].file} holds it")
    unnamed = stored.keys() - output.weight_map.keys()
    problems += [f"{s.file} holds {name}, which {INDEX} does not name" for name, s in stored.items() if name in unnamed]
    total = sum(s.nbytes for s in stored.values())
    if output.total_size == 0 and output.manifest is None:
        notes.append("the index gives no total size, as kt-kernel writes it")
    elif output.total_size != total and not bad and not problems:
        problems.append(f"{INDEX} says total_size {output.total_size}, the shards hold {total} bytes")
    return Check("index", f"{len(stored)} tensors, {total} bytes, as in the shards", problems, notes)


def expected_layers(output: Output, measure: Measure) -> Iterator[tuple[ExpertGrid, int]]:
    """Every layer that must be there, and its number of experts: by manifest and bytes, whichever says more."""
    facts = output.facts
    parts = max(measure.numa, facts.get("numa", 0))
    backward = bool(facts.get("backward", measure.backward))
    forward = (measure.fmt or formats_by_names(output)[0]).forward
    usual, recorded = _usual(measure), facts.get("experts")
    most = max([recorded if isinstance(recorded, int) else 0, *(e for e, _, _ in measure.shapes.values())])
    for layer in sorted({*measure.shapes, *facts.get("layers", []), *facts.get("kept_layers", [])}):
        own = measure.shapes.get(layer, usual)
        experts = own[0] if _by_layer(output, "experts") else most
        width = own[2] if _by_layer(output, "intermediate") else usual[2]
        yield ExpertGrid(layer, usual[1], width // measure.numa * parts, parts, backward, forward), experts


def check_tensors(output: Output, measure: Measure) -> Check:
    """Every layer, expert, projection, part and tensor exactly once, with the sizes of one form, T, E, H and I."""
    problems = [f"{name} is in {first} and in {second}" for name, first, second in output.doubles]
    problems += [f"{name} in {file}: {why}" for name, file, why in output.strays]
    if not output.tensors:
        return Check("tensors", "", (*problems, "no expert weights are here"))
    if measure.method == "unknown":
        _, hidden, intermediate = _usual(measure)
        names = [fmt.name for fmt in formats_by_names(output)]
        none = f"fit neither {' nor '.join(names)}" if len(names) > 1 else f"do not fit {names[0]}"
        problems.append(f"weights {none} with hidden size {hidden} and width {intermediate}")
    fmt = measure.fmt or formats_by_names(output)[0]
    used: set[tuple[Place, str]] = set()
    expected = list(expected_layers(output, measure))
    implied, tensors = sum(experts * grid.numa for grid, experts in expected), len(output.tensors)
    if implied > PARTS_AT_LEAST + PARTS_PER_TENSOR * tensors:
        largest = max(output.tensors, key=lambda key: (key[0].expert + 1) * (key[0].numa + 1))
        most = f"most of them are missing, or a name is damaged: {output.tensors[largest].name}"
        problems.append(f"the names of {plural(tensors, 'tensor')} imply {implied} parts of experts; {most}")
        return Check("tensors", "", problems)
    for grid, experts in expected:
        own = fmt.of_layer(grid.layer)
        for part in grid.all_parts(range(experts)):
            for tensor in own.encoding.tensors(part.n, part.k):
                key = part.place, tensor.name
                used.add(key)
                stored = output.tensors.get(key)
                if stored is None:
                    problems.append(f"{output.names.key(*key)} is missing ({output.names.describe(*key)})")
                elif measure.fmt is not None and stored.nbytes != tensor.nbytes:
                    must = f"{own.name} of {part.n} x {part.k} has {tensor.nbytes}"
                    problems.append(f"{stored.name} in {stored.file} has {stored.nbytes} bytes, {must}")
                elif stored.dtype != tensor.dtype or (measure.fmt is not None and stored.shape != tensor.shape):
                    here, must = f"{stored.dtype} of shape {list(stored.shape)}", f"{tensor.dtype} {list(tensor.shape)}"
                    problems.append(f"{stored.name} in {stored.file} is {here}, must be {must}")
    problems += [f"{s.name} in {s.file} is one too many" for key, s in output.tensors.items() if key not in used]
    problems += list(_sizes(output, measure))
    planned = output.facts.get("packed_linears")
    weights = sum(suffix == fmt.encoding.tensors(0, 0)[0].name for _, suffix in output.tensors)
    if planned is not None and weights != planned:
        problems.append(f"{weights} linears are quantized, the plan had {planned}")
    return Check("tensors", f"{len(used)} tensors of {len(measure.shapes)} layers, each once", problems)


def _sizes(output: Output, measure: Measure) -> Iterator[str]:
    """What the bytes say against the names of loose files, what the form can hold, and what the manifest says."""
    for prefix in sorted(output.prefixes):
        if LOOSE_METHODS.get(prefix) != measure.method:
            yield f"the files are called {prefix}, their sizes are those of {measure.method}"
    _, hidden, intermediate = _usual(measure)
    for fmt in measure.fmt.formats if measure.fmt is not None and (hidden or intermediate) else ():
        if reason := illegal_reason(fmt, [(hidden, intermediate)], measure.numa):
            yield f"{fmt.name} cannot hold these sizes in {measure.numa} NUMA parts: {reason}"
    for name, actual in sizes_of(measure).items():
        recorded = output.facts.get(name)
        one_or_more = [actual] if isinstance(recorded, list) and not isinstance(actual, list) else actual
        if recorded not in (None, "not recorded", one_or_more):
            yield f"the manifest says {name} {recorded}, the tensors have {actual}"


def sizes_of(measure: Measure) -> dict[str, Any]:
    """What the bytes say, under the names of the manifest's facts."""

    def only(position: int) -> int | list[int]:
        values = sorted({shape[position] for shape in measure.shapes.values()})
        return values[0] if len(values) == 1 else values

    return {
        "method": measure.method,
        **({} if measure.fmt is None else mixed.methods_of(measure.fmt, list(measure.shapes))),
        "numa": measure.numa,
        "experts": only(0),
        "hidden": only(1),
        "intermediate": only(2),
        "backward": measure.backward,
    }


def check_metadata(output: Output, measure: Measure) -> Check | None:
    """What our shards say of themselves is what they hold."""
    ours = {shard: about for shard, about in output.metadata.items() if "ktconvert_format" in about}
    if not ours:
        return None
    problems: list[str] = []
    by_shard: dict[str, set[int]] = {}
    for (place, _), stored in output.tensors.items():
        by_shard.setdefault(stored.file, set()).add(place.layer)
    for shard, about in ours.items():
        expected = {"method": measure.method} | ({} if output.whole else {"numa": str(measure.numa)})
        if "layer" in about and by_shard.get(shard):
            layer = min(by_shard[shard])
            expected |= {"method": measure.method_of(layer), "layer": str(layer)}
            sizes = zip(("num_experts", "hidden_size", "moe_intermediate_size"), measure.shapes[layer], strict=True)
            expected |= {name: str(size) for name, size in sizes}
        problems += [
            f"{shard}: its metadata says {name} {about.get(name)}, its tensors have {value}"
            for name, value in expected.items()
            if about.get(name) != value
        ]
    sources = {about.get("source") for about in ours.values()}
    if len(sources) > 1:
        problems.append(f"the shards come from {len(sources)} different sources, says their metadata")
    return Check("metadata", f"{len(ours)} shards say what they hold", problems)


def check_config(output: Output, measure: Measure) -> Check | None:
    """Experts and sizes are those of config.json next to the weights."""
    config = output.config
    if not config:
        return None
    problems, notes = list(claims.size_problems(config, measure.shapes)), []
    made_of = str(output.facts.get("architecture"))
    if (other := claims.other_family(config, made_of)) is not None:
        problems.append(f"config.json is of {other}, and the manifest says that the experts are of {made_of}")
    made = output.manifest
    if made is None or (made.command == "merge" and made.settings.get("layers", "all") == "all"):
        # Neither the checkpoint itself nor the user named the layers, so that the config decides.
        problems += claims.layer_problems(config, list(measure.shapes))
    limit = claims.num_layers(config) if output.manifest is None and measure.shapes else None
    absent = [n for n in range(min(limit[1], MOST_LAYERS)) if n not in measure.shapes] if limit is not None else []
    if limit is not None and absent:
        notes.append(f"layers {ranges(absent)} of {limit[1]} have no experts here: right only if they are dense")
    if measure.fmt is not None and not output.whole:
        problems += measure.fmt.description.check_config(output, measure.fmt, measure.numa)
    return Check("config", "experts and sizes as in config.json", problems, notes)


def check_quantization(output: Output, measure: Measure) -> Check | None:
    """What config.json says of the quantization is what loaders of whole models want."""
    if measure.fmt is None or not output.whole:
        return None
    problems = tuple(measure.fmt.description.check_config(output, measure.fmt, measure.numa))
    return Check("quantization", f"{measure.method} in config.json, as loaders want it", problems)


def check_options(measure: Measure, parts: int | None, method: str | None) -> Check:
    """The NUMA count and method that the user means to load, if any, are those the bytes'; kt-kernel does not check."""
    fmt, here = measure.fmt, plural(measure.numa, "NUMA part")
    problems = []
    if parts is not None and parts != measure.numa:
        problems.append(f"--numa {parts} was given, the weights are for {here}")
    if method is not None and method != measure.method:
        problems.append(f"--quant-method {method.lower()} was given, the weights have the sizes of {measure.method}")
    if fmt is not None and fmt.arrangement.whole:
        again = f"load it as {measure.method}, or convert again with another --quant-type"
        return Check("options", f"{measure.method}, as given", problems, remedy=again)
    same = fmt is not None and fmt.can_resplit and method in (None, measure.method)
    change = "rewrite it with `ktconvert resplit`" if same else "convert again"
    serve = f"serve with --kt-method {measure.method} --kt-threadpool-count {measure.numa}, or {change}"
    if fmt is not None and fmt.loose is None:
        serve = f"load it as {measure.method}, {here}, or {change}"
    return Check("options", f"{measure.method}, {here}, as given", problems, remedy=serve)


def check_decoded_tensors(output: Output, _measure: Measure) -> Check:
    """Of what `dequantize` wrote: as many tensors as the manifest says, none of them twice."""
    problems = [f"{name} is in {first} and in {second}" for name, first, second in output.doubles]
    planned = output.facts.get("tensors")
    if planned != len(output.others):
        problems.append(f"{len(output.others)} tensors are here, the plan had {planned}")
    stored = unread_formats(output.others, output.others)
    problems += [f"{info.name} in {info.file} is {what}, and was not decoded" for info, what in stored]
    return Check("tensors", f"{len(output.others)} tensors, as planned", problems)


def check_decoded_config(output: Output, _measure: Measure) -> Check:
    """Of that, nothing in config.json makes a loader look for quantized weights."""
    quantized = unquantized(output.config) != output.config
    problems = ("config.json still says that the model is quantized",) if quantized else ()
    return Check("config", "nothing is quantized, says config.json", problems)


# What names, sizes and headers tell; no weight is read. None of a check: it does not apply.
StructureCheck = Callable[[Output, Measure], Check | None]
OF_FILES: tuple[StructureCheck, ...] = (check_files, check_index)
OF_EXPERTS: tuple[StructureCheck, ...] = (check_tensors, check_quantization, check_metadata, check_config)
OF_DECODED: tuple[StructureCheck, ...] = (check_decoded_tensors, check_metadata, check_decoded_config)


def check_structure(output: Output, measure: Measure) -> list[Check]:
    """Of the files, and of what is in them where every weight file can be read."""
    rest = () if not weights_whole(output) else OF_EXPERTS if output.methods else OF_DECODED
    return [check for each in (*OF_FILES, *rest) if (check := each(output, measure)) is not None]


def _usual(measure: Measure) -> tuple[int, int, int]:
    shapes = Counter(measure.shapes.values())
    return max(shapes, key=shapes.__getitem__, default=(0, 0, 0))


def _by_layer(output: Output, fact: str) -> bool:
    """Whether manifest or config allow the layers to differ in "experts" or "intermediate"."""
    if isinstance(output.facts.get(fact), list):
        return True
    row = claims.family(output.config)
    value = cfg.find(output.config, row.experts if fact == "experts" else row.width) if row else None
    return value is not None and isinstance(value[1], list)
