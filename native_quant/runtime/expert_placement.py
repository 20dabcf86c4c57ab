"""Placement of experts: counts of routed tokens, and files that tell servers which experts the GPU should compute.

SGLang 0.5.23 reads a JSON object with nothing but `physical_to_logical_map` (eplb/expert_location.py): the GPU computes
the first experts of each layer's list. sglang-kt 0.7.2 reads a torch file with `logical_count`, and chooses by itself
(layers/moe/kt_ep_wrapper.py). Both write torch files with their recorded counts (eplb/expert_distribution.py).
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ktconvert.layouts.errors import InputError, KTConvertError, absent_path, bad_file, unreadable_file
from ktconvert.layouts.extras import require_packages
from ktconvert.layouts.files.publish import MARK
from ktconvert.layouts.sources.containers.safetensors import MOST_NUMBERS
from ktconvert.layouts.statistics import expert_counts
from ktconvert.layouts.statistics.expert_counts import require_tokens
from ktconvert.layouts.statistics.folder import COUNTS, MAKE_STATISTICS, read_counts, read_folder_counts
from ktconvert.native_quant.arrays import I64

if TYPE_CHECKING:
    import torch

LOGICAL_COUNT = "logical_count"  # [steps, layers, experts], in sglang-kt's placement and in recordings
RECORDS, LAST_MAP = "records", "last_physical_to_logical_map"  # of recordings per pass or token
PHYSICAL_COUNT = "global_physical_count"  # [layers, physical experts], in each record
MOST_BYTES = 4 << 30  # of a recording
MOST_OBJECT_BYTES = 256 << 20  # of its objects without the numbers of tensors
STEPS_AT_ONCE = 64
MOST_TOKENS = 1 << 32  # of one expert in one step; sums of such numbers in MOST_BYTES fit into int64
SAFE_TORCH = (2, 6)  # older versions run code in files, even with weights_only=True (CVE-2025-32434)
RECORD_AGAIN = (
    "use a recording of SGLang's expert distribution recorder in the mode stat (expert_distribution_recorder_*.pt)"
)


# --- files for servers ----------------------------------------------------------------------------


def map_file(counts: I64) -> bytes:
    """Return SGLang's file: each layer's experts, those with the most tokens first; among equals, the first.

    counts  [decoder layers, experts]; the list of a layer without experts has the usual order
    """
    order = np.argsort(-counts, axis=1, kind="stable").tolist()
    return ('{"physical_to_logical_map": [\n' + ",\n".join(map(json.dumps, order)) + "\n]}\n").encode()


def counts_file(counts: I64) -> bytes:
    """Return sglang-kt's file of counts [decoder layers, experts]. Raises KTConvertError without torch."""
    require_torch()
    import torch

    buffer = io.BytesIO()
    torch.save({LOGICAL_COUNT: torch.from_numpy(counts.astype(np.int64))[None], "generator": MARK}, buffer)
    return buffer.getvalue()


def require_torch() -> None:
    """Raise KTConvertError if torch is missing, or too old to read files of others safely."""
    require_packages("reading or writing a file of torch (.pt)", ["torch"], "torch")
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_TORCH:
        raise KTConvertError(f"torch {torch.__version__} runs code that files contain; install torch 2.6 or newer")


# --- reading counts -------------------------------------------------------------------------------


def read_any_counts(path: Path) -> I64:
    """Read counts of routed tokens, int64 [decoder layers, experts].

    path  an output that has expert_counts.json, a folder with statistics, or one of their files, or a recording

    Raises InputError for a damaged or different file, KTConvertError for a recording without torch.
    """
    if path.is_dir():
        if (path / expert_counts.NAME).exists():
            return expert_counts.read_counts_file(path / expert_counts.NAME)
        if not (path / COUNTS).exists():
            problem = f"has no counts of routed tokens ({COUNTS} or {expert_counts.NAME})"
            raise bad_file(path, problem, MAKE_STATISTICS)
        return read_folder_counts(path)
    if not path.exists():
        raise absent_path(path)
    if (read := READERS.get(path.suffix)) is None:
        raise InputError(f"{path}: not a folder, and its name does not end with {', '.join(READERS)}; {RECORD_AGAIN}")
    return read(path)


def read_recording(path: Path) -> I64:
    """Read what SGLang or sglang-kt recorded, int64 [decoder layers, experts], summed over all steps.

    The file is mapped, not loaded. Raises InputError for any other content.
    """
    require_torch()
    import torch

    _require_plain_archive(path)
    try:
        # Objects of other classes are refused; nothing in the file is run.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file can raise any error
        raise InputError(f"{path}: cannot be read by torch ({_first_line(error)}); {RECORD_AGAIN}") from None
    if isinstance(content, torch.Tensor):
        content = {LOGICAL_COUNT: content}
    if isinstance(content, Mapping) and LOGICAL_COUNT in content:
        counts = _sum_steps(path, LOGICAL_COUNT, content[LOGICAL_COUNT])
    elif isinstance(content, Mapping) and content.keys() >= {RECORDS, LAST_MAP}:
        counts = _sum_records(path, content[RECORDS], content[LAST_MAP])
    else:
        names = ", ".join(repr(name)[:40] for name in [*content][:3]) if isinstance(content, Mapping) else ""
        problem = f"contains {names or type(content).__name__}, no {LOGICAL_COUNT!r}"
        raise InputError(f"{path}: {problem}; {RECORD_AGAIN}")
    require_tokens(path, counts, RECORD_AGAIN)
    return counts


