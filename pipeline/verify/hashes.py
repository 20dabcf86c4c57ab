"""The files of an output against the hashes of its manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.manifest import Manifest, OutputFile
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.verify.asking import Ask
from ktconvert.pipeline.verify.checks import Check

PIECE = 4 << 20  # bytes hashed between two signs of progress


def check_hashes(listing: Manifest, files: list[OutputFile], ask: Ask) -> Check:
    """Every byte of these files of a manifest, by its sha256, and what the manifest itself says."""
    # The largest first: the last one alone would leave the others idle.
    ordered = sorted(files, key=lambda file: -file.size)
    answers = ask("hashes", ordered, [file.size for file in ordered])
    wrong = {file.name: problem for file, problem in answers if problem is not None}
    if (actual := manifest.actual_digest(listing)) != listing.sha256:
        wrong[manifest.NAME] = (
            f"{manifest.NAME} is not what was written: the sha256 of what it says is {actual[:12]}, "
            f"and it names {listing.sha256[:12]}"
        )
    problems = tuple(wrong[name] for name in sorted(wrong))
    return Check("hashes", f"{len(files)} files and {manifest.NAME}, every byte as it was written", problems)


def hash_problem(root: Path, file: OutputFile, reporter: Reporter) -> str | None:
    """What is wrong with the bytes of a file; None where they are as they were written."""
    digest = hashlib.sha256()
    try:
        with (root / file.name).open("rb") as data:
            while piece := data.read(PIECE):
                digest.update(piece)
                reporter.advance(len(piece))
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    actual, wanted = digest.hexdigest(), file.sha256
    if actual != wanted:
        return f"{file.name} is not what was written: its sha256 is {actual[:12]}, the manifest says {wanted[:12]}"
    return None
