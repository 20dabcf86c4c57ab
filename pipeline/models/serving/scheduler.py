"""Generations beside each other, each of them `model.generate` in a thread, of which one computes at a time.

Before each pass through the model (a token, or a part of a long prompt) a generation lets those that wait have their
turn, and before each layer's experts it looks whether anybody still wants what it computes. So clients share the
machine by tokens, and nothing is computed for a client that has gone.

transformers' continuous batching is not used: it has one set of sampling parameters for all clients, no seed and no
stop string of theirs, takes most of the machine's memory at once, and was no faster (docs/SERVING.md).
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
from ktconvert.pipeline.models.serving import clients, request_options
from ktconvert.pipeline.models.serving.errors import ending
from ktconvert.pipeline.models.serving.fair_lock import FairLock
from ktconvert.pipeline.models.serving.stream_decoder import StreamDecoder, Written, read_answers_of
from ktconvert.pipeline.models.writing import in_parts

ACTIVE = 4  # generations that have begun and hold keys and values of what they read; others wait, holding ids only
PATIENCE = 1.0  # seconds


class Ended(Exception):
    """Thrown through what computes: nobody wants it any more, or it is done before its time."""


class ClientWatch:
    """Whether anybody still waits for what a request has computed."""

    def __init__(self) -> None:
        """In a request's context, it knows when the client goes."""
        self._gone = False
        clients.when_gone(self.cancel)

    def cancel(self) -> None:
        """Nobody does."""
        self._gone = True

    def check(self) -> None:
        """Raises Ended if nobody does."""
        if self._gone:
            raise Ended


class Answer(ClientWatch):
    """What one request is being answered: the streamer of `model.generate`.

    say    gets each piece of the answer, in the generating thread
    whole  whether it has come to its end
    """

    def __init__(self, pieces: StreamDecoder, say: Callable[[Any], None]) -> None:
        super().__init__()
        self.pieces, self.say = pieces, say
        self.whole = False
        self.ids = Written()
        self.ids.ends, self.ids.stop = tuple(pieces.ends), pieces.stop
        self._prompt = True  # is what `put` gets first

    @property
    def total_tokens(self) -> int:
        """As the handlers of transformers' server ask for it."""
        return len(self.ids)

    def put(self, tokens: torch.Tensor) -> None:
        """A new token [1]; before the first one, the prompt [1, T]. Raises Ended after a stop string."""
        if self._prompt:
            self._prompt = False
            return
        for token in tokens.tolist():
            self.ids.append(token)
            for piece in self.pieces.put(token):
                self.say(piece)
        if self.pieces.stopped:
            self.whole = True
            raise Ended

    def end(self) -> None:
        """For `model.generate`; what was held back is said by `Turns`, since cancelled answers have an end too."""


