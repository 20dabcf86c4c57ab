"""Checks of one file, expert or tensor each: made by threads of this process, or by an executor's workers."""

from __future__ import annotations

import functools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ktconvert.layouts.checkpoints.output_tensors import OtherTensor
from ktconvert.layouts.errors import KtconvertError, OutputError
from ktconvert.layouts.files.shards import group_by_limit
from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.runners import result_of
from ktconvert.pipeline.engine.threads import run_in_order
from ktconvert.pipeline.engine.worker import CollectingReporter, failure_of, require_same_version, worker_threads
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.verify import against
from ktconvert.pipeline.verify.checks import CheckItems
from ktconvert.pipeline.verify.contents import hash_problem
from ktconvert.pipeline.verify.inputs import Inputs, open_inputs

TASK_BYTES = 1 << 30  # that the items of a task are about
AHEAD = 4  # items under way for each thread


@dataclass(frozen=True)
class ItemChecker:
    """Checks an item (file, expert, tensor): a sentence, None if all is well; of an expert, figures, too."""

    inputs: Inputs
    reporter: Reporter

    @cached_property
    def comparison(self) -> against.Comparison:
        return against.comparison(self.inputs)

    @cached_property
    def other_tensors(self) -> Mapping[str, OtherTensor]:
        """Those of the source that are no routed experts, by their names in the output."""
        return self.comparison.other_tensors if self.inputs.model else against.decoded_tensors(self.inputs)

    @cached_property
    def other(self) -> Output:
        assert self.inputs.other is not None
        return self.inputs.other

    @cached_property
    def pairs(self) -> Mapping[str, tuple[Any, Any]]:
        return against.pairs(self.inputs.output, self.other)


ITEM_CHECKS: Mapping[str, Callable[[ItemChecker, Any], Any]] = {
    "hashes": lambda checker, file: hash_problem(checker.inputs.output.root, file, checker.reporter),
    "experts": lambda checker, item: against.compare_expert(checker.comparison, *item),
    "other tensors": lambda checker, name: against.other_difference(checker.inputs, checker.other_tensors[name]),
    "equal tensors": lambda checker, name: against.tensor_difference(
        checker.inputs.output, checker.other, name, *checker.pairs[name]
    ),
}


def check_items(inputs: Inputs, reporter: Reporter, executor: Executor | None, threads: int | None) -> CheckItems:
    """By threads of this process, or by the workers of an executor, with so many threads each."""
    checker = ItemChecker(inputs, reporter)
    task = WorkerTask(inputs.options, secrets.token_hex(8), tool_version(), inputs.files, threads)

    def check(kind: str, items: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        if executor is None:
            found = by_threads(checker, inputs.options.threads, kind, items)
        else:
            found = by_workers(executor, partial(check_as_worker, task, kind), kind, items, sizes)
        for nbytes, (item, what) in zip(sizes, found, strict=True):
            yield item, what
            if kind == "experts":
                reporter.at(f"layer {item[0]}")
            if executor is not None or kind != "hashes":  # threads of this process report them while they hash
                reporter.advance(nbytes)

    return check


def by_threads(checker: ItemChecker, threads: int, kind: str, items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    with ThreadPoolExecutor(threads, thread_name_prefix="verify", initializer=unbind_thread) as pool:
        slots = list(range(AHEAD * threads))
        for item, _, found in run_in_order(pool, items, slots, lambda item, _: ITEM_CHECKS[kind](checker, item)):
            yield item, found


def by_workers(
    executor: Executor, check: Callable[[Sequence[Any]], Any], kind: str, items: Sequence[Any], sizes: Sequence[int]
) -> Iterator[tuple[Any, Any]]:
    """By an executor's workers, which call check(items), picklable, for about TASK_BYTES at a time."""
    groups = [items[start:stop] for start, stop in group_by_limit(sizes, TASK_BYTES)]
    flying = deque((group, executor.submit(check, group)) for group in groups)
    try:
        while flying:
            group, future = flying.popleft()
            yield from zip(group, result_of(future, f"verifying {kind}", "verify again"), strict=True)
    finally:
        for _, future in flying:
            future.cancel()


# --- on a worker ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerTask:
    """What a worker has to know.

    run      another one each time, so that no worker checks files that it opened before
    files    what it must see (Inputs.files)
    threads  None: the CPUs that it may use
    """

    options: VerifyOptions
    run: str
    version: str
    files: tuple[tuple[str, int, str], ...]
    threads: int | None


def check_as_worker(task: WorkerTask, kind: str, items: Sequence[Any]) -> list[Any] | KtconvertError:
    """What was found of each item, in order. What is wrong with this host comes back as an error."""
    try:
        with _opening:
            checker, threads = _opened(task)
        return [found for _, found in by_threads(checker, threads, kind, items)]
    except (KtconvertError, OSError, MemoryError) as error:
        return failure_of(error)


_opening = threading.Lock()


@functools.lru_cache(1)
def _opened(task: WorkerTask) -> tuple[ItemChecker, int]:
    """Raises KtconvertError where this process does not see what the coordinator sees, or is another ktconvert."""
    require_same_version(task.version)
    inputs = open_inputs(task.options)
    if inputs.files != task.files:
        differing = sorted({name for name, *_ in set(inputs.files) ^ set(task.files)})
        raise OutputError(
            f"{', '.join(differing[:3])} of {task.options.output} or what it is compared with is another file here; "
            "every host needs the same files at the same paths."
        )
    return ItemChecker(inputs, CollectingReporter()), worker_threads(task.threads)
