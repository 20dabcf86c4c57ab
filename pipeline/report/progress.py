"""What the user sees while work runs: a bar on a terminal, plain lines elsewhere, a JSON event per line with --json."""

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
from ktconvert.pipeline.report.terminal import escape, unescaped
from ktconvert.pipeline.report.text import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY = 10.0  # seconds between plain progress lines


class Reporter:
    """Human words to stderr, events to stdout; quiet leaves warnings only. Safe to call from several threads."""

    def __init__(self, *, json_events: bool = False, verbosity: int = 0) -> None:
        self.json_events, self.verbosity = json_events, verbosity
        self._lock = threading.Lock()
        self._total = self._done = self._counted = 0
        self._units = (0, 0)  # done, in all
        self._begun = self._last_line = 0.0
        self._where = ""
        self._amount: Callable[[float], str] = size
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._workers: dict[str, TaskID] = {}

    def event(self, kind: str, **fields: Any) -> None:
        """One machine-readable line, with --json: of a kind of events.KINDS, with its fields."""
        if self.json_events:
            with self._lock:
                sys.stdout.write(json.dumps(msgspec.to_builtins(events.KINDS[kind](**fields))) + "\n")
                sys.stdout.flush()

    def say(self, text: str, level: int = 0) -> None:
        """A line for people; level 1 only with -v, level -1 also with -q."""
        if level <= self.verbosity:
            text = escape(text)
            with self._lock:
                if self._bar is not None:
                    self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
                else:
                    print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        self.event("note", text=text)
        self.say(f"note: {text}")

    def warn(self, text: str) -> None:
        """Something that the user should act on; also shown with -q."""
        self.event("warning", text=text)
        self.say(f"warning: {text}", level=-1)

    def hashed(self, nbytes: int) -> None:
        """Another file of so many bytes was hashed, before the work begins."""
        self.event("hashed", bytes=nbytes)
        self.say(f"hashed {size(nbytes)}", level=1)

    def begin(
        self, total_bytes: int, done_bytes: int, amount: Callable[[float], str] = size, units: tuple[int, int] = (0, 0)
    ) -> None:
        """Progress starts: bytes of input in all, and those that finished units already account for. amount: says how
        much, for what is counted need not be bytes; units: how many are done, and how many there are.
        """
        self._units, self._amount = units, amount
        self._total, self._done, self._counted = total_bytes, done_bytes, 0
        self._begun = self._last_line = time.monotonic()
        self.event("begin", total_bytes=total_bytes, done_bytes=done_bytes)
        if self.json_events or self.verbosity < 0 or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            return
        from rich.console import Console, RenderableType
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.text import Text

        def done(task: Task) -> Text:
            speed = task.finished_speed or task.speed
            rate = "?" if speed is None else amount(speed)
            return Text(f"{amount(task.completed)} of {amount(task.total or 0)}  {rate}/s")

        class Known(ProgressColumn):
            """A column that is empty for a worker elsewhere: how far it is, nobody knows."""

            def __init__(self, text: Callable[[Task], RenderableType]) -> None:
                super().__init__()
                self._text = text

            def render(self, task: Task) -> RenderableType:
                return Text() if task.total is None else self._text(task)

        columns = (Known(BarColumn()), Known(done), Known(TimeRemainingColumn()))
        description, memory = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[rss]}")
        console = Console(file=unescaped(sys.stderr))
        self._bar = Progress(
            description, *columns, memory, console=console, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("", total=total_bytes, completed=done_bytes, rss="")
        self._bar.start()

    def at(self, unit: str) -> None:
        self._where = unit

    def unit_done(self) -> None:
        with self._lock:
            self._units = (self._units[0] + 1, self._units[1])
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, description=self._at())

    def _at(self) -> str:
        done, units = self._units
        return escape(f"{done}/{units} {self._where}" if units else self._where)

    def worker(self, name: str, unit: str | None) -> None:
        """Which unit a worker elsewhere is making; None: it has ended. A line each on a terminal."""
        with self._lock:
            if self._bar is None:
                return
            if name not in self._workers:
                self._workers[name] = self._bar.add_task("", total=None, rss="")
            self._bar.update(self._workers[name], description=escape(f"{name}: {unit or 'idle'}"))

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._counted += nbytes
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, advance=nbytes, description=self._at(), rss=f"RSS {size(machine.rss())}")
                return
            now = time.monotonic()
            if now - self._last_line < LINE_EVERY:
                return
            self._last_line = now
        rate = self._counted / max(now - self._begun, 1e-9)
        eta = (self._total - self._done) / rate if rate else 0.0
        self.event(
            "progress",
            done_bytes=self._done,
            total_bytes=self._total,
            bytes_per_second=round(rate),
            eta_seconds=round(eta),
            unit=self._where,
            units_done=self._units[0],
            units=self._units[1],
            rss=machine.rss(),
        )
        share = 100 * self._done / max(self._total, 1)
        self.say(
            f"{share:5.1f} %  {self._amount(self._done)} of {self._amount(self._total)}  {self._amount(rate)}/s  "
            f"ETA {duration(eta)}  {self._at()}  RSS {size(machine.rss())}"
        )

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def rate(self) -> tuple[int, float]:
        """Input bytes done in this run, and the seconds since begin."""
        return self._counted, time.monotonic() - self._begun
