"""The last stage: finished units under their final names, companions, config, card, manifest, index."""

from __future__ import annotations

from pathlib import Path

from ktconvert.layouts.checkpoints.containers.safetensors import INDEX, read_header
from ktconvert.layouts.files import manifest, publish
from ktconvert.layouts.files.manifest import OutputFile
from ktconvert.layouts.files.shards import index_json
from ktconvert.layouts.outputs import loose
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.appear import appear
from ktconvert.pipeline.engine.existing import require_replaceable
from ktconvert.pipeline.engine.plan import CARD, CONFIG, Plan, require_unchanged, tool_version
from ktconvert.pipeline.engine.side_output import deliver
from ktconvert.pipeline.engine.workdir import WorkDir


def assemble(plan: Plan, work: WorkDir) -> None:
    """Put the output together and let it appear. May be cut off and run again at any point."""
    target, assembly = work.paths.assembly, plan.assembly
    kept = [unit for unit in plan.units if unit.kept]
    weights: dict[str, OutputFile] = {}
    for unit in kept:
        result = work.finished[unit.fingerprint].result
        for w in result.files:
            name = f"{unit.final}/{w.path}" if w.path else unit.final
            weights[name] = OutputFile(name, w.nbytes, w.sha256, None if w.path else result.tensors)
    target.mkdir(exist_ok=True)
    publish.keep_only(
        target, weights.keys()
    )  # left by an assembly that was cut off; without hard links, weights lie only here
    for unit in kept:
        stored = work.paths.store / unit.stored_name
        if stored.exists():
            publish.place(stored, target / unit.final)
    files = [*weights.values(), *_kept(work.paths.output, assembly.kept_layers or ())]
    for name, source in assembly.companions:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        size, sha256 = publish.copy_file(source, target / name)
        files.append(OutputFile(name, size, sha256))
    require_unchanged(plan)
    if assembly.config is not None:
        files.append(_written(target, CONFIG, assembly.config))
    finished = (work.finished.get(unit.fingerprint) for unit in plan.units)
    stats = [record.result.stats for record in finished if record is not None and record.result.stats]
    files.append(_written(target, CARD, plan.conversion.card(stats)))
    if not assembly.loose:
        shards = []
        for unit in kept:
            header = read_header(_find(work, unit.final))
            shards.append((unit.final, [e.name for e in header.entries], sum(e.nbytes for e in header.entries)))
        files.append(_written(target, INDEX, index_json(shards)))
    document = manifest.encode(
        tool_version=tool_version(),
        command=plan.request.command,
        settings=dict(sorted(plan.request.options.settings.items())),
        facts={**plan.facts, **plan.found(stats)},
        source=tuple(f.lasting() for f in plan.source),
        files=files,
    )
    _written(target, manifest.NAME, document)
    for folder in (target, *(p for p in target.rglob("*") if p.is_dir())):
        publish.sync_folder(folder)
    if all((target / name).exists() for name in weights):
        plan.conversion.check(target)
    if work.may_replace and journal.assembled(work.journal.records) is None:
        require_replaceable(plan)  # what was put there while the conversion ran
    deliver(plan, work)
    work.journal.append(journal.Assembled(inode=target.stat().st_ino), sync=True)
    appear(work, [f.name for f in files])
    work.remove()


def _find(work: WorkDir, name: str) -> Path:
    """A file of the output; without hard links it may lie at its last place already."""
    return next(folder / name for folder in work.paths.finals if (folder / name).exists())


def _written(target: Path, name: str, data: bytes) -> OutputFile:
    return OutputFile(name, len(data), publish.write_file(target / name, data))


def _kept(output: Path, layers: tuple[int, ...]) -> list[OutputFile]:
    files = []
    for layer in layers:
        for _, _, path in loose.files_in(output / loose.layer_folder(layer)):
            name = path.relative_to(output).as_posix()
            files.append(OutputFile(name, path.stat().st_size, publish.sha256_file(path)))
    return files
