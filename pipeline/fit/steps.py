"""The commands of a choice: download, convert, choose hot experts, verify, and start the server."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ktconvert.layouts.outputs import launch
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.url_headers import URL
from ktconvert.pipeline.fit.estimate import KTCONVERT, NO_LOSS, QUALITY, Choice, Machine, Use
from ktconvert.quantizers.quantizer import ABSMAX


class Step(NamedTuple):
    """A command of a setup, and the path that it writes; "" if it writes none."""

    name: str
    command: str
    output: str = ""


@dataclass(frozen=True)
class Names:
    """Names in the commands of a model.

    model            what the user gave: a path or a hub id
    stem             beginning of the names of outputs
    is_local         whether the model must not be downloaded
    rest             checkpoint that provides the rest of the model; the model itself, unless it is a GGUF
    revision         branch, tag or commit of a hub id
    arch_file        value of --arch-file
    config           value of --config: for a GGUF, the model that provides the rest, a path or a hub id
    config_revision  commit of that hub id
    shared_experts   whether the model has them
    """

    model: str
    stem: str
    is_local: bool
    rest: str
    revision: str | None = None
    arch_file: Path | None = None
    config: str | None = None
    config_revision: str | None = None
    shared_experts: bool = True

    @property
    def source(self) -> str:
        """The path of the model, once it is here."""
        if self.is_local:
            return self.model
        file = "" if URL.fullmatch(self.model) else self.model.partition(":")[2]
        return f"{self.stem}/{file}" if file else self.stem

    @property
    def arch(self) -> tuple[object, ...]:
        """The option of commands that recognize the model."""
        return () if self.arch_file is None else ("--arch-file", self.arch_file)

    @property
    def fetched(self) -> str | None:
        """The model of the hub that provides the rest of a GGUF; None if that is here."""
        return None if self.config == self.rest else self.config

    @property
    def conversion(self) -> tuple[object, ...]:
        """The options of a conversion of the experts."""
        return (*(() if self.config is None else ("--config", self.rest)), *self.arch)


def find_stem(model: str) -> str:
    """Return the beginning of the names of a model's outputs."""
    return Path(model.rpartition(":")[2]).expanduser().resolve().name.removesuffix(".gguf")


def list_steps(choice: Choice, names: Names, machine: Machine, use: Use) -> Iterator[Step]:
    """Yield the steps in the order in which a user runs them."""
    if names.fetched is not None and choice.rest.expert:
        names = replace(names, rest=f"{find_stem(names.fetched)}-original")
    yield from _download(choice, names)
    source, options = _locate_source(choice, names)
    weights, form = source, choice.form
    if form.option:
        weights = f"{names.stem}-{form.method}"
        scale = () if form.scale == ABSMAX.name else ("--scale", form.scale)
        slices = ("--numa", machine.numa) if form.sliced else ()
        words = (source, "-o", weights, "--quant-method", form.option, *scale, *slices, *options, *names.conversion)
        yield Step("convert", _join("ktconvert cpu -i", *words), weights)
        yield Step("verify", _verify(weights, None if choice.streamed else names.source, names))
    rest = names.rest
    if choice.rest.disk:
        rest = f"{names.stem}-{choice.rest.name}"
        kind = ("--quant-method", "RTN", "--quant-type", choice.rest.name)
        yield Step("convert for the GPU", _join("ktconvert gpu -i", names.rest, "-o", rest, *kind, *names.arch), rest)
    hot = "hot.safetensors" if use.runtime == KTCONVERT else "hot.json"
    if _has_hot_experts(choice):
        yield from _choose_hot_experts(choice, names, hot, use)
    yield Step("launch", _launch(choice, rest, weights, hot, machine, use, names.shared_experts))


def _download(choice: Choice, names: Names) -> Iterator[Step]:
    revision = _pin(names.revision)
    if choice.streamed:
        yield _fetch_rest(names.model, names.stem, revision)
    elif URL.fullmatch(names.model):
        yield Step("download", f"mkdir -p {shlex.quote(names.stem)}  # and copy all files of {names.model} into it")
    elif not names.is_local:
        repository, _, file = names.model.partition(":")
        files = hub.list_parts(PurePosixPath(file)) if file else []
        yield _download_files("download", repository, files, names.stem, revision)
    if names.fetched is not None:
        pin = _pin(names.config_revision)
        if choice.rest.expert:
            yield _download_files("download the original", names.fetched, [], names.rest, pin)
        else:
            yield _fetch_rest(names.fetched, names.rest, pin)


