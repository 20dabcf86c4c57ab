"""The download of an input that is never whole on disk: its forecast, and files that units wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ktconvert.layouts.sources.remote import RemoteFile, RemoteFiles
from ktconvert.layouts.sources.whole_files import WholeFiles, list_fetches, plan_windows
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit
from ktconvert.pipeline.report.progress import Reporter

WORTHWHILE = 0.75  # part of its files that a stage must read so that they are fetched whole


class Forecast(NamedTuple):
    """Prediction of a download.

    files        (name, bytes) of whole files, in the order of fetching
    parts_bytes  bytes of tensors that are fetched without the rest of their files
    peak_bytes   the most bytes of whole files on the disk at any time
    """

    files: tuple[tuple[str, int], ...]
    parts_bytes: int
    peak_bytes: int

    def document(self) -> dict[str, Any]:
        """Return the forecast as a JSON object."""
        return {
            "bytes": sum(size for _, size in self.files) + self.parts_bytes,
            "files": [{"name": name, "bytes": size} for name, size in self.files],
            "parts_bytes": self.parts_bytes,
            "peak_bytes": self.peak_bytes,
        }


@dataclass
class Download:
    """The files of a remote input.

    files    by name
    reads    fingerprint of each unit -> names of the files that it reads
    whole    fingerprints of the units whose files are fetched whole
    ahead    number of files that are fetched before a unit that is in work needs them
    """

    remote: RemoteFiles
    files: dict[str, RemoteFile]
    reads: Mapping[str, tuple[str, ...]]
    whole: Collection[str]
    ahead: int
    _holders: dict[str, tuple[WholeFiles, int]] = field(default_factory=dict)

    def forecast(self, units: Sequence[Unit[Any]]) -> Forecast:
        """Return what these units will download if they are made in this order."""
        windows = plan_windows([self.reads[unit.fingerprint] for unit in self._select_whole(units)], self.ahead)
        return Forecast(
            tuple((name, self.files[name].size) for name in list_fetches(windows)),
            sum(unit.bytes_in for unit in units if unit.fingerprint not in self.whole),
            max((sum(self.files[name].size for name in window) for window in windows), default=0),
        )

    @contextlib.contextmanager
    def run(self, units: Sequence[Unit[Any]], reporter: Reporter) -> Iterator[None]:
        """Let these units, which are begun in this order, fetch their files inside the block; report the progress."""
        waiting = self._select_whole(units)
        whole_files = WholeFiles(
            self.remote, self.files, [self.reads[unit.fingerprint] for unit in waiting], self.ahead
        )
        self._holders = {unit.fingerprint: (whole_files, number) for number, unit in enumerate(waiting)}
        self.remote.on_fetched = lambda: reporter.advance(0)
        reporter.show_download(lambda: (self.remote.fetched_bytes, self.remote.held_bytes))
        try:
            yield
        finally:
            self._holders = {}
            whole_files.close()

    def fetch_before(self, stage: Stage[Any]) -> Stage[Any]:
        """Return a stage whose units wait for their whole files before they are made."""

        def run(unit: Unit[Any], partial: Path, context: Context) -> Result:
            if unit.fingerprint not in self._holders:
                return stage.run(unit, partial, context)
            whole_files, number = self._holders[unit.fingerprint]
            with whole_files.hold(number):
                return stage.run(unit, partial, context)

        return replace(stage, run=run)

    def _select_whole(self, units: Sequence[Unit[Any]]) -> list[Unit[Any]]:
        return [unit for unit in units if unit.fingerprint in self.whole]


def fetch_inputs(
    download: Download | None, units: Sequence[Unit[Any]], reporter: Reporter
) -> contextlib.AbstractContextManager[None]:
    """Return the context in which these units are made, in this order: Download.run, or none for local files."""
    return contextlib.nullcontext() if download is None else download.run(units, reporter)
