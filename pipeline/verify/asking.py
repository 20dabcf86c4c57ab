"""Many questions of one kind about what lies in files: answered by threads here, or by an executor's workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol

from ktconvert.layouts.files.shards import group_by_limit
from ktconvert.native_quant.own_cpus import use_own_cpus
from ktconvert.pipeline.engine.tasks import result_of
from ktconvert.pipeline.engine.worker import Failure
from ktconvert.pipeline.stages.ordered import in_order

CHUNK = 1 << 30  # bytes that the items of a task are about
AHEAD = 4  # items under way for each thread


class Ask(Protocol):
    """Asks one question of questions.QUESTIONS about many items: yields (item, answer) in the order of the items."""

    def __call__(self, question: str, items: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """sizes: bytes that are to be read for each item."""


def ask_threads(answer: Callable[[str, Any], Any], threads: int) -> Ask:
    """Have answer(question, item) called by so many threads."""

    def ask(question: str, items: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        with ThreadPoolExecutor(threads, thread_name_prefix="verify", initializer=use_own_cpus) as pool:
            slots = list(range(AHEAD * threads))
            for item, _, answered in in_order(pool, items, slots, lambda item, _: answer(question, item)):
                yield item, answered

    return ask


def ask_workers(executor: Executor, answers: Callable[[str, Sequence[Any]], list[Any] | Failure], remedy: str) -> Ask:
    """Have answers(question, items) called by an executor's workers, for about CHUNK bytes at a time. It travels: a
    function of a module, with arguments as small.
    """

    def ask(question: str, items: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        flying: deque[tuple[Sequence[Any], Future[list[Any] | Failure]]] = deque()
        try:
            for start, stop in group_by_limit(sizes, CHUNK):
                flying.append((items[start:stop], executor.submit(answers, question, items[start:stop])))
            while flying:
                asked, future = flying.popleft()
                answered: list[Any] = result_of(future, f"verifying {question}", remedy)
                yield from zip(asked, answered, strict=True)
        finally:
            for _, future in flying:
                future.cancel()

    return ask
