"""Several generations at a time, each of them `model.generate` in a thread, of which one computes at a time.

Before each pass through the model (a token, or a part of a long prompt) a generation lets those compute that wait, and
before each layer's experts it checks whether its client is still there. So clients share the machine by tokens, and
nothing is computed for a client that has gone. Whoever has the turn computes alone, with the adapter that was asked
for, and each generation has keys and values of its own: adapters never mix.

transformers' continuous batching is not used: it has one set of sampling parameters for all clients, no seed and no
stop string of theirs, takes most of the machine's memory at once, and was no faster (docs/reference/server.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from transformers.cli.serving import utils

from ktconvert.native_quant.runtime.hf_modules import RoutedExperts
from ktconvert.pipeline.models.generating import read_in_parts
from ktconvert.pipeline.models.serving.access import ending
from ktconvert.pipeline.models.serving.request_options import RequestOptions, noted_for
from ktconvert.pipeline.models.serving.stream_decoder import GeneratedIds, StreamDecoder, is_text

ACTIVE = 4  # generations that have begun and hold keys and values of what they read; others wait, holding ids only
PATIENCE = 1.0  # seconds


class FairLock:
    """Like threading.Lock, but first come, first served; from that, whoever runs may take it again at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._given = self._served = 0  # tickets; the holder's is `served`

    def __enter__(self) -> None:
        with self._changed:
            self._queue()

    def _queue(self) -> None:
        ticket, self._given = self._given, self._given + 1
        self._changed.wait_for(lambda: self._served == ticket)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()

    def is_awaited(self) -> bool:
        return self._given - self._served > 1

    def step_back(self) -> None:
        """For the holder: let the others that wait have it first, which already see that it is awaited again."""
        with self._changed:
            self._served += 1
            self._changed.notify_all()
            self._queue()


class Ended(Exception):
    """Thrown through what computes: its client has gone, or it is done before its time."""


class Answer:
    """The answer to one request: the streamer of `model.generate`. emit gets each piece, in the generating thread;
    whole: whether it has come to its end.
    """

    def __init__(self, decoder: StreamDecoder, options: RequestOptions, emit: Callable[[Any], None]) -> None:
        self.decoder, self.options, self.emit = decoder, options, emit
        self.whole = False
        self.ids = GeneratedIds()
        self._prompt = True  # is what `put` gets first

    @property
    def total_tokens(self) -> int:
        """For the handlers of transformers' server."""
        return len(self.ids)

    def cancel(self) -> None:
        """For the handlers, too: nobody waits for it any more."""
        self.options.gone.set()

    def put(self, tokens: torch.Tensor) -> None:
        """A new token [1]; before the first one, the prompt [1, T]. Raises Ended after a stop string."""
        if self._prompt:
            self._prompt = False
            return
        for token in tokens.tolist():
            self.ids.append(token)
            for item in self.decoder.put(token):
                self.emit(item)
        if self.decoder.stopped:
            self.whole = True
            raise Ended

    def end(self) -> None:
        """For `model.generate`; the Scheduler emits what was held back, since cancelled answers have an end too."""