def _download_files(name: str, repository: str, files: list[str], folder: str, revision: tuple[str, ...]) -> Step:
    return Step(name, _join("hf download", repository, *files, "--local-dir", folder, *revision), folder)


def _fetch_rest(model: str, folder: str, revision: tuple[str, ...]) -> Step:
    return Step("download the rest", _join("ktconvert fetch", model, "-o", folder, *revision), folder)


def suggest_comparison(choice: Choice, names: Names) -> str | None:
    """Return the comparison with a streamed source, which downloads it a second time; None if a step does it."""
    return _verify(f"{names.stem}-{choice.form.method}", names.model, names) if choice.streamed else None


def _verify(weights: str, source: str | None, names: Names) -> str:
    against = () if source is None else ("--against", source, *names.arch)
    revision = () if source in (None, names.source) else _pin(names.revision)
    return _join("ktconvert verify", weights, *against, *revision)


def suggest_map(choice: Choice, names: Names, machine: Machine, use: Use) -> str | None:
    """Return the conversion with a method for each layer, in the memory that a choice leaves; None if it cannot help.

    It can if the next better method does not fit.
    """
    can_help = use.prefer == QUALITY and choice.form.option and choice.loss > NO_LOSS
    if not can_help or choice.gpu_experts:
        return None
    budget = machine.ram - choice.ram_bytes + choice.ram["experts"]
    source, options = _locate_source(choice, names)
    words = (source, "-o", f"{names.stem}-mixed", "--method-map", "auto", "--ram", budget, "--numa", machine.numa)
    return _join("ktconvert cpu -i", *words, *options, *names.conversion)


def _locate_source(choice: Choice, names: Names) -> tuple[str, tuple[str, ...]]:
    """Return the input of conversions and verifications, and their options for it."""
    return (names.model, (*_pin(names.revision), "--stream")) if choice.streamed else (names.source, ())


def _choose_hot_experts(choice: Choice, names: Names, hot: str, use: Use) -> Iterator[Step]:
    statistics = f"{names.stem}-statistics"
    yield Step(
        "count tokens", _join("ktconvert calibrate", names.rest, "--output", statistics, *names.arch), statistics
    )
    form = "mask" if use.runtime == KTCONVERT else "sglang"
    number = ("--num-gpu-experts", choice.gpu_experts)
    yield Step(
        "choose hot experts",
        _join("ktconvert experts", statistics, "--format", form, "--output", hot, *number),
        hot,
    )


def _launch(choice: Choice, rest: str, weights: str, hot: str, machine: Machine, use: Use, shared_experts: bool) -> str:
    if use.runtime == KTCONVERT:
        cpu_weights = () if weights == rest else ("--cpu-weights", weights)
        number = ("--num-gpu-experts", choice.gpu_experts) if choice.gpu_experts else ()
        mask = ("--gpu-experts-mask", hot) if _has_hot_experts(choice) else number
        return _join("ktconvert serve", rest, *cpu_weights, *mask)
    experts = f"--kt-num-gpu-experts {choice.gpu_experts}"
    placement = launch.place_experts(Path(hot), experts, by_counts=False) if _has_hot_experts(choice) else (experts,)
    cores = machine.cores or launch.CORES
    method, slices = choice.form.method, machine.numa
    options = launch.make_options(rest, weights, method, slices, placement, cores, shared_experts=shared_experts)
    cards = len(machine.vram)
    sizes = (*((f"--tp-size {cards}",) if cards > 1 else ()), f"--context-length {use.context}")
    return launch.join_command((*options, *sizes, f"--max-running-requests {use.sequences}"))


def _has_hot_experts(choice: Choice) -> bool:
    """Return whether some of the experts are on the GPU, so that it matters which."""
    return bool(choice.gpu_experts and choice.ram["experts"])


def _pin(revision: str | None) -> tuple[str, ...]:
    """Return the option for a branch, tag or commit."""
    return ("--revision", revision) if revision else ()


def _join(command: str, *words: object) -> str:
    return f"{command} {shlex.join(map(str, words))}"
