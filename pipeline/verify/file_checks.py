"""Checks of an output's files: presence and size, the index, a second reader of headers, and hashes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.manifest import Manifest, OutputFile
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.output import Output, list_files
from ktconvert.layouts.outputs.slices import explain_name
from ktconvert.layouts.sources.containers.container import Header
from ktconvert.layouts.sources.containers.safetensors import INDEX, PART
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import first_line, plural
from ktconvert.pipeline.verify.checks import CHUNK_BYTES, CONVERT_AGAIN, Check, CheckItems

LOOSE = re.compile(r"\.kt$|(^|/)_layer_\d+/")
WEIGHTS_OR_INDEX = re.compile(r"\.safetensors$|\.kt$|\.index\.json$|^_layer_\d+/")

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # tensor name -> dtype and shape


def check_files(output: Output, _measure: Measure) -> Check:
    """Check that every file of the manifest has its size and can be read, and that no other file has weights."""
    notes: list[str] = []
    extra_files = "no extra files"
    listed = {file.name for file in output.listed_files}
    damages = list(output.damaged_files.values())
    others: list[str] = []
    extra = [name for name in list_files(output.root) if name not in listed and name != manifest.NAME]
    if not output.loose:
        stale = sorted(name for name in {*listed, *extra} if LOOSE.search(name))
        others += [f"{name} is a loose weight file in an output of safetensors" for name in stale]
        extra = [name for name in extra if name not in stale]
    if output.manifest is not None:
        foreign = [name for name in extra if WEIGHTS_OR_INDEX.search(name)]
        if harmless := [name for name in extra if name not in foreign]:
            more = f" and {len(harmless) - 3} more" if len(harmless) > 3 else ""
            notes.append(f"not in the manifest: {', '.join(harmless[:3])}{more}")
            extra_files = plural(len(harmless), "extra file")
    else:
        missing = "no manifest, as in kt-kernel's own outputs"
        notes.append(f"{missing}: only --against SOURCE can check the contents")
        foreign = _find_foreign_files(output)
    others += [f"{name} does not belong to the output, and kt-kernel may load it" for name in foreign]
    count = len(listed) or len(output.shards) or len(output.tensors)
    remedy = CONVERT_AGAIN if damages else "move it elsewhere"
    return Check("files", f"{plural(count, 'file')}, {extra_files}", [*damages, *others], notes, remedy)


def _find_foreign_files(output: Output) -> list[str]:
    """Return weight files that do not belong to an output without a manifest."""
    if output.loose:
        known = {*output.damaged, *(s.file for s in output.tensors.values()), *(file for _, file, _ in output.strays)}
        return [name for name in list_files(output.root) if name.endswith(".kt") and name not in known]
    if output.weight_map is not None:
        in_index = set(output.weight_map.values())
        return [shard for shard in output.shards if shard not in in_index]
    totals = {match[3] for shard in output.shards if (match := PART.fullmatch(shard))}
    unfinished = [shard for shard in output.shards if "PLACEHOLDER" in shard]
    if unfinished or len(totals) < 2:
        return unfinished
    return [s for s in output.shards if (m := PART.fullmatch(s)) and m[3] != max(totals)]


def check_index(output: Output, _measure: Measure) -> Check | None:
    """Check that the index names every tensor of every shard, no other tensor, and the total size."""
    if output.loose or INDEX in output.damaged:
        return None
    if output.weight_map is None:  # check_files reports it as missing if the manifest lists one
        none = Check("index", "none", notes=("no index, as after merge_cpu_weights.py; kt-kernel needs none",))
        return none if output.manifest is None else None
    damaged = output.damaged_files
    notes: list[str] = []
    missing = sorted(set(output.weight_map.values()) - set(output.shards))
    problems = [f"{INDEX} names {shard}, which is missing" for shard in missing]
    stored = {info.name: info for info in (*output.tensors.values(), *output.non_expert_tensors.values())}
    for name, shard in output.weight_map.items():
        if shard in damaged or shard not in output.shards:
            continue
        where = explain_name(output.names, name)
        if name not in stored:
            problems.append(f"{INDEX} names {name} in {shard}, which does not contain it{where}")
        elif stored[name].file != shard:
            problems.append(f"{INDEX} names {name} in {shard}, but {stored[name].file} contains it{where}")
    unnamed = stored.keys() - output.weight_map.keys()
    problems += [
        f"{info.file} contains {name}, which {INDEX} does not name{explain_name(output.names, name)}"
        for name, info in stored.items()
        if name in unnamed
    ]
    total = sum(info.nbytes for info in stored.values())
    if output.total_size == 0 and output.manifest is None:
        notes.append("the index has no total size, as in kt-kernel's outputs")
    elif output.total_size != total and not damaged and not problems:
        problems.append(f"{INDEX} has total_size {output.total_size}, but the shards have {total} bytes")
    return Check("index", f"{len(stored)} tensors, {total} bytes", problems, notes)


# --- a second reader ------------------------------------------------------------------------------


def check_safetensors(output: Output, _measure: Measure) -> Check | None:
    """Check that the safetensors package reads the same names, dtypes and shapes from every shard as our own reader.

    Reads headers only. Shards that our reader cannot read are left to check_files.
    """
    headers = {shard: header for shard, header in output.headers.items() if shard not in output.damaged_files}
    if not headers:
        return None
    problems = [problem for shard, header in headers.items() for problem in _compare_readers(output, shard, header)]
    return Check("safetensors", f"{plural(len(headers), 'shard')} read the same", problems)


def _compare_readers(output: Output, shard: str, header: Header) -> Iterator[str]:
    entries: Tensors = {entry.name: (entry.dtype, entry.shape) for entry in header.entries}
    try:
        reported = read_header_with_package(output.root / shard)
    except (SafetensorError, OSError) as error:
        yield f"{shard}: the safetensors package cannot read it ({first_line(error)})"
        return
    for name in sorted(entries.keys() | reported.keys()):
        if name not in reported:
            yield f"{shard}: the safetensors package does not find {name}"
        elif name not in entries:
            yield f"{shard}: the safetensors package finds {name}, but ktconvert does not"
        elif entries[name] != reported[name]:
            reported_text, own_text = (f"{dtype} {list(shape)}" for dtype, shape in (reported[name], entries[name]))
            yield f"{shard}: the safetensors package reads {name} as {reported_text}, but ktconvert as {own_text}"


def read_header_with_package(path: Path) -> Tensors:
    """Return the tensors of a file as the safetensors package reads them; no data is read. Raises SafetensorError."""
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # the file is not iterable
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


# --- hashes ---------------------------------------------------------------------------------------


def check_hashes(listing: Manifest, files: list[OutputFile], check_items: CheckItems) -> Check:
    """Check the SHA-256 of these files of a manifest, and of the manifest itself."""
    # The largest file first: otherwise one thread would hash it while the others are idle.
    ordered = sorted(files, key=lambda file: -file.size)
    findings = check_items("hashes", ordered, [file.size for file in ordered])
    problems = {file.name: problem for file, problem in findings if problem is not None}
    if (actual := manifest.compute_actual_digest(listing)) != listing.sha256:
        problems[manifest.NAME] = (
            f"{manifest.NAME} was changed: the sha256 of its contents is {actual[:12]}, "
            f"but it states {listing.sha256[:12]}"
        )
    result = f"{plural(len(files), 'file')} and {manifest.NAME} match"
    return Check("hashes", result, tuple(problems[name] for name in sorted(problems)))


def find_hash_problem(root: Path, file: OutputFile, reporter: Reporter) -> str | None:
    """Return the problem of the bytes of a file; None if they are as they were written."""
    digest = hashlib.sha256()
    try:
        with (root / file.name).open("rb") as data:
            while chunk := data.read(CHUNK_BYTES):
                digest.update(chunk)
                reporter.advance(len(chunk))
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    actual = digest.hexdigest()
    figures = f"its sha256 is {actual[:12]}, but {file.sha256[:12]} in the manifest"
    return None if actual == file.sha256 else f"{file.name} was changed: {figures}"
