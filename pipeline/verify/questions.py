"""What can be asked about one file, expert or tensor of what is verified, here or by a worker elsewhere."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ktconvert.layouts.errors import KtconvertError, OutputError
from ktconvert.layouts.outputs.opening import is_decoded
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.worker import Collecting, Failure, failure_of, require_able, threads_here
from ktconvert.pipeline.stages.carry_over import OtherTensor
from ktconvert.pipeline.tell.report import Reporter
from ktconvert.pipeline.verify.asking import Ask, ask_threads, ask_workers
from ktconvert.pipeline.verify.checks import ExpertComparison
from ktconvert.pipeline.verify.dequantized import decoded_tensors
from ktconvert.pipeline.verify.hashes import hash_problem
from ktconvert.pipeline.verify.opened import Opened, Wish, open_wish
from ktconvert.pipeline.verify.other import pairs, tensor_difference
from ktconvert.pipeline.verify.source import Comparison, carried_difference, comparison


@dataclass(frozen=True)
class Known:
    """What questions are answered from."""

    opened: Opened
    reporter: Reporter

    @cached_property
    def comparison(self) -> Comparison:
        """With the source."""
        opened = self.opened
        assert opened.model is not None
        return comparison(opened.output, opened.measure, opened.model, imatrix=opened.imatrix, full=opened.wish.full)

    @cached_property
    def carried(self) -> Mapping[str, OtherTensor]:
        """The tensors that are no routed experts."""
        opened = self.opened
        assert opened.source is not None
        return decoded_tensors(opened.source) if is_decoded(opened.output.root) else self.comparison.carried

    @cached_property
    def pairs(self) -> Mapping[str, tuple[Any, Any]]:
        """The tensors that another output has, too."""
        assert self.opened.other is not None
        return pairs(self.opened.output, self.opened.other)

    def answer(self, question: str, item: Any) -> Any:
        """The answer to one of QUESTIONS."""
        return QUESTIONS[question](self, item)


def _hash(known: Known, file: dict[str, Any]) -> str | None:
    return hash_problem(known.opened.output.root, file, known.reporter)


def _expert(known: Known, item: tuple[int, int]) -> ExpertComparison:
    return known.comparison.expert(*item)


def _carried(known: Known, name: str) -> str | None:
    source = known.opened.source
    assert source is not None
    return carried_difference(known.opened.output, source, known.carried[name])


def _equal(known: Known, name: str) -> str | None:
    other = known.opened.other
    assert other is not None
    return tensor_difference(known.opened.output, other, name, *known.pairs[name])


# question -> how it is answered. An item names a file, an expert or a tensor; an answer is some words and figures.
QUESTIONS: Mapping[str, Callable[[Known, Any], Any]] = {
    "hashes": _hash,
    "experts": _expert,
    "other tensors": _carried,
    "equal tensors": _equal,
}


def ask(opened: Opened, reporter: Reporter, executor: Executor | None, threads: int | None) -> Ask:
    """Who answers: threads of this process, or the workers of an executor, with so many threads each."""
    if executor is None:
        return ask_threads(Known(opened, reporter).answer, opened.wish.threads)
    order = Order(opened.wish, secrets.token_hex(8), tool_version(), opened.files, threads)
    remedy = f"`ktconvert verify {opened.output.root}` again"
    asked = ask_workers(executor, partial(answers, order), remedy)

    def advancing(question: str, items: Sequence[Any], sizes: Sequence[int]) -> Any:
        for nbytes, answered in zip(sizes, asked(question, items, sizes), strict=True):
            reporter.advance(nbytes if question == "hashes" else 0)  # here, while they are hashed
            yield answered

    return advancing


# --- on a worker ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What a worker has to know.

    run      another one each time, so that no worker answers from files that it opened before
    files    what it must see (Opened.files)
    threads  None: the CPUs that it may use
    """

    wish: Wish
    run: str
    version: str
    files: tuple[tuple[str, int, str], ...]
    threads: int | None


def answers(order: Order, question: str, items: Sequence[Any]) -> list[Any] | Failure:
    """The answers to a question about some items, in order. What is wrong with this host comes back as a Failure."""
    try:
        known, threads = _open(order)
        sizes = [0] * len(items)
        return [answered for _, answered in ask_threads(known.answer, threads)(question, items, sizes)]
    except (KtconvertError, OSError, MemoryError) as error:
        return failure_of(error)


_opening = threading.Lock()


def _open(order: Order) -> tuple[Known, int]:
    with _opening:
        return _opened(order)


@functools.lru_cache(1)
def _opened(order: Order) -> tuple[Known, int]:
    """Raises KtconvertError where this process does not see what the coordinator sees, or is another ktconvert."""
    require_able(order.version)
    opened = open_wish(order.wish)
    if opened.files != order.files:
        differing = sorted({name for name, *_ in set(opened.files) ^ set(order.files)})
        raise OutputError(
            f"{', '.join(differing[:3])} of {order.wish.output} or what it is held against is another file here; every "
            "host needs the same files at the same paths."
        )
    return Known(opened, Collecting()), threads_here(order.threads)