class Scheduler(utils.BaseGenerateManager):
    """Generates for the handlers of transformers' server; everything else that computes with the model goes through
    `submit`, too.

    It is asked from the event loop, and computes in `active` threads. What a generation raises becomes an error in its
    stream, or is raised by generate_non_streaming. A cancelled one ends with what it has.
    """

    def __init__(self, model: Any, processor: Any, active: int = ACTIVE) -> None:
        self.model = model
        self.processor = copy.deepcopy(processor)  # a fast tokenizer cannot encode while another thread decodes
        self._line = FairLock()
        self._jobs: queue.SimpleQueue[tuple[ClientWatch, Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._mine = threading.local()  # .wanted: what this thread computes for
        self._stopping = False
        self._random: Any = torch.cuda if model.device.type == "cuda" else torch
        read_answers_of(processor, model)
        model.register_forward_pre_hook(self._before_pass)
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.register_forward_pre_hook(self._check)
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"turns-{i}") for i in range(active)]
        for thread in self._threads:
            thread.start()

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Theirs, with what was asked for beside it: a queue of pieces, of which the last is None, and the streamer."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def say(piece: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before us
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def run() -> None:
            try:
                self._generate(answer, inputs, gen_config, wish)
                say(None)
            except Exception as error:
                say(utils._StreamError(str(error)))

        wish, answer = request_options.of(request_id), self._answer(gen_config, response_parser, say)
        self.submit(answer, run)
        return pieces, answer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Theirs: the text, the number of tokens of the prompt, and the new ids."""
        said: list[str] = []
        wish, answer = request_options.of(request_id), self._answer(gen_config, None, said.append)
        await self.done(answer, lambda: self._generate(answer, inputs, gen_config, wish))
        length = inputs["input_ids"].shape[-1] if wish.ids is None else len(wish.ids)
        return "".join(said), length, answer.ids

    def wanted(self) -> ClientWatch:
        """By the client of this request, until it goes."""
        return ClientWatch()

    def ends(self, config: Any) -> Sequence[int]:
        """The ids that end an answer by this generation config."""
        own = self.model.generation_config.eos_token_id
        return _listed(own if config.eos_token_id is None else config.eos_token_id)

    def submit(self, wanted: ClientWatch, work: Callable[[], Any]) -> Future[Any]:
        """Have `work` done in its turn. Its passes through the model raise Ended when nobody wants it any more."""
        future: Future[Any] = Future()
        self._jobs.put((wanted, work, future))
        return future

    async def done(self, wanted: ClientWatch, work: Callable[[], Any]) -> Any:
        """What `work` gives, or raises, in its turn. Nobody wants it any more when this is cancelled."""
        try:
            return await asyncio.wrap_future(self.submit(wanted, work))
        finally:
            wanted.cancel()

    def interrupt(self) -> None:
        """Have all that is computed end at its next layer. Safe in a signal handler, which a lock would not be."""
        self._stopping = True

    def stop(self) -> None:
        """Interrupt, and wait some time for the layers that are being computed: it is better if no thread is in the
        midst of one when the interpreter ends.
        """
        self.interrupt()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(PATIENCE / len(self._threads))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._mine.wanted, work, future = job
            if future.set_running_or_notify_cancel():
                try:
                    with self._line:
                        result = work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            self._mine.wanted = None
            del job, work, future  # with the prompt and the answer, while this thread waits for the next one

    def _answer(self, config: Any, parser: Any, say: Callable[[Any], None]) -> Answer:
        return Answer(StreamDecoder(self.processor, parser, self.ends(config), _listed(config.stop_strings)), say)

    def _generate(self, answer: Answer, inputs: Any, config: Any, wish: request_options.RequestOptions) -> None:
        """Generate until the end, or until nobody waits. Raises Refused if the server ends before it does."""
        config = copy.deepcopy(config)
        config.stop_strings = None  # Pieces knows them, without a table of the tokens that they may begin in
        if config.pad_token_id is None:
            config.pad_token_id = (*_listed(config.eos_token_id), 0)[0]
        if wish.ids is not None:
            ids = torch.tensor([wish.ids], device=self.model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        in_parts(self.model, config, inputs)
        more: dict[str, Any] = {"logits_processor": wish.processors(inputs["input_ids"].shape[-1])}
        if hasattr(self.model, "has_talker"):
            more["generation_mode"] = "text"
        torch.manual_seed(secrets.randbits(63) if wish.seed is None else wish.seed)
        with contextlib.suppress(Ended):
            self._check()
            self.model.generate(**inputs, **more, generation_config=config, streamer=answer)
            answer.whole = True
        if self._stopping and not answer.whole:
            raise ending()
        for piece in answer.pieces.end():
            answer.say(piece)
        wish.cut = not answer.pieces.ended

    def _check(self, *_: Any) -> None:
        """Raises Ended in a thread whose work nobody waits for."""
        wanted = getattr(self._mine, "wanted", None)
        if wanted is not None:
            if self._stopping:
                raise Ended
            wanted.check()

    def _before_pass(self, *_: Any) -> None:
        """Let those that wait have their turn, and come back. A seed is a client's own, whoever else draws numbers."""
        self._check()
        if getattr(self._mine, "wanted", None) is not None and self._line.awaited():
            state = self._random.get_rng_state()
            self._line.step_back()
            self._random.set_rng_state(state)
            self._check()


def _listed(value: Any) -> Sequence[Any]:
    """One, several or none."""
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


class OneByOne(utils.GenerationState):
    """What the handlers ask for somebody who generates."""

    def __init__(self, turns: Scheduler) -> None:
        super().__init__()
        self.turns = turns

    def get_manager(self, model_id: str, use_cb: bool = False) -> Scheduler:
        """The same for all requests."""
        return self.turns

    def shutdown(self) -> None:
        """With the server."""
        self.turns.stop()
