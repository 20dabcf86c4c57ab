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
from ktconvert.layouts.files.manifest import OutputFile
from ktconvert.layouts.outputs.opening import is_decoded
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.worker import Collecting, Failure, failure_of, require_able, threads_here
from ktconvert.pipeline.stages.carry_over import OtherTensor
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.verify.against_output import pairs, tensor_difference
from ktconvert.pipeline.verify.against_source import Comparison, carried_difference, comparison
from ktconvert.pipeline.verify.asking import Ask, ask_threads, ask_workers
from ktconvert.pipeline.verify.checks import ExpertComparison
from ktconvert.pipeline.verify.dequantized import decoded_tensors
from ktconvert.pipeline.verify.hashes import hash_problem
from ktconvert.pipeline.verify.inputs import Inputs, VerifyOptions, open_inputs


@dataclass(frozen=True)
class Known:
    """What questions are answered from."""

    inputs: Inputs
    reporter: Reporter

    @cached_property
    def comparison(self) -> Comparison:
        """With the source."""
        inputs = self.inputs
        assert inputs.model is not None
        return comparison(inputs.output, inputs.measure, inputs.model, imatrix=inputs.imatrix, full=inputs.options.full)

    @cached_property
    def carried(self) -> Mapping[str, OtherTensor]:
        """The tensors that are no routed experts."""
        inputs = self.inputs
        assert inputs.source is not None
        return decoded_tensors(inputs.source) if is_decoded(inputs.output.root) else self.comparison.carried

    @cached_property
    def pairs(self) -> Mapping[str, tuple[Any, Any]]:
        """The tensors that another output has, too."""
        assert self.inputs.other is not None
        return pairs(self.inputs.output, self.inputs.other)

    def answer(self, question: str, item: Any) -> Any:
        """The answer to one of QUESTIONS."""
        return QUESTIONS[question](self, item)


def _hash(known: Known, file: OutputFile) -> str | None:
    return hash_problem(known.inputs.output.root, file, known.reporter)


def _expert(known: Known, item: tuple[int, int]) -> ExpertComparison:
    return known.comparison.expert(*item)


def _carried(known: Known, name: str) -> str | None:
    source = known.inputs.source
    assert source is not None
    return carried_difference(known.inputs.output, source, known.carried[name])


def _equal(known: Known, name: str) -> str | None:
    other = known.inputs.other
    assert other is not None
    return tensor_difference(known.inputs.output, other, name, *known.pairs[name])


# question -> how it is answered. An item names a file, an expert or a tensor; an answer is some words and figures.
QUESTIONS: Mapping[str, Callable[[Known, Any], Any]] = {
    "hashes": _hash,
    "experts": _expert,
    "other tensors": _carried,
    "equal tensors": _equal,
}


def ask(inputs: Inputs, reporter: Reporter, executor: Executor | None, threads: int | None) -> Ask:
    """Who answers: threads of this process, or the workers of an executor, with so many threads each."""
    if executor is None:
        return ask_threads(Known(inputs, reporter).answer, inputs.options.threads)
    order = Order(inputs.options, secrets.token_hex(8), tool_version(), inputs.files, threads)
    remedy = f"`ktconvert verify {inputs.output.root}` again"
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

    options: VerifyOptions
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
    inputs = open_inputs(order.options)
    if inputs.files != order.files:
        differing = sorted({name for name, *_ in set(inputs.files) ^ set(order.files)})
        raise OutputError(
            f"{', '.join(differing[:3])} of {order.options.output} or what it is held against is another file here; "
            "every host needs the same files at the same paths."
        )
    return Known(inputs, Collecting()), threads_here(order.threads)
