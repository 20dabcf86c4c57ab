"""Progress of a command: a bar on a terminal, plain lines elsewhere, one JSON event per line with --json."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ktconvert.native_quant import machine
from ktconvert.pipeline.report import events
from ktconvert.pipeline.report.terminal import escape, raw_stream
from ktconvert.pipeline.report.text import duration, plural, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY = 10.0  # seconds between plain progress lines
NARROW_BAR, WIDE_BAR = 10, 40  # columns of the bar


class Reporter:
    """Messages on stderr and events on stdout; safe to call from several threads.

    With a verbosity of -1 only warnings are printed, with -2 nothing.

    on_progress  is called with the bytes of input that are done, and all of them
    rename       returns a line for people with the option names that its readers use
    """

    def __init__(
        self,
        *,
        json_events: bool = False,
        verbosity: int = 0,
        on_progress: Callable[[int, int], object] | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        self.json_events = json_events
        self.verbosity = verbosity
        self._on_progress = on_progress
        self._rename = rename
        self._lock = threading.Lock()
        self._total = self._done = self._done_here = 0
        self._units_done = self._units = 0
        self._start = self._clock = self._last_line = 0.0
        self._in_chains = False
        self._to_measure = 0
        self._measured = (0, 0.0)
        self._conclusions: list[str] = []
        self._has_noted = False
        self._hidden_notes = 0
        self._current = ""
        self._amount: Callable[[float], str] = size
        self._read_download: Callable[[], tuple[int, int]] | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._workers: dict[str, TaskID] = {}

    def event(self, kind: str, **fields: Any) -> None:
        """Print an event with --json: its name in events.EVENTS, and its fields."""
        if self.json_events:
            with self._lock:
                sys.stdout.write(json.dumps(msgspec.to_builtins(events.EVENTS[kind](**fields))) + "\n")
                sys.stdout.flush()

    def say(self, text: str, level: int = 0) -> None:
        """Print a line for people, not with --json; level 1 only with -v."""
        if not self.json_events:
            self._print(text, level)

    def _print(self, text: str, level: int = 0) -> None:
        """Print a line on stderr; level 1 only with -v, level -1 also with -q."""
        if level <= self.verbosity:
            text = escape(self._rename(text))
            with self._lock:
                if self._bar is not None:
                    self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
                else:
                    print(text, file=sys.stderr, flush=True)

    def conclude(self, text: str) -> None:
        """Print a line for people below the bar, when the bar has ended."""
        if self._bar is None:
            self.say(text)
        else:
            self._conclusions.append(text)

    def note(self, text: str) -> None:
        """Print information that needs no action: an event, or the first note of a run, and the others only with -v."""
        if self.json_events:
            self.event("note", text=text)
            return
        with self._lock:
            level = int(self._has_noted)
            self._has_noted = True
            self._hidden_notes += level
        self.say(f"note: {text}", level)

    def detail(self, text: str) -> None:
        """Print a note only with -v; an event as any note. It is not counted."""
        self.event("note", text=text)
        self.say(f"note: {text}", 1)

    def announce(self, text: str) -> None:
        """Print a note that is always shown, such as what the run waits for. It is not counted."""
        self.event("note", text=text)
        self.say(f"note: {text}")

    def count_hidden_notes(self) -> None:
        """Print the number of notes that were not printed since the last call."""
        if self._hidden_notes and self.verbosity == 0:
            self.say(f"({plural(self._hidden_notes, 'more note')}: -v)")
        self._hidden_notes = 0

    def warn(self, text: str) -> None:
        """Print a warning, also with -q."""
        self.event("warning", text=text)
        self._print(f"warning: {text}", level=-1)

    def report_hash(self, nbytes: int) -> None:
        """Report that a file of nbytes was hashed, before the work begins."""
        self.event("hashed", bytes=nbytes)
        self.say(f"hashed {size(nbytes)}", level=1)

    def begin(
        self,
        total_bytes: int,
        done_bytes: int,
        amount: Callable[[float], str] = size,
        units: tuple[int, int] = (0, 0),
        *,
        chained_bytes: int | None = None,
    ) -> None:
        """Start to show progress.

        total_bytes    bytes of input
        done_bytes     bytes of input that belong to finished units
        amount         formats a count; the unit need not be bytes
        units          number of finished units, and of all units
        chained_bytes  bytes of input of the remaining units in chains, which take the time; the speed is measured over
                       whole ones, as most of the time of each passes before its first bytes are done. None: no chains
        """
        (self._units_done, self._units) = units
        self._amount = amount
        self._total = total_bytes
        self._done = done_bytes
        self._done_here = 0
        self._start = self._clock = self._last_line = time.monotonic()
        self._in_chains = chained_bytes is not None
        self._to_measure = total_bytes - done_bytes if chained_bytes is None else chained_bytes
        self._measured = (0, 0.0)
        self.event("begin", total_bytes=total_bytes, done_bytes=done_bytes)
        if self.json_events or self.verbosity < 0 or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
        from rich.table import Column
        from rich.text import Text

        console = Console(file=raw_stream(sys.stderr))
        list_figures = self._list_figures
        bar_width = max(NARROW_BAR, min(WIDE_BAR, console.width - 2 * WIDE_BAR))

        class LocalBar(BarColumn):
            """A bar; empty in a worker's row, since its progress is unknown."""

            def render(self, task: Task) -> Any:
                return Text() if task.total is None else super().render(task)

        class Figures(ProgressColumn):
            """The figures that fit into the line, the most important ones first; none in a worker's row."""

            def render(self, task: Task) -> Text:
                width = console.width - len(task.description) - bar_width - 2
                return Text("" if task.total is None else _join_fitting(list_figures(time.monotonic()), width))

        one_line = Column(no_wrap=True, overflow="ellipsis")
        description = TextColumn("{task.description}", markup=False, table_column=one_line)
        columns = (description, LocalBar(bar_width), Figures(Column(no_wrap=True)))
        self._bar = Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task(self._status(), total=total_bytes, completed=done_bytes)
        self._bar.start()

    def show_download(self, read: Callable[[], tuple[int, int]]) -> None:
        """Show the progress of a download, too.

        read  returns the bytes that have been downloaded, and those of them that the disk holds
        """
        self._read_download = read

    def set_current(self, unit: str) -> None:
        """Set the unit that is shown as the current one."""
        with self._lock:
            self._current = unit
            self._update_bar()

    def finish_unit(self, chained_bytes: int | None = None) -> None:
        """Count one more finished unit.

        chained_bytes  bytes of input of a unit in a chain, 0 for its samples and statistics; None for other units
        """
        with self._lock:
            self._units_done += 1
            now = time.monotonic()
            if chained_bytes is not None:
                if chained_bytes:
                    done, seconds = self._measured
                    self._measured = (done + chained_bytes, seconds + now - self._clock)
                self._clock = now
            self._update_bar()

    def _update_bar(self, advance: int = 0) -> None:
        """Show the current unit, and bytes that are done, in the bar if there is one; the caller holds the lock."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=advance, description=self._status())

    def _status(self) -> str:
        return escape(f"{self._units_done}/{self._units} {self._current}" if self._units else self._current)

    def show_worker(self, name: str, unit: str | None) -> None:
        """Show the unit of a remote worker, in a separate row on a terminal.

        unit  name of the unit; None if the worker is idle
        """
        with self._lock:
            if self._bar is None:
                return
            if name not in self._workers:
                self._workers[name] = self._bar.add_task("", total=None)
            self._bar.update(self._workers[name], description=escape(f"{name}: {unit or 'idle'}"))

    def advance(self, nbytes: int) -> None:
        """Add bytes of input that are done; off a terminal, print a line or an event every LINE_EVERY seconds."""
        with self._lock:
            self._done += nbytes
            self._done_here += nbytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)
            self._update_bar(nbytes)
            if self._bar is not None:
                return
            now = time.monotonic()
            if now - self._last_line < LINE_EVERY:
                return
            self._last_line = now
        rate, eta = self._measure_speed(now)
        downloaded, held = (None, None) if self._read_download is None else self._read_download()
        self.event(
            "progress",
            downloaded_bytes=downloaded,
            held_bytes=held,
            done_bytes=self._done,
            total_bytes=self._total,
            bytes_per_second=round(rate),
            eta_seconds=None if eta is None else round(eta),
            unit=self._current,
            units_done=self._units_done,
            units=self._units,
            rss=machine.rss(),
        )
        self._print(f"{'  '.join(self._list_figures(now))}  {self._status()}")

    def _measure_speed(self, now: float) -> tuple[float, float | None]:
        """Return bytes of input per second, and the remaining seconds.

        These are None, as unknown, before a unit is measured, and when one takes longer than those before it.
        """
        done, seconds = self._measured if self._in_chains else (self._done_here, now - self._clock)
        if not done:
            return 0.0, None
        rate = done / max(seconds, 1e-9)
        remaining = max(0, self._to_measure - done) / rate
        since = now - self._clock if self._in_chains else 0.0  # time in the current unit
        if remaining == 0:
            return rate, 0.0
        return rate, remaining - since if since < remaining else None

    def _list_figures(self, now: float) -> list[str]:
        """Return figures on the progress for people, the most important ones first."""
        rate, eta = self._measure_speed(now)
        speed = [f"{self._amount(rate)}/s"] if rate else []
        download = []
        if self._read_download is not None:
            downloaded, held = self._read_download()
            download = [f"{size(downloaded)} fetched", f"{size(held)} on disk"]
        return [
            f"{100 * self._done / max(self._total, 1):.0f} %",
            *([] if self._done >= self._total else [f"ETA {'unknown' if eta is None else duration(eta)}"]),
            *download,
            *speed,
            f"{self._amount(self._done)} of {self._amount(self._total)}",
            f"RSS {size(machine.rss())}",
        ]

    def end(self) -> None:
        """End the bar, and print the conclusions and the number of hidden notes below it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        while self._conclusions:
            self.say(self._conclusions.pop(0))
        self.count_hidden_notes()

    def rate(self) -> tuple[int, float]:
        """Return the bytes of input that this run has done, and the seconds since begin()."""
        return self._done_here, time.monotonic() - self._start


def _join_fitting(figures: Sequence[str], width: int) -> str:
    """Return the first figures that fit into a number of columns, and at least one."""
    count = len(figures)
    while count > 1 and len("  ".join(figures[:count])) > width:
        count -= 1
    return "  ".join(figures[:count])
