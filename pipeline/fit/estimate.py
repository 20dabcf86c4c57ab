"""The prediction: from the sizes of a model and a machine to the choices that fit, without reading or measuring.

Sizes are in bytes, rates in bytes per second, times in seconds. docs/explanation/fit.md states where each constant
comes from, and how far the predictions were from published reports.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ktconvert.layouts.checkpoints.attention import NO_ATTENTION, AttentionBytes, LayerCache
from ktconvert.pipeline.options.queries import PREFERENCES, RUNTIMES
from ktconvert.pipeline.report.text import plural, size

SGLANG, KTCONVERT = RUNTIMES
QUALITY = PREFERENCES[0]

SERVER_MEMORY = 4 << 30  # of a server that uses a GPU: Python, torch, libraries and pinned buffers; an estimate
OWN_SERVER_MEMORY = 480_000_000  # of `ktconvert serve` without a GPU: Python, torch, transformers; measured
CARD_MEMORY = 1 << 30  # of CUDA's context and graphs, on each card
PREFILL_TOKENS = {SGLANG: 4096, KTCONVERT: 512}  # that a server computes together
BF16 = 2  # bytes
ACTIVATIONS = 12  # vectors of the hidden size that a token of a prefill needs, in BF16
# Of the queries (projected, with positions, joined) and results (of each piece, joined, in the order of tokens).
ATTENTION_COPIES = 3
MASK = 4  # bytes for each pair of a prefill's token and a key: two masks of booleans, and one in BF16
COMPARED = 16  # bytes for each weight of a linear while a start compares experts: gate, up, down and a copy in float32
# Largest memory of the experts' rows and of their float32 outputs (ROWS_BUDGET and SECTIONS_BUDGET in moe.c).
EXPERT_ROWS, EXPERT_OUTPUTS = 256 << 20, 16 << 20
CPU_SHARE = 0.8  # of a bandwidth that was given; an estimate: vendors state what no program reads, and cores decode
# Of the bandwidth that a loop reads which does nothing else. Decoding is not part of it: it limits a core (core_rate).
READ_SHARE = 0.95
GPU_SHARE = 0.7  # of the bandwidth of a card's memory
LAYER_SECONDS = 1.2e-4  # for each layer with experts: hand over to the CPU and back (H100, CUDA graphs)
TORCH_LAYER_SECONDS = 1e-3  # for each layer that torch computes without CUDA graphs
CORE_CONVERSION = 0.6e9  # bytes of the source that a core converts
DISK_RATE = 1e9  # bytes that a disk reads or writes
USUAL_CONTEXT = 32768  # tokens of a sequence
SIMILAR_SPEED, SIMILAR_LOSS = 1.05, 1.25  # ratios of values that count as equal
CONVERSION_GAIN = 1.25  # least ratio of speeds that is worth a conversion, with its time and disk
NO_LOSS = 0.001  # nats; arithmetic alone causes 0.0002 to 0.0006


@dataclass(frozen=True)
class ExpertForm:
    """A form in which the CPU computes the routed experts.

    option      value of `cpu --quant-method`; "" for the weights as they are
    method      name of the runtime's method
    scale       value of `cpu --scale`
    expert      bytes of one expert in memory, by layer with experts
    disk        bytes of the output; 0 if nothing is written
    loss        expected mean KL divergence from the checkpoint, in nats
    core_rate   bytes of these weights that a core reads and computes at one token
    sliced      whether the output is for one number of NUMA nodes
    refusal     why the machine or the model rules it out; "" if nothing does
    """

    option: str
    method: str
    scale: str
    expert: tuple[int, ...]
    disk: int
    loss: float
    core_rate: float
    sliced: bool = False
    refusal: str = ""

    @property
    def name(self) -> str:
        return self.option or f"as it is ({self.method})"


@dataclass(frozen=True)
class RestForm:
    """A form of the rest of the model, and of the experts on the GPU.

    name      "published", "W4A16", "BF16", or "no experts", which leaves all of them to the CPU
    rest      bytes of all tensors that are not routed experts
    token     those of them that each token reads: not the rows of an embedding
    expert    bytes of one expert, by layer with experts; () if there are none
    disk      bytes of the output; 0 if nothing is written
    loss      as of ExpertForm, if all experts were on the GPU
    download  bytes to download of a checkpoint that is not the model itself
    """

    name: str
    rest: int
    token: int
    expert: tuple[int, ...]
    disk: int = 0
    loss: float = 0.0
    download: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A model, as headers and config describe it.

    experts       number of experts, by layer with experts
    topk          experts per token
    topk_from     origin of that number
    layers        number of all decoder layers
    forms, rests  forms of the CPU's experts, and of the rest
    caches        cache of each decoder layer; () if the config does not describe it
    routed_bytes  stored bytes of the routed experts, which a conversion reads
    positions     largest number of tokens of a sequence; None if the config does not state it
    attention     bytes of a token's vectors in one layer's attention
    width         largest intermediate size of an expert
    download      bytes to download first, unless the experts can be streamed
    window_bytes  disk for the files that a streamed conversion holds; 0 if the experts cannot be streamed
    """

    experts: tuple[int, ...]
    topk: int
    topk_from: str
    layers: int
    hidden: int
    vocabulary: int
    forms: tuple[ExpertForm, ...]
    rests: tuple[RestForm, ...]
    caches: tuple[LayerCache, ...]
    routed_bytes: int
    positions: int | None = None
    attention: AttentionBytes = NO_ATTENTION
    width: int = 0
    download: int = 0
    window_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """A machine.

    vram       memory of each GPU
    bandwidth  read bandwidth of memory, and of one GPU's memory
    cores      physical cores, with which the bandwidth was measured; None: it was given
    """

    ram: int
    vram: tuple[int, ...]
    numa: int
    disk: int
    bandwidth: float
    gpu_bandwidth: float
    cores: int | None = None


