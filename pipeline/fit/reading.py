"""Opening a model for a prediction: a path, or the headers of a model of the hub."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ktconvert.layouts.checkpoints.arch_file import list_archs
from ktconvert.layouts.checkpoints.archs import Arch
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import launch
from ktconvert.layouts.outputs.opening import require_checkpoint, require_directory
from ktconvert.layouts.sources import hub_headers
from ktconvert.layouts.sources.source import TensorSource, locate_checkpoint, open_checkpoint
from ktconvert.pipeline.fit.estimate import ModelShape, RestForm
from ktconvert.pipeline.fit.model_shape import find_rest, list_rests, read_shape, remove_experts
from ktconvert.pipeline.fit.steps import Names, find_stem
from ktconvert.pipeline.options.queries import FitOptions, UpOptions


class NamedShape(NamedTuple):
    """The shape of a model, and its names in commands.

    notes  sentences on what the user should know about the files
    """

    shape: ModelShape
    names: Names
    notes: tuple[str, ...]


def read_model(options: FitOptions | UpOptions, numa: int, runtime: str, *, pinned: bool) -> NamedShape:
    """Read the shape of a checkpoint from its headers.

    pinned  commands name the commits that the hub has now

    Raises InputError, UnsupportedError and UsageError as `cpu` does.
    """
    name, revision, arch_file = options.model, options.hub.revision, options.arch.arch_file
    gc.disable()  # hundreds of thousands of records without cycles: the collector would take half of the time
    try:
        path, remote, note = locate_checkpoint(name, revision, streamed=True)
        if remote is None:
            require_checkpoint(path, "give the model that they were made from")
        with open_checkpoint(path, config=options.config) as source:
            if remote is None and not source.container.experts_only:
                require_directory(path)  # the printed commands read a whole model
            archs = list_archs(options.arch.load_text())
            model = recognize(source, archs)
            if source.config.get("is_encoder_decoder"):
                raise UnsupportedError(f"{name}: has an encoder, and fit takes only decoders; convert it with cpu")
            download = sum(shard.size for shard in source.shards) if remote else 0
            names = Names(name, find_stem(name), remote is None, name, revision, arch_file)
            rests: tuple[RestForm, ...] = ()
            names = replace(names, shared_experts=model.has_shared_experts)
            if source.container.experts_only:
                names = _name_rest(names, source, options.config, pinned=pinned)
                rests = _read_rests(model, options.config, archs, runtime)
                note = note or _explain_rest(name, options.config)
            elif remote is not None:
                names = replace(names, rest=names.stem)
            shape = read_shape(model, numa, runtime, download, rests)
        if arch_file is not None:
            shape = replace(shape, window_bytes=0)  # `fetch` takes no --arch-file
        if pinned:
            names = replace(names, revision=remote.sha if isinstance(remote, hub_headers.Commit) else None)
        return NamedShape(shape, names, tuple(each for each in (note, *source.notes) if each))
    finally:
        gc.enable()


def _name_rest(names: Names, source: TensorSource, config: str | None, *, pinned: bool) -> Names:
    """Return the names with those of the model that provides the rest of a GGUF."""
    if config is None:
        return replace(names, rest=launch.ORIGINAL)
    if Path(config).exists():
        return replace(names, rest=config, config=config)
    commit = source.companion_root.name if pinned else None  # a snapshot in the hub's cache
    return replace(names, rest=f"{find_stem(config)}-rest", config=config, config_revision=commit)


def _read_rests(gguf: MoeModel, config: str | None, archs: Sequence[Arch], runtime: str) -> tuple[RestForm, ...]:
    """Return the forms of the rest of a GGUF: those of the model that --config names, if it has experts for a GPU.

    Raises InputError for a directory without weights, and for a model with other experts.
    """
    without_experts = next(list_rests(gguf, runtime))
    if config is None:
        return (without_experts,)
    is_here = Path(config).exists()
    with open_checkpoint(config if is_here else locate_checkpoint(config, None, streamed=True).path) as source:
        try:
            original = recognize(source, archs)
        except (InputError, UnsupportedError):  # such as an output of `fetch`
            return (without_experts if is_here else replace(without_experts, download=without_experts.rest),)
        if {layer: gguf.shape(layer) for layer in gguf.layers} != {n: original.shape(n) for n in original.layers}:
            problem = f"its experts differ from those of {gguf.source.root}"
            raise InputError(f"--config {config}: {problem}; name the model that the GGUF was made from")
        forms = [*list_rests(original, runtime)]
        if is_here:
            return tuple(forms)
        download = sum(shard.size for shard in source.shards)
        fetched = replace(remove_experts(forms[0]), download=sum(info.nbytes for info in find_rest(original)))
        return fetched, *(replace(form, download=download) for form in forms)


def _explain_rest(name: str, config: str | None) -> str:
    """Return a note on a GGUF whose commands are incomplete."""
    if config is not None:
        return ""
    problem = "a GGUF has only the experts in usable form, and no GPU can compute them here"
    return f"{name}: {problem}; --config MODEL names the model for everything else"
