"""The files of an output against the hashes of its manifest."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant.own_cpus import use_own_cpus
from ktconvert.pipeline.stages.ordered import in_order
from ktconvert.pipeline.tell.report import Reporter
from ktconvert.pipeline.verify.checks import Check

PIECE = 4 << 20  # bytes hashed between two signs of progress


def check_hashes(output: Output, files: list[dict[str, Any]], threads: int, reporter: Reporter) -> Check:
    """Every byte of every file of the manifest, by its sha256."""

    def one(file: dict[str, Any], _slot: int) -> str | None:
        digest = hashlib.sha256()
        try:
            with (output.root / file["name"]).open("rb") as data:
                while piece := data.read(PIECE):
                    digest.update(piece)
                    reporter.advance(len(piece))
        except OSError as error:
            return f"{file['name']} cannot be read ({error.strerror})"
        actual, wanted = digest.hexdigest(), file["sha256"]
        if actual != wanted:
            return (
                f"{file['name']} is not what was written: its sha256 is {actual[:12]}, the manifest says {wanted[:12]}"
            )
        return None

    # The largest first: the last one alone would leave the other threads idle.
    ordered = sorted(files, key=lambda file: -file["size"])
    with ThreadPoolExecutor(threads, thread_name_prefix="hash", initializer=use_own_cpus) as pool:
        results = list(in_order(pool, ordered, list(range(4 * threads)), one))
    wrong = {file["name"]: problem for file, _, problem in results if problem is not None}
    problems = tuple(wrong[name] for name in sorted(wrong))
    return Check("hashes", f"{len(files)} files, every byte as it was written", problems)
