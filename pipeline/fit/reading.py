"""Opening a model for a prediction: a path, or the headers of a model of the hub."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import NamedTuple

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.sources import hub_headers
from ktconvert.layouts.sources.source import locate_checkpoint, open_checkpoint
from ktconvert.pipeline.fit.estimate import ModelShape
from ktconvert.pipeline.fit.model_shape import read_shape
from ktconvert.pipeline.fit.steps import Names, name_model
from ktconvert.pipeline.options.option_groups import ArchFile
from ktconvert.pipeline.plans.checkpoint import arch_table


class NamedShape(NamedTuple):
    """The shape of a model, and its names in commands.

    commit  the commit of a model of the hub that is not here
    note    what the user should know about the headers; "" if nothing
    """

    shape: ModelShape
    names: Names
    commit: str | None
    note: str


def read_model(name: str, revision: str | None, arch: ArchFile, numa: int, runtime: str) -> NamedShape:
    """Read the shape of a checkpoint from its headers.

    Raises InputError and UnsupportedError as `inspect` does.
    """
    gc.disable()  # hundreds of thousands of records without cycles: the collector would take half of the time
    try:
        path, remote, note = locate_checkpoint(name, revision, streamed=True)
        with open_checkpoint(path) as source:
            model = recognize(source, arch_table(arch.load_text()))
            if source.config.get("is_encoder_decoder"):
                raise UnsupportedError(f"{name}: has an encoder, and fit takes only decoders; convert it with cpu")
            download = sum(shard.size for shard in source.shards) if remote else 0
            shape = read_shape(model, numa, runtime, download)
            experts_only = source.container.experts_only
        if arch.arch_file is not None:
            shape = replace(shape, window_bytes=0)  # `fetch` takes no --arch-file
        names = name_model(name, revision, arch.arch_file, is_local=remote is None, experts_only=experts_only)
        commit = remote.sha if isinstance(remote, hub_headers.Commit) else None
        return NamedShape(shape, names, commit, note)
    finally:
        gc.enable()