@dataclass(frozen=True)
class Use:
    """The use of the model: tokens of a sequence, sequences at a time, the runtime, and the preference."""

    context: int = USUAL_CONTEXT
    sequences: int = 1
    runtime: str = SGLANG
    prefer: str = QUALITY


@dataclass(frozen=True)
class Choice:
    """A prediction for one form of the CPU's experts and one of the rest.

    gpu_experts  number of experts on the GPU, in each layer
    ram, vram    parts -> bytes; vram of one card, {} without a card
    loss         as of ExpertForm, of the CPU's and the GPU's experts by their numbers
    problem      why it does not fit; "" if it fits
    limit        why one more expert per layer, or the next step, does not fit
    streamed     whether only the rest of the model is downloaded to disk, and the experts are streamed
    """

    form: ExpertForm
    rest: RestForm
    gpu_experts: int
    ram: dict[str, int]
    vram: dict[str, int]
    disk: int
    seconds: float
    tokens_per_second: float
    loss: float
    problem: str
    limit: str
    streamed: bool

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram.values())

    @property
    def vram_bytes(self) -> int:
        return sum(self.vram.values())


@dataclass(frozen=True)
class Predictor:
    """Predictions for one model, machine and use."""

    shape: ModelShape
    machine: Machine
    use: Use

    @cached_property
    def cards(self) -> int:
        """Number of GPUs that share each layer: SGLang divides tensors, our own runtime uses one card."""
        return min(1, len(self.machine.vram)) if self.use.runtime == KTCONVERT else len(self.machine.vram)

    @cached_property
    def card(self) -> int:
        """Memory of the card that decides."""
        choose: Callable[[Iterable[int]], int] = max if self.use.runtime == KTCONVERT else min
        return choose(self.machine.vram) if self.cards else 0

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of all sequences' caches on one card, or in main memory."""
        cards = max(1, self.cards)
        sizes = (-(-cache.bytes_of(self.use.context) // min(cards, cache.heads)) for cache in self.shape.caches)
        return self.use.sequences * sum(sizes)

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of a prefill, and of the logits; on the CPU at least those of the start."""
        shape = self.shape
        tokens = PREFILL_TOKENS[self.use.runtime] if self.cards else min(PREFILL_TOKENS[KTCONVERT], self.use.context)
        activations = tokens * ACTIVATIONS * BF16 * shape.hidden
        buffers = 0  # the largest, as each is freed before the next one is allocated
        if not self.cards:
            start = COMPARED * shape.hidden * shape.width
            buffers = max(start, self._attention_buffers(tokens), self._expert_buffers(tokens))
        return activations + buffers + 4 * shape.vocabulary * (self.use.sequences + 1)

    def _attention_buffers(self, tokens: int) -> int:
        """Return what attention needs on the CPU beside the cache, for the last tokens of a prompt."""
        attention, context = self.shape.attention, self.use.context
        copies = ATTENTION_COPIES * (attention.query + attention.result) * tokens
        grown = max((cache.bytes_of(context) for cache in self.shape.caches), default=0)  # a layer's, while it is moved
        return copies + (MASK * tokens + attention.expanded + attention.repeated) * context + grown

    def _expert_buffers(self, tokens: int) -> int:
        """Return what the CPU's kernels need for the rows of all experts."""
        rows, hidden = tokens * self.shape.topk, self.shape.hidden
        return min(EXPERT_ROWS, BF16 * rows * (hidden + self.shape.width)) + min(EXPERT_OUTPUTS, 4 * rows * hidden)

    def predict(self, form: ExpertForm, rest: RestForm) -> Choice:
        """Return the prediction; sizes are 0 for a form that is refused."""
        fixed = self._list_fixed_vram(rest)
        count = self._count_gpu_experts(rest, sum(fixed.values())) if self.cards and rest.expert else 0
        vram = {**fixed, "experts": self._gpu_bytes(rest, count)} if self.cards else {}
        process = SERVER_MEMORY if self.cards else OWN_SERVER_MEMORY
        ram = {"process": process, "experts": self._cpu_bytes(form, count)}
        if not self.cards:
            ram |= {"rest": rest.rest, "cache": self.cache_bytes, "buffers": self.buffer_bytes}
        # Only if all experts are in the CPU's output, no other step needs them.
        streamed = bool(self.shape.window_bytes and form.disk and not rest.disk and not count)
        download = rest.rest + self.shape.window_bytes if streamed else self.shape.download + rest.download
        disk = form.disk + rest.disk + download
        return Choice(
            form,
            rest,
            count,
            ram,
            vram,
            disk,
            self._conversion_seconds(form, rest),
            1 / self._token_seconds(form, rest, count),
            self._mix_losses(form, rest, count),
            form.refusal or self._explain_problem(sum(ram.values()), vram, disk),
            self._explain_limit(rest, count, vram),
            streamed,
        )

    def _list_fixed_vram(self, rest: RestForm) -> dict[str, int]:
        """Return what one card needs beside experts."""
        if not self.cards:
            return {}
        trunk = -(-rest.rest // self.cards)
        return {"context": CARD_MEMORY, "rest": trunk, "cache": self.cache_bytes, "buffers": self.buffer_bytes}

    def _gpu_bytes(self, rest: RestForm, count: int) -> int:
        """Return the bytes of `count` experts of each layer on one card."""
        if not rest.expert:
            return 0
        pairs = zip(self.shape.experts, rest.expert, strict=True)
        return -(-sum(min(count, experts) * nbytes for experts, nbytes in pairs) // self.cards)

    def _cpu_bytes(self, form: ExpertForm, count: int) -> int:
        pairs = zip(self.shape.experts, form.expert, strict=True)
        return sum(max(0, experts - count) * nbytes for experts, nbytes in pairs)

    def _count_gpu_experts(self, rest: RestForm, fixed: int) -> int:
        """Return the largest number of experts per layer for which one card has room; 0 if it has none."""
        counts = range(1, max(self.shape.experts) + 1)
        return bisect.bisect_right(counts, self.card - fixed, key=lambda count: self._gpu_bytes(rest, count))

    def _token_seconds(self, form: ExpertForm, rest: RestForm, count: int) -> float:
        """Return the time of one token, at the start of a sequence. Experts on the GPU get tokens by their number."""
        machine = self.machine
        cpu_rate = predict_cpu_rate(form, machine.bandwidth, machine.cores)
        seconds = 0.0
        gpu_experts = rest.expert or (0,) * len(form.expert)
        for experts, cpu_bytes, gpu_bytes in zip(self.shape.experts, form.expert, gpu_experts, strict=True):
            hot = min(count, experts) / experts
            used = min(self.shape.topk, experts)
            on_cpu = used * (1 - hot) * cpu_bytes / cpu_rate
            on_gpu = used * hot * gpu_bytes / self._gpu_rate() if self.cards else 0.0
            seconds += max(on_cpu, on_gpu) + (LAYER_SECONDS if self.cards and hot < 1 else 0.0)
        if self.use.runtime == KTCONVERT:
            seconds += TORCH_LAYER_SECONDS * self.shape.layers
        return seconds + rest.token / (self._gpu_rate() if self.cards else CPU_SHARE * machine.bandwidth)

    def _mix_losses(self, form: ExpertForm, rest: RestForm, count: int) -> float:
        hot = sum(min(count, experts) for experts in self.shape.experts) / sum(self.shape.experts)
        return (1 - hot) * form.loss + hot * rest.loss

    def _gpu_rate(self) -> float:
        return GPU_SHARE * self.machine.gpu_bandwidth * self.cards

    def _conversion_seconds(self, form: ExpertForm, rest: RestForm) -> float:
        """Return the time of converting, without calibration, downloads and checks; 0 if nothing is written."""
        seconds = 0.0
        for written, read in ((form.disk, self.shape.routed_bytes), (rest.disk, self.shape.routed_bytes + rest.rest)):
            if written:
                seconds += max(read / (CORE_CONVERSION * (self.machine.cores or 16)), (read + written) / DISK_RATE)
        return seconds

    def _explain_problem(self, ram: int, vram: dict[str, int], disk: int) -> str:
        machine = self.machine
        if vram and sum(vram.values()) > self.card:
            parts = ", ".join(f"{part} {size(nbytes)}" for part, nbytes in vram.items() if nbytes)
            needed = size(sum(vram.values()))
            return f"needs {needed} of memory on each GPU ({parts}), and a GPU has {size(self.card)}"
        for name, needed_bytes, available in (("RAM", ram, machine.ram), ("free disk space", disk, machine.disk)):
            if needed_bytes > available:
                return f"needs {size(needed_bytes)} of {name}, and the machine has {size(available)}"
        return ""

    def _explain_limit(self, rest: RestForm, count: int, vram: dict[str, int]) -> str:
        if not vram:
            return "no GPU: all experts are on the CPU"
        if not rest.expert:
            return "all experts are on the CPU: a GPU cannot compute those of a GGUF, and the rest has none"
        if count >= max(self.shape.experts):
            return "all experts are on the GPU"
        more = self._gpu_bytes(rest, count + 1) - vram["experts"]
        free = max(0, self.card - sum(vram.values()))
        needed = f"{plural(count + 1, 'expert')} of each layer on the GPU would take {size(more)} more"
        return f"{needed}, and {size(free)} are free on each GPU"


def predict_cpu_rate(form: ExpertForm, bandwidth: float, cores: int | None) -> float:
    """Return the bytes per second of these weights that the CPU computes at one token.

    cores  number of those that reached the bandwidth when it was measured; None: it was given
    """
    return CPU_SHARE * bandwidth if cores is None else min(READ_SHARE * bandwidth, form.core_rate * cores)


def list_choices(shape: ModelShape, machine: Machine, use: Use) -> list[Choice]:
    """Return all choices, the preferred first; those that do not fit come last."""
    predictor = Predictor(shape, machine, use)
    choices = [predictor.predict(form, rest) for form in shape.forms for rest in shape.rests]
    gain = CONVERSION_GAIN if use.prefer == QUALITY else 1.0
    times = [(gain if choice.form.disk else 1) / choice.tokens_per_second for choice in choices]
    speeds = _rank_values(times, SIMILAR_SPEED)
    losses = _rank_values([max(choice.loss, NO_LOSS) for choice in choices], SIMILAR_LOSS)

    def rank(number: int) -> tuple[float, ...]:
        """Return the sort key. Equal choices: first with fewer conversions, then with the faster kernels."""
        choice = choices[number]
        loss, speed = losses[number], speeds[number]
        conversions = bool(choice.form.disk) + bool(choice.rest.disk)
        by_preference: dict[str, tuple[float, float]] = {
            "quality": (loss, speed),
            "speed": (speed, loss),
            "memory": (choice.ram_bytes, loss),
        }
        idle = any(_is_idle(choice, other) for other in choices)
        rest = conversions, -choice.form.core_rate, choice.disk
        return bool(choice.problem), idle, *by_preference[use.prefer], *rest

    return [choices[number] for number in sorted(range(len(choices)), key=rank)]


def _is_idle(choice: Choice, other: Choice) -> bool:
    """Return whether a choice converts the rest of the model and is hardly faster than one without, or downloads more.

    Whoever has a GGUF wants to avoid the download of all experts.
    """
    if other.form is not choice.form or other.problem:
        return False
    if choice.rest.download != other.rest.download:
        return choice.rest.download > other.rest.download
    is_faster = choice.tokens_per_second > SIMILAR_SPEED * other.tokens_per_second
    return choice.rest.disk > other.rest.disk and not is_faster


def _rank_values(values: Sequence[float], ratio: float) -> list[int]:
    """Return the rank of each value, the smallest first. A value that exceeds another by less has the same rank."""
    ranks = [0] * len(values)
    smallest, rank = 0.0, 0
    for number in sorted(range(len(values)), key=values.__getitem__):
        if values[number] > ratio * smallest:
            smallest, rank = values[number], rank + 1
        ranks[number] = rank
    return ranks