class Scheduler(utils.BaseGenerateManager):
    """Generates for the handlers of transformers' server; all else that computes with the model goes through `run`. It
    is called from the event loop, and computes in `active` threads. What a generation raises becomes an error in its
    stream, or is raised by generate_non_streaming. A cancelled one ends with what it has.
    """

    def __init__(self, model: Any, processor: Any, switch: Callable[[str | None], None], active: int = ACTIVE) -> None:
        """switch: has the model compute with the adapter of this name."""
        self.model, self.switch = model, switch
        self.processor = copy.deepcopy(processor)  # a fast tokenizer cannot encode while another thread decodes
        self.lock = FairLock()
        self._jobs = queue.SimpleQueue[tuple[RequestOptions, Callable[[], Any], Future[Any]] | None]()
        self._own = threading.local()  # .options: of the request that this thread computes for
        self._stopping = False
        self._random: Any = torch.cuda if model.device.type == "cuda" else torch
        model.register_forward_pre_hook(self._before_pass)
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.register_forward_pre_hook(self._check)
        self.threads = [threading.Thread(target=self._work, daemon=True, name=f"generate-{i}") for i in range(active)]
        for thread in self.threads:
            thread.start()

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Theirs, by the options that were noted: a queue of items, of which the last is None, and the streamer."""
        loop, items = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def emit(item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before us
                loop.call_soon_threadsafe(items.put_nowait, item)

        def generate() -> None:
            try:
                self._generate(answer, inputs, gen_config)
                emit(None)
            except Exception as error:
                emit(utils._StreamError(str(error)))

        answer = self._answer(request_id, gen_config, response_parser, emit)
        self._jobs.put((answer.options, generate, Future()))
        return items, answer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Theirs: the text, the number of tokens of the prompt, and the new ids."""
        ids = noted_for(request_id).ids
        parser = utils.build_response_parser(processor, model, inputs["input_ids"]) if ids is None else None
        items = list[Any]()
        answer = self._answer(request_id, gen_config, parser, items.append)
        await self.run(lambda: self._generate(answer, inputs, gen_config), answer.options)
        answer.ids.items = items
        return "".join(filter(is_text, items)), inputs["input_ids"].shape[-1] if ids is None else len(ids), answer.ids

    def ends(self, config: Any) -> Sequence[int]:
        """The ids that end an answer by this generation config."""
        own = self.model.generation_config if config.eos_token_id is None else config
        return _listed(own.eos_token_id)

    async def run(self, work: Callable[[], Any], options: RequestOptions) -> Any:
        """What `work` gives or raises in one of the threads; its passes raise Ended when the client has gone."""
        future = Future[Any]()
        self._jobs.put((options, work, future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            options.gone.set()
            raise

    def interrupt(self) -> None:
        """Have all that is computed end at its next layer. Safe in a signal handler, which a lock would not be."""
        self._stopping = True

    def stop(self) -> None:
        """Interrupt, and wait some time for the layers that are being computed when the interpreter ends."""
        self.interrupt()
        for _ in self.threads:
            self._jobs.put(None)
        for thread in self.threads:
            thread.join(PATIENCE / len(self.threads))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._own.options, work, future = job
            if future.set_running_or_notify_cancel():
                try:
                    with self.lock:
                        self.switch(self._own.options.model)
                        result = work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            self._own.options = None
            del job, work, future  # with the prompt and the answer, while this thread waits for the next one

    def _answer(self, request_id: str, config: Any, parser: Any, emit: Callable[[Any], None]) -> Answer:
        decoder = StreamDecoder(self.processor, parser, self.ends(config), _listed(config.stop_strings))
        return Answer(decoder, noted_for(request_id), emit)

    def _generate(self, answer: Answer, inputs: Any, config: Any) -> None:
        """Generate until the end, or until the client has gone. Raises Refused if the server ends before it does."""
        options = answer.options
        config = copy.deepcopy(config)
        config.stop_strings = None  # StreamDecoder knows them, without a table of the tokens that they may begin in
        if config.pad_token_id is None:
            config.pad_token_id = (*_listed(config.eos_token_id), 0)[0]
        if options.ids is not None:
            ids = torch.tensor([options.ids], device=self.model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        read_in_parts(self.model, config, inputs)
        more: dict[str, Any] = {"logits_processor": options.processors(inputs["input_ids"].shape[-1])}
        if hasattr(self.model, "has_talker"):
            more["generation_mode"] = "text"
        torch.manual_seed(secrets.randbits(63) if options.seed is None else options.seed)
        with contextlib.suppress(Ended):
            self._check()
            self.model.generate(**inputs, **more, generation_config=config, streamer=answer)
            answer.whole = True
        if self._stopping and not answer.whole:
            raise ending()
        for item in answer.decoder.end():
            answer.emit(item)
        options.cut = not answer.decoder.ended

    def _check(self, *_: Any) -> None:
        """Raises Ended if the request that this thread computes for, if any, is over."""
        options = getattr(self._own, "options", None)
        if options is not None and (self._stopping or options.gone.is_set()):
            raise Ended

    def _before_pass(self, *_: Any) -> None:
        """Let the threads that wait compute first. Seed and adapter are a client's own, whoever else had the turn."""
        self._check()
        if getattr(self._own, "options", None) is not None and self.lock.is_awaited():
            state = self._random.get_rng_state()
            self.lock.step_back()
            self.switch(self._own.options.model)
            self._random.set_rng_state(state)
            self._check()


def _listed(value: Any) -> Sequence[Any]:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
