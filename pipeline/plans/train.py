"""The plan of `ktconvert train`: the files that training reads, and their identity."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec import structs

from ktconvert.layouts.errors import bad_file
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.files.publish import sha256_file
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.companions import companion_files
from ktconvert.layouts.sources.containers import CONTAINERS
from ktconvert.pipeline.engine.plan import Hooks, Plan, identify_by_stat
from ktconvert.pipeline.models.fine_tuning import CPU_WEIGHTS, adapter_card
from ktconvert.pipeline.models.text_datasets import local_files, name_option, select_split
from ktconvert.pipeline.options.model_options import TrainOptions

LOOSE = "_layer_*/_numa_*/*.kt"


def plan_train(options: TrainOptions) -> Plan:
    """Build the plan from headers, small files and data sets.

    fine_tuning.with_stages adds the stages: their number is only known once texts are tokenized, and a finished or
    impossible training shall not wait for that. Raises InputError for missing or unreadable files.
    """
    files = {path: _identify_file(path, name) for path, name in _list_files(options)}
    return Plan(
        options=options,
        files=files,
        reads=tuple(files),
        stages=(),
        facts={"method": "LoRA"},
        notes=(),
        has_index=False,
        read_once=True,
        hooks=Hooks(peak_memory=lambda threads: 0, render_card=partial(adapter_card, options)),
    )


def _list_files(options: TrainOptions) -> Iterator[tuple[Path, str]]:
    """Yield every local file that training reads, with a name that does not depend on where the file is."""
    yield from _list_weight_files(hub.resolve(options.input, options.hub.revision), "")
    if options.cpu_weights is not None:
        yield from _list_weight_files(options.cpu_weights, CPU_WEIGHTS)
    for dataset, name in ((options.dataset, "dataset"), (options.eval_dataset, "eval-dataset")):
        if dataset is not None:
            with name_option(f"--{name}"):
                files = select_split(local_files(dataset), options.dataset_split)
            yield from ((file, f"{name}/{file.name}") for file in files)


def _list_weight_files(root: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a checkpoint or of converted weights."""
    if root.is_file():
        yield root, prefix + root.name
        return
    suffixes = [container.suffix for container in CONTAINERS]
    names = [path.name for path in root.glob("*") if path.suffix in suffixes]
    names += [path.relative_to(root).as_posix() for path in root.glob(LOOSE)]
    yield from ((root / name, prefix + name) for name in (*sorted(names), *companion_files(root)))


def _identify_file(path: Path, name: str) -> SourceFile:
    """Return a file's identity: the hash of its header or content, or for loose weights its size and time."""
    container = next((container for container in CONTAINERS if container.suffix == path.suffix), None)
    if container is not None:
        header = container.read_header(path, name)
        return SourceFile(name, header.size, header.sha256, header.mtime_ns)
    try:
        file = identify_by_stat(path, name)
        return file if path.suffix == ".kt" else structs.replace(file, sha256=sha256_file(path))
    except OSError as error:
        raise bad_file(path, f"cannot be read ({error.strerror})", "check its permissions") from None
