"""A scheduler that runs several generations at a time, each as `model.generate` in a thread of its own.

One thread computes at a time. Before each pass through the model (a token, or a chunk of a long prompt) it lets waiting
threads compute, and before each layer's experts it checks whether its client is still connected. So clients share the
machine by tokens, and nothing is computed for a client that has gone. A thread computes with the adapter of its
request, and each generation has a key-value cache of its own: adapters never mix.

transformers' continuous batching is not used: it has one set of sampling parameters for all clients and neither their
seeds nor their stop strings, takes most of the machine's memory at once, and was no faster (docs/reference/server.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cli.serving import utils

from ktconvert.native_quant.runtime.hf_modules import RoutedExperts
from ktconvert.pipeline.models.generating import Speed, chunk_prefill, make_finite_check
from ktconvert.pipeline.models.serving import constraints
from ktconvert.pipeline.models.serving.authentication import shutdown_error
from ktconvert.pipeline.models.serving.request_options import RequestOptions, find_options
from ktconvert.pipeline.models.serving.stream_decoder import GeneratedIds, StreamDecoder, format_score, is_text

THREADS = 4  # generations that hold a key-value cache; further ones wait and hold only token ids
STOP_SECONDS = 1.0  # time to wait for threads


class FairLock:
    """A lock that serves threads in the order in which they ask. With threading.Lock the holder may get it again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._issued = self._served = 0  # tickets; the holder's is `served`

    def __enter__(self) -> None:
        with self._changed:
            self._queue()

    def _queue(self) -> None:
        ticket = self._issued
        self._issued = self._issued + 1
        self._changed.wait_for(lambda: self._served == ticket)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()

    def has_waiters(self) -> bool:
        """Return whether other threads wait for the lock."""
        return self._issued - self._served > 1

    def requeue(self) -> None:
        """Release the lock and wait for it behind the others. Only the holder may call this.

        The others already see that a thread waits for the lock.
        """
        with self._changed:
            self._served += 1
            self._changed.notify_all()
            self._queue()


class GenerationEnded(Exception):
    """Raised out of a computation whose client has gone, or that is complete before its length limit."""


@dataclass
class TokenCounts:
    """Tokens of prompts that the model has read, and tokens that it has generated."""

    prompt: int = 0
    new: int = 0


class Answer:
    """The answer to one request, as the streamer of `model.generate`.

    emit         called with each piece of text, in the generating thread
    is_complete  whether it has come to its end
    """

    def __init__(
        self, decoder: StreamDecoder, options: RequestOptions, emit: Callable[[Any], None], counts: TokenCounts
    ) -> None:
        self.decoder = decoder
        self.options = options
        self.emit = emit
        self.counts = counts
        self.is_complete = False
        self.ids = GeneratedIds()
        self._prompt_length: int | None = None  # set by the first tokens that model.generate adds
        self._call_text = ""  # of a call in the grammar of the options' constraint
        self._scores: list[dict[str, Any]] = []  # of tokens that no item contains yet
        self._begin = self._first = 0.0  # when generation began, and when it added its first token

    @property
    def total_tokens(self) -> int:
        """Number of new tokens, for transformers' handlers."""
        return len(self.ids)

    def cancel(self) -> None:
        """Record that nobody waits for the answer any more, for transformers' handlers."""
        self.options.cancelled.set()

    def add(self, tokens: torch.Tensor) -> None:
        """Add a new token [1]; the first call has the prompt [1, T]. Raises GenerationEnded at its end."""
        now = time.perf_counter()
        if self._prompt_length is None:
            self._prompt_length = tokens.shape[-1]
            self._begin = now
            return
        if not self.ids:
            self._first = now
            self.counts.prompt += self._prompt_length
        for token in tokens.tolist():
            self.ids.append(token)
            self.counts.new += 1
            if self.options.top_logprobs is not None:
                self._scores.append(self._score(token))
            self.emit_all(self.decoder.add(token))
            self._check_end(token)
        self.options.speed = Speed(self._prompt_length, len(self.ids), self._first - self._begin, now - self._first)
        self.is_complete = self.is_complete or self.decoder.stopped
        if self.is_complete:
            raise GenerationEnded

    def _check_end(self, token: int) -> None:
        """Let the decoder end the answer if it is complete by its constraint."""
        constraint = self.options.constraint
        if constraint is not None and not self.decoder.ended:
            self.is_complete = self.decoder.ended = constraint.add(token, self.decoder.decode)

    def finish(self) -> None:
        """Emit the remaining text, and a call in the grammar of the options' constraint."""
        self.emit_all(self.decoder.end())
        if self._call_text:
            call = constraints.read_call(self._call_text)
            self.emit(self._call_text if call is None else utils.ToolCall(*call))

    def emit_all(self, items: Iterable[Any]) -> None:
        """Emit items, and add their scores to the options."""
        for item in items:
            if self.options.calls_tool and is_text(item):
                self._call_text += item
                continue
            if isinstance(item, utils.ToolCall) and self.options.single_call:
                self.is_complete = self.decoder.stopped = self.decoder.ended = True
            if self.options.top_logprobs is not None:
                self.options.scores.append(self._take_scores(item) if is_text(item) else [])
            self.emit(item)

    def _score(self, token: int) -> dict[str, Any]:
        """Return OpenAI's log probabilities at the position of the latest token."""
        assert self.options.logits is not None
        logprobs = self.options.logits.float().log_softmax(-1)
        values, ids = logprobs.topk(min(self.options.top_logprobs or 0, len(logprobs)))
        pairs = zip([token, *ids.tolist()], [float(logprobs[token]), *values.tolist()], strict=True)
        own, *likeliest = (format_score(self.decoder.tokenizer, *pair) for pair in pairs)
        return {**own, "top_logprobs": likeliest}

    def _take_scores(self, text: str) -> list[dict[str, Any]]:
        """Return the scores of the tokens of a text, without those of markup before it."""
        ids = self.ids[len(self.ids) - len(self._scores) :]
        begins = (begin for begin in reversed(range(len(ids))) if text.strip() in self.decoder.decode(ids[begin:]))
        scores = self._scores[next(begins, 0) :]
        self._scores = []
        return scores

    put = add  # the name that model.generate calls

    def end(self) -> None:
        """Do nothing: the Scheduler emits the remaining text, since model.generate does not end a cancelled answer."""


