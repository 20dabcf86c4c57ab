"""Failed writes of torch and safetensors, which do not always tell why: a full disk, a quota, a file-size limit."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktconvert.layouts.errors import KtconvertError, ResourceError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import explained
from ktconvert.native_quant import machine
from ktconvert.pipeline.report.text import first_line

PROBE = 1 << 20  # bytes
RUST_ERRNO = re.compile(r"\(os error (\d+)\)")


@contextmanager
def explain_writes(folder: Path) -> Iterator[None]:
    """Turn what torch and safetensors raise for a failed write below a folder into an OSError, or a ResourceError."""
    from safetensors import SafetensorError

    try:
        with explained(folder):
            yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number = _reason(error) or _probe(folder)
        if number is None:
            remedy = "check the disk, then run the command again"
            raise KtconvertError(f"{folder}: cannot be written ({first_line(error)}); {remedy}.") from error
        with explained(folder):
            raise OSError(number, os.strerror(number), str(folder)) from error


def _reason(error: BaseException | None) -> int | None:
    """Return the errno of a failed write; None where the library that failed does not tell it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        if found := RUST_ERRNO.search(str(error)):
            return int(found[1])
        error = error.__cause__ or error.__context__
    return None


def _probe(folder: Path) -> int | None:
    """Return the errno with which this folder refuses a small file, or a file reached the size limit; else None."""
    limit = machine.file_size_limit()
    if limit is not None and any(path.stat().st_size >= limit for path in folder.rglob("*")):
        return errno.EFBIG
    try:
        publish.write_file(folder / "probe", bytes(PROBE))
    except ResourceError as error:
        return _reason(error)
    except OSError as error:
        return error.errno
    finally:
        with suppress(OSError):
            (folder / "probe").unlink(missing_ok=True)
    return None
