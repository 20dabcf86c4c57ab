"""Opening a model for a prediction: a path, or the headers of a model of the hub."""

from __future__ import annotations

import gc
from typing import NamedTuple

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.sources import hub_headers
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.pipeline.fit.estimate import ModelShape
from ktconvert.pipeline.fit.model_shape import read_shape
from ktconvert.pipeline.fit.steps import Names, name_model
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


def read_model(name: str, revision: str | None, arch_file: str | None, numa: int, runtime: str) -> NamedShape:
    """Read the shape of a checkpoint from its headers.

    arch_file  the text of --arch-file

    Raises InputError and UnsupportedError as `inspect` does.
    """
    gc.disable()  # hundreds of thousands of records without cycles: the collector would take half of the time
    try:
        path, remote, note = hub_headers.find_headers(name, revision)
        with open_checkpoint(path) as source:
            model = recognize(source, arch_table(arch_file))
            if source.config.get("is_encoder_decoder"):
                raise UnsupportedError(f"{name}: has an encoder, and fit takes only decoders; convert it with cpu")
            download = sum(shard.size for shard in source.shards) if remote else 0
            shape = read_shape(model, numa, runtime, download)
            experts_only = source.container.experts_only
        names = name_model(name, revision, is_local=remote is None, experts_only=experts_only)
        commit = remote.sha if isinstance(remote, hub_headers.Commit) else None
        return NamedShape(shape, names, commit, note)
    finally:
        gc.enable()