READERS: Mapping[str, Callable[[Path], I64]] = {
    ".pt": read_recording,
    ".json": expert_counts.read_counts_file,
    ".safetensors": read_counts,
}


def _require_plain_archive(path: Path) -> None:
    """Raise InputError for a file that torch.save did not write, and for one that needs much memory."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise InputError(f"{path}: has {size} bytes, more than {MOST_BYTES}; record fewer steps")
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError as error:
        raise unreadable_file(path, error) from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        raise InputError(f"{path}: not a file of torch.save; {RECORD_AGAIN}") from None
    compressed = any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size for entry in entries)
    objects = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    if compressed or objects > MOST_OBJECT_BYTES:
        raise InputError(f"{path}: compressed, or with {objects} bytes of objects, unlike a recording; {RECORD_AGAIN}")


def _check_numbers(path: Path, name: str, tensor: Any, dims: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of whole numbers with one of these numbers of dimensions. Raises InputError for anything else."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{path}: {name!r} is no tensor but {type(tensor).__name__}; {RECORD_AGAIN}")
    kind = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if tensor.ndim not in dims or tensor.dtype not in (*whole, torch.float32, torch.float64):
        raise InputError(f"{path}: {name!r} is {kind}, not numbers of tokens; {RECORD_AGAIN}")
    # A view can have any number of elements; a recording has none.
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise InputError(f"{path}: {name!r} is {kind}, without all its numbers in the file; {RECORD_AGAIN}")
    if math.prod(tensor.shape[-2:]) > MOST_NUMBERS:
        raise InputError(f"{path}: {name!r} is {kind}, larger than any model; {RECORD_AGAIN}")
    return tensor


def _sum_steps(path: Path, name: str, value: Any) -> I64:
    """Return the sum over the steps of counts [steps, layers, experts], or counts [layers, experts], as int64."""
    import torch

    tensor = _check_numbers(path, name, value, (2, 3))
    tensor = tensor[None] if tensor.ndim == 2 else tensor
    total = torch.zeros(tensor.shape[1:], dtype=torch.int64)
    for first in range(0, len(tensor) if tensor.numel() else 0, STEPS_AT_ONCE):
        steps = tensor[first : first + STEPS_AT_ONCE]
        if tensor.is_floating_point() and not (torch.isfinite(steps).all() and (steps == steps.round()).all()):
            problem = "NaN or infinity" if not torch.isfinite(steps).all() else "fractions"
            raise InputError(f"{path}: {name!r} contains {problem}, not numbers of tokens; {RECORD_AGAIN}")
        least, most = int(steps.min()), int(steps.max())  # a bound may be too large for the tensor's own type
        if least < 0 or most >= MOST_TOKENS:
            problem = "negative numbers" if least < 0 else f"{most} tokens of one expert"
            raise InputError(f"{path}: {name!r} contains {problem}; {RECORD_AGAIN}")
        total += steps.to(torch.int64).sum(0)
    return np.asarray(total.numpy())


def _sum_records(path: Path, records: Any, last_map: Any) -> I64:
    """Return the counts of a recording per pass or token, whose records count physical experts, as int64.

    last_map  integers [layers, physical experts]: the expert that each physical expert is a copy of
    """
    numbers = _check_numbers(path, LAST_MAP, last_map, (2,)).numpy()
    layers, physical = numbers.shape
    is_complete = numbers.size and numbers.min() >= 0 and numbers.dtype.kind in "iu"
    experts = int(numbers.max()) + 1 if is_complete else 0
    if not is_complete or any(np.unique(row).size != experts for row in numbers):
        problem = f"{LAST_MAP!r} does not name every expert of each layer"
        raise InputError(f"{path}: {problem}; {RECORD_AGAIN}")
    counts = np.zeros((layers, experts), np.int64)
    rows = np.arange(layers)[:, None]
    for record in records if isinstance(records, list) else ():
        value = record.get(PHYSICAL_COUNT) if isinstance(record, Mapping) else None
        step = _sum_steps(path, PHYSICAL_COUNT, value)
        if step.shape != (layers, physical):
            problem = f"{PHYSICAL_COUNT!r} has shape {list(step.shape)}, but {LAST_MAP!r} {[layers, physical]}"
            raise InputError(f"{path}: {problem}; {RECORD_AGAIN}")
        np.add.at(counts, (rows, numbers), step)
    return counts


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
