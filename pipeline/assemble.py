"""The last stage: finished units under their final names, companions, config, card, manifest, and the index last of all."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconvert.layouts import card, loose, manifest, publish
from ktconvert.layouts.checkpoints.safetensors import read_header
from ktconvert.layouts.checkpoints.source import INDEX
from ktconvert.layouts.shards import index_json
from ktconvert.pipeline.plan import Plan, tool_version
from ktconvert.pipeline.run import records
from ktconvert.pipeline.workdir import WorkDir

CONFIG = "config.json"
CARD = "README.md"
SOURCE_CARD = "README.source.md"


@dataclass(frozen=True)
class Assembly:
    """What goes beside the weights.

    companions   (path below the output, file to copy)
    config       the source's config.json, parsed; None where there is none
    loose        whether the weights are loose folders (then there is no index)
    kept_layers  loose layer folders that lay in the output before and stay as they are
    """

    companions: tuple[tuple[str, Path], ...]
    config: Mapping[str, Any] | None
    base_model: str | None
    loose: bool
    non_experts: bool
    kept_layers: tuple[int, ...] = ()
    card_notes: tuple[str, ...] = field(default=())


def assemble(plan: Plan, assembly: Assembly, work: WorkDir) -> None:
    """Put the output together and let it appear in one step. May be cut off and run again at any point."""
    target = work.places.assembly
    made = records(plan, work)
    target.mkdir(exist_ok=True)
    before = manifest.read(work.places.output) if work.places.inside else None
    for unit in made:
        stored = work.places.store / unit.stored_name
        if stored.exists():
            publish.place(stored, target / unit.final)
    files: list[dict[str, Any]] = []
    for unit, record in made.items():
        for path, nbytes, sha256 in record["files"]:
            entry = {"name": f"{unit.final}/{path}" if path else unit.final, "size": nbytes, "sha256": sha256}
            files.append(entry | ({} if path else {"tensors": record["tensors"]}))
    files += _kept(target, assembly.kept_layers)
    for name, source in assembly.companions:
        files.append(_fresh(target / name, source, name))
    facts = plan.facts
    if assembly.config is not None:
        files.append(_written(target, CONFIG, card.config_json(assembly.config, facts, tool_version())))
    text = card.model_card(
        base_model=assembly.base_model,
        facts=facts,
        notes=assembly.card_notes,
        stats=[r["stats"] for r in made.values() if r["stats"]],
        loose=assembly.loose,
        non_experts=assembly.non_experts,
        tool_version=tool_version(),
    )
    files.append(_written(target, CARD, text))
    index = None
    if not assembly.loose:
        shards = []
        for unit in made:
            header = read_header(target / unit.final)
            shards.append((unit.final, [e.name for e in header.entries], sum(e.nbytes for e in header.entries)))
        index = index_json(shards)
        files.append({"name": INDEX, "size": len(index), "sha256": publish.sha256(index)})
    document = manifest.encode(
        tool_version=tool_version(),
        command=plan.request.command,
        settings=plan.request.settings,
        facts=facts,
        source=[f.lasting() for f in plan.source],
        files=files,
    )
    _remove_stale(target, before, {f["name"] for f in files}, work.places.inside)
    for folder in sorted({(target / f["name"]).parent for f in files}):
        publish.sync_folder(folder)
    _written(target, manifest.NAME, document)
    if index is not None:
        _written(target, INDEX, index)
    publish.sync_folder(target)
    if not work.places.inside:
        _appear(target, work.places.output)
    work.remove()


def _fresh(path: Path, source: Path, name: str) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    size, sha256 = publish.copy_file(source, path)
    return {"name": name, "size": size, "sha256": sha256}


def _written(target: Path, name: str, data: bytes) -> dict[str, Any]:
    path = target / name
    path.unlink(missing_ok=True)
    return {"name": name, "size": len(data), "sha256": publish.write_file(path, data)}


def _kept(target: Path, layers: tuple[int, ...]) -> list[dict[str, Any]]:
    files = []
    for layer in layers:
        for _, _, path in loose.files_in(target / loose.layer_folder(layer)):
            files.append(
                {
                    "name": str(path.relative_to(target)),
                    "size": path.stat().st_size,
                    "sha256": publish.sha256_file(path),
                }
            )
    return files


def _remove_stale(target: Path, before: dict[str, Any] | None, names: set[str], inside: bool) -> None:
    """Remove what an earlier assembly or, inside the output itself, an earlier conversion of ours left and this one does not have."""
    if inside:
        stale = [f["name"] for f in before["files"] if f["name"] not in names] if before else []
        for name in stale:
            (target / name).unlink(missing_ok=True)
        return
    for path in sorted(target.rglob("*"), reverse=True):
        if not path.is_dir() and str(path.relative_to(target)) not in names:
            path.unlink()


def _appear(assembled: Path, output: Path) -> None:
    """Rename the assembled folder to the output; where one lies there already, swap them and remove the old one last."""
    with publish.explained(output):
        try:
            assembled.rename(output)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            try:
                publish.exchange(assembled, output)
            except OSError:
                old = assembled.with_name("old")
                output.rename(old)
                assembled.rename(output)
                publish.sync_folder(output.parent)
                publish.remove_tree(old)
                return
            publish.remove_tree(assembled)
    publish.sync_folder(output.parent)