class Scheduler(utils.BaseGenerateManager):
    """Generation for transformers' handlers, and other computation with the model through `run`.

    The event loop calls it, and its threads compute. An exception in a generation becomes an error in its stream, or is
    raised by generate_non_streaming. A cancelled generation ends with the tokens that it has.
    """

    def __init__(
        self, model: Any, processor: Any, switch: Callable[[str | None], None], threads: int = THREADS
    ) -> None:
        """Start the threads.

        switch  makes the model compute with the adapter of a name
        """
        self.model = model
        self.switch = switch
        self.processor = copy.deepcopy(processor)  # a fast tokenizer cannot encode while another thread decodes
        self.lock = FairLock()
        self.counts = TokenCounts()
        self._caches: dict[threading.Thread, Any] = {}  # key-value caches of the current generations
        self._jobs = queue.SimpleQueue[tuple[RequestOptions, Callable[[], Any], Future[Any]] | None]()
        self._thread = threading.local()  # .options: of the request that this thread computes
        self._stopping = False
        self._random: Any = torch.cuda if model.device.type == "cuda" else torch
        model.register_forward_pre_hook(self._let_others_compute, with_kwargs=True)
        model.register_forward_hook(self._keep_logits)
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.register_forward_pre_hook(self._check_cancelled)
        self.threads = [threading.Thread(target=self._work, daemon=True, name=f"generate-{i}") for i in range(threads)]
        for thread in self.threads:
            thread.start()

    # --- the interface of transformers' handlers --------------------------------------------------

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Return a queue of items, of which the last is None, and the streamer."""
        loop = asyncio.get_running_loop()
        items = asyncio.Queue[Any]()

        def emit(item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop may end first
                loop.call_soon_threadsafe(items.put_nowait, item)

        def generate() -> None:
            try:
                self._generate(answer, inputs, gen_config)
                emit(None)
            except Exception as error:
                emit(utils._StreamError(str(error)))

        answer = self._create_answer(request_id, gen_config, response_parser, emit)
        self._jobs.put((answer.options, generate, Future()))
        return items, answer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return the text, the number of tokens of the prompt, and the new ids."""
        ids = find_options(request_id).ids
        parser = utils.build_response_parser(processor, model, inputs["input_ids"]) if ids is None else None
        items = list[Any]()
        answer = self._create_answer(request_id, gen_config, parser, items.append)
        await self.run(lambda: self._generate(answer, inputs, gen_config), answer.options)
        answer.ids.items = items
        length = inputs["input_ids"].shape[-1] if ids is None else len(ids)
        return "".join(filter(is_text, items)), length, answer.ids

    def stop(self) -> None:
        """Interrupt all computation, and wait a short time for layers that are being computed."""
        self.interrupt()
        for _ in self.threads:
            self._jobs.put(None)
        for thread in self.threads:
            thread.join(STOP_SECONDS / len(self.threads))

    # --- measured by Metrics ----------------------------------------------------------------------

    def count_waiting(self) -> int:
        """Return the number of generations that wait for a thread."""
        return self._jobs.qsize()

    def count_running(self) -> int:
        """Return the number of generations that a thread has begun."""
        return len(self._caches)

    def cache_bytes(self) -> int:
        """Return the bytes of the key-value caches of all current generations."""
        layers = [layer for cache in list(self._caches.values()) for layer in getattr(cache, "layers", ())]
        tensors = [value for layer in layers for value in list(vars(layer).values()) if torch.is_tensor(value)]
        return sum(tensor.nbytes for tensor in tensors)

    # --- ours -------------------------------------------------------------------------------------

    def end_ids(self, config: Any) -> Sequence[int]:
        """Return the token ids that end an answer with this generation config."""
        source_config = self.model.generation_config if config.eos_token_id is None else config
        return _as_tuple(source_config.eos_token_id)

    async def run(self, function: Callable[[], Any], options: RequestOptions) -> Any:
        """Return what `function` returns, or raise what it raises, in one of the threads.

        Its passes through the model raise GenerationEnded when the client has gone.
        """
        future = Future[Any]()
        self._jobs.put((options, function, future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            options.cancelled.set()
            raise

    def interrupt(self) -> None:
        """End all computation at its next layer. Takes no lock, so that a signal handler may call it."""
        self._stopping = True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._thread.options, function, future = job
            self._caches[threading.current_thread()] = None
            if future.set_running_or_notify_cancel():
                try:
                    with self.lock:
                        self.switch(self._thread.options.model)
                        result = function()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            self._thread.options = None
            del self._caches[threading.current_thread()]
            del job, function, future  # free the prompt and the answer while this thread waits for a job

    def _create_answer(self, request_id: str, config: Any, parser: Any, emit: Callable[[Any], None]) -> Answer:
        decoder = StreamDecoder(self.processor, parser, self.end_ids(config), _as_tuple(config.stop_strings))
        return Answer(decoder, find_options(request_id), emit, self.counts)

    def _generate(self, answer: Answer, inputs: Any, config: Any) -> None:
        """Generate until the answer ends or its client has gone. Raises RequestError if the server shuts down."""
        options = answer.options
        config = copy.deepcopy(config)
        config.stop_strings = None  # StreamDecoder finds them, without a table of all tokens that may be part of one
        if config.pad_token_id is None:
            config.pad_token_id = (*_as_tuple(config.eos_token_id), 0)[0]
        if options.ids is not None:
            ids = torch.tensor([options.ids], device=self.model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        chunk_prefill(self.model, config, inputs)
        processors = options.logits_processors(inputs["input_ids"].shape[-1])
        more: dict[str, Any] = {"logits_processor": [make_finite_check(self.model), *processors]}
        if hasattr(self.model, "has_talker"):
            more["generation_mode"] = "text"
        torch.manual_seed(secrets.randbits(63) if options.seed is None else options.seed)
        with contextlib.suppress(GenerationEnded):
            self._check_cancelled()
            self.model.generate(**inputs, **more, generation_config=config, streamer=answer)
            answer.is_complete = True
        if self._stopping and not answer.is_complete:
            raise shutdown_error()
        answer.finish()
        options.truncated = not answer.decoder.ended

    def _check_cancelled(self, *_: Any) -> None:
        """Raise GenerationEnded if the request that this thread computes has been cancelled."""
        options = getattr(self._thread, "options", None)
        if options is not None and (self._stopping or options.cancelled.is_set()):
            raise GenerationEnded

    def _keep_logits(self, _: Any, arguments: Any, output: Any) -> None:
        """Keep the last logits if the request that this thread computes needs log probabilities."""
        options = getattr(self._thread, "options", None)
        if options is not None and options.top_logprobs is not None:
            options.logits = output.logits[0, -1]

    def _let_others_compute(self, _: Any, arguments: Any, named: dict[str, Any]) -> None:
        """Let waiting threads compute first, and restore the random state and the adapter of this thread's request."""
        self._check_cancelled()
        self._caches[threading.current_thread()] = named.get("past_key_values")
        if getattr(self._thread, "options", None) is not None and self.lock.has_waiters():
            state = self._random.get_rng_state()
            self.lock.requeue()
            self.switch(self._thread.options.model)
            self._random.set_rng_state(state)
            self._check_cancelled()


def _as_tuple(value: Any) -> Sequence[Any]:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
