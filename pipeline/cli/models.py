"""`ktconvert models`: list of local models, and comparison of a checkpoint with the hub."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from ktconvert.layouts.errors import InputError, UsageError, VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs.opening import require_directory
from ktconvert.layouts.sources import hub, hub_files
from ktconvert.layouts.sources.hub_files import HubFile
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.cli.local_models import LocalModel, find_models
from ktconvert.pipeline.engine.paths import has_size
from ktconvert.pipeline.options.queries import ModelsOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import format_table, join_values, one_line, plural, size

HEADING = ("name", "kind", "method", "size", "state")


@command("models", ModelsOptions)
def models(options: ModelsOptions) -> None:
    """List local checkpoints and outputs with size, method and state; or compare a checkpoint with the hub.

    The list has the models in the local cache of the Hugging Face hub, and the checkpoints, outputs and unfinished
    conversions directly below FOLDERS. Only headers, configs and manifests are read.

    With --check, sizes and hashes of all files of a checkpoint are compared with those that the hub states; --repair
    downloads different and missing files again. The exit code is 6 if files still differ.

    Examples:
      ktconvert models                      the cache, the current directory
      ktconvert models /models /scratch     the cache and two folders
      ktconvert models --check Qwen/Qwen3-30B-A3B
      ktconvert models --check DIR --against Qwen/Qwen3-30B-A3B --repair
    """
    if options.check is not None:
        check_checkpoint(options, options.check)
        return
    needs_check = {"--against": options.against, "--revision": options.hub.revision, "--repair": options.repair}
    if flag := next((flag for flag, value in needs_check.items() if value), None):
        raise UsageError(f"{flag} is only for --check; add --check MODEL, or leave it out.")
    folders = options.folders or (Path(),)
    found = list(find_models(folders))
    if options.as_json:
        click.echo(json.dumps({"cache": str(hub.cache_root()), "models": [asdict(model) for model in found]}))
    elif found:
        click.echo("\n".join(map(one_line, format_table([HEADING, *map(_format_row, found)]))))
    else:
        click.echo(one_line(f"no models in {hub.cache_root()} and {join_values([str(path) for path in folders])}"))


def _format_row(model: LocalModel) -> tuple[str, ...]:
    state = f"{model.state}: {model.detail}" if model.detail else model.state
    return model.name, model.kind, model.method or "-", size(model.bytes), state


def check_checkpoint(options: ModelsOptions, checkpoint: str) -> None:
    """Compare a checkpoint with the hub, repair it with --repair, and print the result.

    Raises VerificationError if files differ and are not repaired, InputError if the hub cannot be read.
    """
    if options.folders:
        raise UsageError(f"{options.folders[0]}: --check takes no FOLDERS; leave them out, or leave out --check.")
    folder, name, revision = _find_original(checkpoint, options.against, options.hub.revision)
    commit, all_files = hub_files.list_files(name, revision)
    files = hub_files.select_files(folder, all_files)
    problems = _find_problems(folder, files)

    def say(text: str) -> None:
        if not options.as_json:
            click.echo(one_line(text))

    for file, problem in problems.items():
        say(f"{file.name} {problem}")
    for file in problems if options.repair else ():
        hub_files.replace_file(name, commit, file, folder / file.name)
        say(f"{file.name} was downloaded again")
    if not problems:
        say(f"{plural(len(files), 'file')} ({size(sum(file.size for file in files))}) equal those of {name}@{commit}")
    if options.as_json:
        document = {"checkpoint": str(folder), "against": name, "revision": commit, "files": len(files)}
        bad = [{"file": file.name, "problem": problem} for file, problem in problems.items()]
        click.echo(json.dumps({**document, "bad": bad, "repaired": options.repair and bool(problems)}))
    if problems and not options.repair:
        bad_files = plural(len(problems), "damaged or missing file")
        sentence = f"{checkpoint}: {bad_files} of {len(files)}; run the command again with --repair"
        if options.as_json:  # the object contains the problems: an error event would repeat them
            click.echo(f"ktconvert: {sentence}", err=True)
            sys.exit(VerificationError.exit_code)
        raise VerificationError(sentence)


def _find_original(checkpoint: str, against: str | None, revision: str | None) -> tuple[Path, str, str | None]:
    """Return the directory of a checkpoint, and the hub id and revision that it is compared with.

    Raises UsageError for --against that is missing or superfluous, InputError for a model that is not here.
    """
    path = Path(checkpoint).expanduser()
    require_directory(path)
    if path.is_dir():
        if manifest.read_manifest(path) is not None:
            raise UsageError(f"{checkpoint}: an output of ktconvert; check it with `ktconvert verify {path}`.")
        if against is None:
            raise UsageError(f"{checkpoint}: a directory; add its hub id, as in --against org/name.")
        if not hub.HUB_ID.fullmatch(against) or Path(against).exists():
            raise UsageError(f"--against {against}: not a hub id; give that of the model, as in --against org/name.")
        return path, against, revision
    if not hub.HUB_ID.fullmatch(checkpoint):
        raise hub.absent_model(checkpoint)
    if against is not None:
        raise UsageError(f"--against {against}: only for a directory; leave it out, or give a directory.")
    snapshot = hub.find_snapshot(checkpoint, revision)
    if snapshot is None:
        remedy = f"download it with `hf download {checkpoint}`, or give a directory and --against {checkpoint}"
        raise InputError(f"{checkpoint}: not in the local cache {hub.cache_root()}; {remedy}")
    return snapshot, checkpoint, snapshot.name


def _find_problems(folder: Path, files: list[HubFile]) -> dict[HubFile, str]:
    """Return file -> how the local file differs, for those that do; show progress."""
    reporter = Reporter()
    to_hash = [file.size for file in files if has_size(folder / file.name, file.size)]
    reporter.begin(sum(to_hash), 0)
    problems = {}
    try:
        for file in files:
            reporter.set_current(file.name)
            if (problem := hub_files.explain_difference(folder / file.name, file, reporter.advance)) is not None:
                problems[file] = problem
    finally:
        reporter.end()
    return problems
