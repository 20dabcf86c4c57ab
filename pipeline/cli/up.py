"""`ktconvert up`: run the commands that `ktconvert fit` recommends, up to a server that answers."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import msgspec

from ktconvert.layouts.errors import MissingPackageError, OutputError, ResourceError, UnsupportedError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.documents import Number, decode_document, encode_indented
from ktconvert.layouts.outputs import launch
from ktconvert.layouts.sources import hub
from ktconvert.layouts.sources.url_headers import URL
from ktconvert.native_quant import machine
from ktconvert.pipeline.cli import group
from ktconvert.pipeline.cli.command import command, find_given_options
from ktconvert.pipeline.cli.fit import choose_runtime, describe_machine, format_document, predict
from ktconvert.pipeline.engine.existing import require_directory
from ktconvert.pipeline.fit.steps import Step, find_stem
from ktconvert.pipeline.models.serving.listener import open_listener
from ktconvert.pipeline.options.declare import option_fields, to_json_value, with_values
from ktconvert.pipeline.options.queries import UpOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import join_values

SETUP = "up.json"
HOST = "127.0.0.1"  # where the server listens
CALL_OPTIONS = ("output", "yes", "dry_run", "port")  # which may differ in the next call


class Setup(msgspec.Struct):
    """The steps that lead to a server, and the number of finished ones; the last step starts the server."""

    options: dict[str, Any]
    steps: list[Step]
    finished: Number = 0
    mark: str = publish.MARK


@command("up", UpOptions)
def up(options: UpOptions) -> None:
    """Set up a model and serve it: download, convert, verify and launch, as `ktconvert fit` recommends.

    MODEL is a checkpoint, a hub id (org/name), or a GGUF with --config. All files are written into one directory. After
    an interruption, the same command continues; once all steps are finished, it starts the server at once.

    Examples:
      ktconvert up Qwen/Qwen3-30B-A3B
      ktconvert up Qwen/Qwen3-30B-A3B --dry-run    print the plan
      ktconvert up MODEL --runtime ktconvert --prefer speed --yes
      ktconvert up FILE.gguf --config Qwen/Qwen3-30B-A3B
    """
    folder = options.output or Path(f"{find_stem(options.model)}-server").absolute()
    require_directory(folder)
    setup = read_setup(folder)
    is_new = setup is None
    if setup is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise OutputError(f"{folder}: has files, but none of an earlier `up`; give a new or empty --output.")
        try:
            setup = _plan_setup(options, folder)
        except MissingPackageError:
            if not options.dry_run:
                _require_all_packages(options)
            raise
    else:
        _require_same_options(setup, folder)
    setup.finished = _count_finished(setup, folder)
    click.echo(_format_setup(setup, folder, options.port))
    if options.dry_run:
        return
    _require_packages(setup)
    with open_listener(HOST, options.port, "choose a different --port"):
        pass  # `serve` would notice a used port only after all other steps
    if is_new and not options.yes:
        _ask(folder)
    publish.make_folder(folder)
    os.chdir(folder)
    reporter = Reporter()
    for step in setup.steps[setup.finished : -1]:
        _write_setup(setup)
        reporter.say(f"{step.name}: {step.command}")
        _run_step(step.command)
        setup.finished += 1
    _write_setup(setup)
    _launch(setup.steps[-1].command, folder, options.port)


def read_setup(folder: Path) -> Setup | None:
    """Read the setup that was begun in a directory; None if there is none. Raises OutputError for a damaged one."""
    try:
        setup = decode_document((folder / SETUP).read_bytes(), Setup)
        programs = [(*shlex.split(step.command), "")[0] for step in setup.steps]
        if not programs or not {*programs} <= {"ktconvert", "hf", "python"}:
            raise ValueError("its steps are not those of this version")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OutputError(f"{folder / SETUP}: cannot be read ({error}); remove it, and start again.") from None
    return setup


def _write_setup(setup: Setup) -> None:
    """Write the setup into the current directory."""
    publish.write_marked_file(Path(SETUP), encode_indented(setup))


def _plan_setup(options: UpOptions, folder: Path) -> Setup:
    """Predict, print the prediction, and return its steps."""
    here = with_values(options, disk=options.target.disk or machine.disk_free(folder))
    prediction = predict(here, run_here=True)
    if prediction.problem:
        raise ResourceError(prediction.problem)
    if URL.fullmatch(options.model) and prediction.steps[0].name == "download":
        raise UnsupportedError(
            f"{options.model}: the recommended form needs all files on disk; download them, and give their directory."
        )
    prediction.document["commands"] = []  # which _format_setup prints
    click.echo("\n".join([*format_document(prediction.document, explain=False), ""]))
    values = {field.name: to_json_value(field.get(options)) for field in option_fields(UpOptions)}
    return Setup({name: value for name, value in values.items() if name not in CALL_OPTIONS}, prediction.steps)


def _require_same_options(setup: Setup, folder: Path) -> None:
    """Raise OutputError, naming all, if options on the command line differ from those of the begun setup."""
    values = click.get_current_context().params
    different = []
    for field in find_given_options(UpOptions):
        begun = setup.options.get(field.name)
        if field.name not in CALL_OPTIONS and to_json_value(values[field.name]) != begun:
            name = "MODEL" if field.name == "model" else field.flag
            different.append(f"{name} {join_values(begun)}" if begun not in (None, False, []) else f"no {name}")
    if different:
        remedy = "give the same values, or a different --output"
        raise OutputError(f"was begun with {', '.join(different)}", remedy, path=folder)


def _count_finished(setup: Setup, folder: Path) -> int:
    """Return the number of finished steps before the first one whose output was removed."""
    finished = setup.steps[: min(setup.finished, len(setup.steps) - 1)]
    return sum(1 for _ in takewhile(lambda step: (folder / step.output).exists(), finished))


def _format_setup(setup: Setup, folder: Path, port: int) -> str:
    lines = [f"directory: {folder}", "", f"mkdir -p {shlex.quote(str(folder))}", f"cd {shlex.quote(str(folder))}"]
    for number, step in enumerate(setup.steps):
        state = " (finished)" if number < setup.finished else ""
        lines += ["", f"# {step.name}{state}", step.command]
    lines[-1] += f" --port {port}"
    return "\n".join(lines)


def _require_packages(setup: Setup) -> None:
    """Raise KTConvertError before hours of work if packages for our server are missing."""
    if not setup.steps[-1].command.startswith(launch.PROGRAM):
        from ktconvert.layouts.extras import require_packages
        from ktconvert.pipeline.models.loading import REQUIRED_PACKAGES

        require_packages("`ktconvert serve`", REQUIRED_PACKAGES["serve"], "serve")


def _require_all_packages(options: UpOptions) -> None:
    """Raise MissingPackageError, naming also those of our server, if the package for the download is missing."""
    from ktconvert.layouts.extras import find_missing, require_packages
    from ktconvert.pipeline.fit.estimate import KTCONVERT
    from ktconvert.pipeline.models.loading import REQUIRED_PACKAGES

    if find_missing([hub.PACKAGE]) and choose_runtime(options.target, describe_machine(options.target)) == KTCONVERT:
        require_packages("`ktconvert up`", (hub.PACKAGE, *REQUIRED_PACKAGES["serve"]), "hub,serve")


def _ask(folder: Path) -> None:
    """Ask whether to start. Raises UsageError for any answer but yes."""
    click.echo(f"Run these commands in {folder}? [y/N]", err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was started; answer y, or give --yes.")


def _run_step(line: str) -> None:
    """Run a command in this process: it ends when this process is killed, and a failure ends this process."""
    program, *words = shlex.split(line)
    if program == "hf":
        _download(*words[1:])
        return
    machine.reset_peak_rss()  # the measurement of the bandwidth used a GiB
    with group.make_context("ktconvert", words) as context:
        group.invoke(context)


def _download(name: str, *words: str) -> None:
    """Download a model of the hub; `words`: the other arguments of `hf download`."""
    first_option = words.index("--local-dir")
    files, options = words[:first_option], words[first_option:]
    values = dict(zip(options[::2], options[1::2], strict=True))
    hub.download(name, values.get("--revision"), files or hub.FILES, Path(values["--local-dir"]))


def _describe_server(port: int) -> str:
    """Return the URL of the server, and a request to try."""
    url = f"http://{HOST}:{port}/v1"
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
    request = shlex.join(("curl", f"{url}/chat/completions", "-H", "Content-Type: application/json", "-d", body))
    return f"\nThe server answers at {url} once it has loaded the model. To try it:\n{request}"


def _launch(line: str, folder: Path, port: int) -> None:
    """Replace this process by the server, or print its command if SGLang is not installed."""
    line = f"{line} --port {port}"
    click.echo(_describe_server(port))
    if not line.startswith(launch.PROGRAM):
        program = ["-m", "ktconvert.pipeline.cli"]
    elif importlib.util.find_spec("sglang") is None:
        click.echo(
            f"\nSGLang is not installed here. Install it, and start the server:\ncd {shlex.quote(str(folder))}\n{line}"
        )
        return
    else:
        program = []
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *program, *shlex.split(line)[1:]])
