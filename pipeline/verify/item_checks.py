"""Checks of single files, experts and tensors, in threads of this process or on workers of an executor."""

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

from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.errors import KTConvertError, OutputError
from ktconvert.layouts.files.shards import group_by_limit
from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.runners import unwrap_result
from ktconvert.pipeline.engine.threads import run_in_order
from ktconvert.pipeline.engine.worker import CollectingReporter, require_same_version, to_reported_error, worker_threads
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.verify import against, expert_checks
from ktconvert.pipeline.verify.checks import CheckItems
from ktconvert.pipeline.verify.file_checks import find_hash_problem
from ktconvert.pipeline.verify.inputs import Inputs, open_inputs

TASK_BYTES = 1 << 30  # bytes to read for one task of a worker
ITEMS_PER_THREAD = 4  # tasks submitted at a time


@dataclass(frozen=True)
class ItemChecker:
    """State shared by the checks of ITEM_CHECKS; properties that follow from headers are computed once."""

    inputs: Inputs
    reporter: Reporter

    @cached_property
    def comparison(self) -> expert_checks.Comparison:
        return expert_checks.create_comparison(self.inputs)

    @cached_property
    def non_experts(self) -> Mapping[str, OutputTensor]:
        """The expected non-expert tensors, by their names in the output."""
        return self.comparison.non_experts if self.inputs.model else against.list_dequantized(self.inputs)

    @cached_property
    def other(self) -> Output:
        assert self.inputs.other is not None
        return self.inputs.other

    @cached_property
    def pairs(self) -> Mapping[str, tuple[Any, Any]]:
        return against.tensor_pairs(self.inputs.output, self.other)


# Name of a check -> function that checks an item. It returns a problem or None; for an expert, ExpertFindings.
ITEM_CHECKS: Mapping[str, Callable[[ItemChecker, Any], Any]] = {
    "hashes": lambda checker, file: find_hash_problem(checker.inputs.output.root, file, checker.reporter),
    "experts": lambda checker, item: expert_checks.compare_expert(checker.comparison, *item),
    "non-expert tensors": lambda checker, name: against.compare_non_expert(checker.inputs, checker.non_experts[name]),
    "equal tensors": lambda checker, name: against.compare_tensor(
        checker.inputs.output, checker.other, name, *checker.pairs[name]
    ),
}


def create_check_items(
    inputs: Inputs, reporter: Reporter, executor: Executor | None, threads: int | None
) -> CheckItems:
    """Return the function that checks items in threads of this process, or on an executor's workers.

    threads  threads of each worker; None: the CPUs that it may use
    """
    checker = ItemChecker(inputs, reporter)
    task = WorkerTask(inputs.options, secrets.token_hex(8), tool_version(), inputs.identity, threads)

    def check_items(kind: str, items: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        if executor is None:
            findings = check_in_threads(checker, inputs.options.thread_count, kind, items)
        else:
            findings = check_on_workers(executor, partial(check_as_worker, task, kind), kind, items, sizes)
        for nbytes, (item, finding) in zip(sizes, findings, strict=True):
            yield item, finding
            if kind == "experts":
                reporter.set_current(f"layer {item[0]}")
            if executor is not None or kind != "hashes":  # threads of this process report progress while they hash
                reporter.advance(nbytes)

    return check_items


def check_in_threads(checker: ItemChecker, threads: int, kind: str, items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (item, finding) in order.

    kind  a name of ITEM_CHECKS
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="verify", initializer=unbind_thread) as pool:
        slots = list(range(ITEMS_PER_THREAD * threads))
        for item, _, finding in run_in_order(pool, items, slots, lambda item, _: ITEM_CHECKS[kind](checker, item)):
            yield item, finding


def check_on_workers(
    executor: Executor, check: Callable[[Sequence[Any]], Any], kind: str, items: Sequence[Any], sizes: Sequence[int]
) -> Iterator[tuple[Any, Any]]:
    """Yield (item, finding) in order; workers call check(items), picklable, for about TASK_BYTES at a time."""
    groups = [items[start:stop] for start, stop in group_by_limit(sizes, TASK_BYTES)]
    tasks = deque((group, executor.submit(check, group)) for group in groups)
    try:
        while tasks:
            group, future = tasks.popleft()
            yield from zip(group, unwrap_result(future, f"verifying {kind}", "verify again"), strict=True)
    finally:
        for _, future in tasks:
            future.cancel()


# --- on a worker ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerTask:
    """Description of a verification for workers.

    run      unique, so that no worker uses files that it opened for an earlier verification
    files    Inputs.identity, which must be the same on the worker
    threads  None: the CPUs that the worker may use
    """

    options: VerifyOptions
    run: str
    version: str
    files: tuple[tuple[str, int, str], ...]
    threads: int | None


def check_as_worker(task: WorkerTask, kind: str, items: Sequence[Any]) -> list[Any] | KTConvertError:
    """Return the finding of each item, in order; return an error if this host cannot check them."""
    try:
        with _open_lock:
            checker, threads = _open_checker(task)
        return [finding for _, finding in check_in_threads(checker, threads, kind, items)]
    except (KTConvertError, OSError, MemoryError) as error:
        return to_reported_error(error)


_open_lock = threading.Lock()


@functools.lru_cache(1)
def _open_checker(task: WorkerTask) -> tuple[ItemChecker, int]:
    """Return the checker and its number of threads.

    Raises KTConvertError if this process sees different files than the coordinator or runs a different ktconvert.
    """
    require_same_version(task.version)
    inputs = open_inputs(task.options)
    if inputs.identity != task.files:
        different = sorted({name for name, *_ in set(inputs.identity) ^ set(task.files)})
        raise OutputError(
            f"{', '.join(different[:3])} of {task.options.output} or its source differ on this host; every host "
            "needs the same files at the same paths."
        )
    return ItemChecker(inputs, CollectingReporter()), worker_threads(task.threads)
