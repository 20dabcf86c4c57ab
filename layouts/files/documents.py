"""JSON documents that ktconvert writes and that it validates when it reads them; each is a msgspec.Struct."""

from __future__ import annotations

import functools
import json
import threading
from typing import Annotated, Any, TypeVar

import msgspec

DocumentType = TypeVar("DocumentType")
# Limits of our counts, sizes, positions and times. JSON allows larger numbers.
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1 << 40)]  # time since the epoch, or a duration


def decode_document(data: bytes, kind: type[DocumentType]) -> DocumentType:
    """Decode a document of this type. Raises ValueError, naming the field, for any other document."""
    try:
        document: DocumentType = _make_decoder(kind).decode(data)  # type: ignore[arg-type]
        return document
    except RecursionError:
        raise ValueError("nested too deeply") from None


def as_type(value: Any, kind: Any) -> Any:
    """Convert a value to this type. Raise msgspec.ValidationError if that is impossible."""
    with _describing:
        return msgspec.convert(value, kind)


def encode_line(document: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=float), indent=0) + b"\n"


def encode_indented(document: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2) + b"\n"


# Held while msgspec may see a type for the first time: msgspec 0.22 ends with a segmentation fault if a thread uses a
# type's description while another thread creates it.
_describing = threading.Lock()


@functools.cache
def _make_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _describing:
        return msgspec.json.Decoder(kind)


def parse_json(data: bytes) -> Any:
    """Decode a JSON value in UTF-8. Raises ValueError for a malformed document, and for one with a byte order mark."""
    try:
        return json.loads(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def require_plain(value: Any, levels: int = 64) -> None:
    """Raise ValueError for a value that is nested too deeply for recursion, or contains lone surrogates."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict | list):
        if not levels:
            raise ValueError("nested too deeply")
        for inner in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            require_plain(inner, levels - 1)
