"""Progress of a command: a bar on a terminal, plain lines elsewhere, one JSON event per line with --json."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ktconvert.native_quant import machine
from ktconvert.pipeline.report import events
from ktconvert.pipeline.report.terminal import escape, raw_stream
from ktconvert.pipeline.report.text import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY = 10.0  # seconds between plain progress lines


class Reporter:
    """Messages on stderr and events on stdout; safe to call from several threads.

    With a verbosity of -1 only warnings are printed, with -2 nothing.
    """

    def __init__(self, *, json_events: bool = False, verbosity: int = 0) -> None:
        self.json_events = json_events
        self.verbosity = verbosity
        self._lock = threading.Lock()
        self._total = self._done = self._done_here = 0
        self._units_done = self._units = 0
        self._start = self._last_line = 0.0
        self._current = ""
        self._amount: Callable[[float], str] = size
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
        """Print a line for people; level 1 only with -v, level -1 also with -q."""
        if level <= self.verbosity:
            text = escape(text)
            with self._lock:
                if self._bar is not None:
                    self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
                else:
                    print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print information that needs no action."""
        self.event("note", text=text)
        self.say(f"note: {text}")

    def warn(self, text: str) -> None:
        """Print a warning, also with -q."""
        self.event("warning", text=text)
        self.say(f"warning: {text}", level=-1)

    def report_hash(self, nbytes: int) -> None:
        """Report that a file of nbytes was hashed, before the work begins."""
        self.event("hashed", bytes=nbytes)
        self.say(f"hashed {size(nbytes)}", level=1)

    def begin(
        self, total_bytes: int, done_bytes: int, amount: Callable[[float], str] = size, units: tuple[int, int] = (0, 0)
    ) -> None:
        """Start to show progress.

        total_bytes  bytes of input
        done_bytes   bytes of input that belong to finished units
        amount       formats a count; the unit need not be bytes
        units        number of finished units, and of all units
        """
        (self._units_done, self._units) = units
        self._amount = amount
        self._total = total_bytes
        self._done = done_bytes
        self._done_here = 0
        self._start = self._last_line = time.monotonic()
        self.event("begin", total_bytes=total_bytes, done_bytes=done_bytes)
        if self.json_events or self.verbosity < 0 or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            return
        from rich.console import Console, RenderableType
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.text import Text

        def amount_and_speed(task: Task) -> Text:
            speed = task.finished_speed or task.speed
            rate = "?" if speed is None else amount(speed)
            return Text(f"{amount(task.completed)} of {amount(task.total or 0)}  {rate}/s")

        class LocalColumn(ProgressColumn):
            """A column that is empty in a worker's row, since its progress is unknown."""

            def __init__(self, render_task: Callable[[Task], RenderableType]) -> None:
                super().__init__()
                self._render_task = render_task

            def render(self, task: Task) -> RenderableType:
                return Text() if task.total is None else self._render_task(task)

        columns = (LocalColumn(BarColumn()), LocalColumn(amount_and_speed), LocalColumn(TimeRemainingColumn()))
        description = TextColumn("{task.description}", markup=False)
        memory = TextColumn("{task.fields[rss]}")
        console = Console(file=raw_stream(sys.stderr))
        self._bar = Progress(
            description, *columns, memory, console=console, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("", total=total_bytes, completed=done_bytes, rss="")
        self._bar.start()

    def set_current(self, unit: str) -> None:
        """Set the unit that is shown as the current one."""
        self._current = unit

    def finish_unit(self) -> None:
        """Count one more finished unit."""
        with self._lock:
            self._units_done += 1
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, description=self._status())

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
                self._workers[name] = self._bar.add_task("", total=None, rss="")
            self._bar.update(self._workers[name], description=escape(f"{name}: {unit or 'idle'}"))

    def advance(self, nbytes: int) -> None:
        """Add bytes of input that are done; off a terminal, print a line or an event every LINE_EVERY seconds."""
        with self._lock:
            self._done += nbytes
            self._done_here += nbytes
            if self._bar is not None and self._task is not None:
                self._bar.update(
                    self._task, advance=nbytes, description=self._status(), rss=f"RSS {size(machine.rss())}"
                )
                return
            now = time.monotonic()
            if now - self._last_line < LINE_EVERY:
                return
            self._last_line = now
        rate = self._done_here / max(now - self._start, 1e-9)
        eta = (self._total - self._done) / rate if rate else 0.0
        self.event(
            "progress",
            done_bytes=self._done,
            total_bytes=self._total,
            bytes_per_second=round(rate),
            eta_seconds=round(eta),
            unit=self._current,
            units_done=self._units_done,
            units=self._units,
            rss=machine.rss(),
        )
        share = 100 * self._done / max(self._total, 1)
        self.say(
            f"{share:5.1f} %  {self._amount(self._done)} of {self._amount(self._total)}  {self._amount(rate)}/s  "
            f"ETA {duration(eta)}  {self._status()}  RSS {size(machine.rss())}"
        )

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def rate(self) -> tuple[int, float]:
        """Return the bytes of input that this run has done, and the seconds since begin()."""
        return self._done_here, time.monotonic() - self._start
