"""JSON documents that we wrote ourselves, read without trusting them: msgspec.Structs, or a table of types."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, TypeVar

import msgspec

Kind = TypeVar("Kind")
# No count, size or position of ours lies beyond these, and no time. JSON allows any.
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1 << 40)]  # since the epoch, or that something took


def read(data: bytes, kind: type[Kind]) -> Kind:
    """A document of this type. Raises ValueError, naming the field, for any other."""
    try:
        document: Kind = _decoder(kind).decode(data)  # type: ignore[arg-type]
        return document
    except RecursionError:
        raise ValueError("nested too deeply") from None


def one_line(document: msgspec.Struct) -> bytes:
    """A document as JSON, and the end of the line."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=float), indent=0) + b"\n"


def indented(document: msgspec.Struct) -> bytes:
    """A document as JSON for people, with sorted names."""
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2) + b"\n"


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


# The same ranges for `mismatch`.
NUMBER = range(1 << 63)
SIZE = range(1, 1 << 63)
COUNT = range(1, 1 << 31)


def parse(data: bytes) -> Any:
    """The JSON value. Raises ValueError for any malformed document."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def require_plain(value: Any, levels: int = 64) -> None:
    """Raise ValueError for a value that is nested too deeply to be walked, or holds lone surrogates."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict | list):
        if not levels:
            raise ValueError("nested too deeply")
        for inner in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            require_plain(inner, levels - 1)


def mismatch(value: Any, form: Any, name: str = "it") -> str | None:
    """What is wrong with a value, as a few words; None where it has the form that it must have.

    form  a type (True is no int); a range of whole numbers; a tuple of forms, of which one must fit; a list of one
          form, which each element must have, or of several, one for each; a dict of the forms of members ("key?" may
          be missing; others may be there); else the value itself
    """
    match form:
        case type():
            fits = type(value) is form
        case range():
            fits = type(value) is int and value in form
        case tuple():
            fits = any(mismatch(value, each) is None for each in form)
        case list():
            if isinstance(value, list) and len(form) in (1, len(value)):
                forms = form * len(value) if len(form) == 1 else form
                pairs = enumerate(zip(value, forms, strict=True))
                return next((wrong for n, (v, f) in pairs if (wrong := mismatch(v, f, f"{name}[{n}]"))), None)
            fits = False
        case dict():
            if isinstance(value, dict):
                return next((wrong for key in form if (wrong := _member(value, key, form[key], name))), None)
            fits = False
        case _:
            fits = type(value) is type(form) and value == form
    return None if fits else f"{name} is {json.dumps(value)[:40]}"


def _member(value: dict[str, Any], key: str, form: Any, name: str) -> str | None:
    plain = key.removesuffix("?")
    path = plain if name == "it" else f"{name}.{plain}"
    if plain in value:
        return mismatch(value[plain], form, path)
    return None if key.endswith("?") else f"{path} is missing"
