"""Opening a model for a prediction: a path, or the headers of a model of the hub."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import launch
from ktconvert.layouts.sources import hub_headers
from ktconvert.layouts.sources.source import TensorSource, locate_checkpoint, open_checkpoint
from ktconvert.pipeline.fit.estimate import ModelShape
from ktconvert.pipeline.fit.model_shape import read_shape
from ktconvert.pipeline.fit.steps import Names, find_stem
from ktconvert.pipeline.options.queries import FitOptions, UpOptions
from ktconvert.pipeline.plans.checkpoint import arch_table


class NamedShape(NamedTuple):
    """The shape of a model, and its names in commands.

    note  what the user should know about the headers; "" if nothing
    """

    shape: ModelShape
    names: Names
    note: str


def read_model(options: FitOptions | UpOptions, numa: int, runtime: str, *, pinned: bool) -> NamedShape:
    """Read the shape of a checkpoint from its headers.

    pinned  commands name the commits that the hub has now

    Raises InputError, UnsupportedError and UsageError as `cpu` does.
    """
    name, revision, arch_file = options.model, options.hub.revision, options.arch.arch_file
    gc.disable()  # hundreds of thousands of records without cycles: the collector would take half of the time
    try:
        path, remote, note = locate_checkpoint(name, revision, streamed=True)
        with open_checkpoint(path, config=options.config) as source:
            model = recognize(source, arch_table(options.arch.load_text()))
            if source.config.get("is_encoder_decoder"):
                raise UnsupportedError(f"{name}: has an encoder, and fit takes only decoders; convert it with cpu")
            download = sum(shard.size for shard in source.shards) if remote else 0
            shape = read_shape(model, numa, runtime, download)
            names = Names(name, find_stem(name), remote is None, name, revision, arch_file)
            names = replace(names, shared_experts=model.has_shared_experts)
            if source.container.experts_only:
                names = _name_rest(names, source, options.config, pinned=pinned)
                note = note or _explain_rest(name, options.config)
            elif remote is not None:
                names = replace(names, rest=names.stem)
        if arch_file is not None:
            shape = replace(shape, window_bytes=0)  # `fetch` takes no --arch-file
        if names.fetched is not None:
            shape = replace(shape, download=shape.download + shape.rests[0].rest)
        if pinned:
            names = replace(names, revision=remote.sha if isinstance(remote, hub_headers.Commit) else None)
        return NamedShape(shape, names, note)
    finally:
        gc.enable()


def _name_rest(names: Names, source: TensorSource, config: str | None, *, pinned: bool) -> Names:
    """Return the names with those of the model that provides the rest of a GGUF.

    Raises InputError for a directory without weights.
    """
    if config is None:
        return replace(names, rest=launch.ORIGINAL)
    if Path(config).exists():
        open_checkpoint(config).close()
        return replace(names, rest=config, config=config)
    commit = source.companion_root.name if pinned else None  # a snapshot in the hub's cache
    return replace(names, rest=f"{find_stem(config)}-rest", config=config, config_revision=commit)


def _explain_rest(name: str, config: str | None) -> str:
    """Return a note on a GGUF whose commands are incomplete."""
    if config is not None:
        return ""
    return f"{name}: a GGUF has only the experts in usable form; --config MODEL names the model for everything else"
