"""Comparisons of a plan, or of a second output, with the options and the input files that an output records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.options.declare import Option, Options, option_fields, to_json_value


def describe_different_settings(
    old: Mapping[str, Any], new: Mapping[str, Any], cls: type[Options], form: str = "{} was {}, is {}"
) -> list[str]:
    """Return a description of each recorded option with a different value.

    cls   options of the command that both record
    form  format of a description: for the option, its old value and its new one
    """
    options = {option_field.name: option_field for option_field in option_fields(cls)}
    differences: list[str] = []
    consequences: list[str] = []
    for name in sorted({*old, *new}):
        old_value = old.get(name)
        new_value = new.get(name)
        option = options.get(name)
        flag = name if option is None else option.flag
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            changed = [key for key in new_value if old_value.get(key) != new_value[key]]
            differences += [form.format(f"{flag}: {key}", old_value.get(key), new_value[key]) for key in changed]
        elif old_value != new_value:
            # An option that only one of them records, with its default, belongs to a different choice, such as GPTQ.
            recorded = [settings[name] for settings in (old, new) if name in settings]
            default = None if option is None else to_json_value(option.default)
            is_given = option is not None and isinstance(option.declaration, Option) and recorded != [default]
            kind = differences if len(recorded) > 1 or is_given else consequences
            kind.append(form.format(flag, _format_setting(old_value), _format_setting(new_value)))
    return differences or consequences


def _format_setting(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "not given"
    if isinstance(value, dict | bool | None):
        return "given" if value else "not given"
    return str(value)


def compare_files(old: Iterable[SourceFile], plan: Plan) -> tuple[list[str], list[str]]:
    """Return the differences between the old input files and the plan's, and the files that were only touched since."""
    old_files = {file.name: file for file in old}
    new_files = {file.name: file for file in plan.source}
    differences = [f"{name} is missing" for name in old_files if name not in new_files]
    differences += [f"{name} is new" for name in new_files if name not in old_files]
    touched = []
    for name in old_files.keys() & new_files.keys():
        was = old_files[name]
        now = new_files[name]
        if was.size != now.size:
            differences.append(f"{name} had {was.size} bytes, has {now.size}")
        elif was.header_sha256 != now.header_sha256:
            differences.append(
                f"the header of {name} was {str(was.header_sha256)[:12]}, is {str(now.header_sha256)[:12]}"
            )
        elif hashes := _find_different_hashes(was, now):
            differences.append(f"the content of {name} was {hashes[0][:12]}, is {hashes[1][:12]}")
        elif was.mtime_ns not in (None, now.mtime_ns) and not (was.sha256 and was.sha256 == now.sha256):
            touched.append(name)
    return sorted(differences), sorted(touched)


def _find_different_hashes(was: SourceFile, now: SourceFile) -> tuple[str, str] | None:
    """Return two hashes of one kind, of the content or of the hub's file, that differ; None if there are none."""
    return next(((old, new) for old, new in _pair_hashes(was, now) if old != new), None)


def _pair_hashes(was: SourceFile, now: SourceFile) -> list[tuple[str, str]]:
    """Return the hashes of each kind that both have."""
    pairs = ((was.sha256, now.sha256), (was.blob, now.blob))
    return [(old, new) for old, new in pairs if old and new]


def find_newer_file(old: Iterable[SourceFile], plan: Plan, mtime_ns: int) -> Path | None:
    """Return the first file of the plan's input that was modified after a time and has no hash in common with `old`."""
    old_files = {file.name: file for file in old}
    for path, file in plan.files.items():
        was = old_files.get(file.name)
        if (file.mtime_ns or 0) > mtime_ns and not (was and _pair_hashes(was, file)):
            return path
    return None
