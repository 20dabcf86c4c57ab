"""The server's pages for browsers: a chat, and a list of its paths and parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel

FOLDER = Path(__file__).parent
HTML = "text/html; charset=utf-8"
# Pages load nothing from elsewhere, and no other page may frame them.
SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": SECURITY_POLICY, "x-content-type-options": "nosniff"}
# Words for the limits of a JSON schema.
LIMITS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
    "enum": "one of {}",
}


@dataclass(frozen=True)
class PathDescription:
    """A path of the server, as /docs describes it.

    example  body of an example request
    schema   class of its requests
    """

    method: str
    path: str
    summary: str
    schema: type[BaseModel] | None = None
    example: Mapping[str, Any] = field(default_factory=dict)


CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}


def read_chat_page() -> bytes:
    """Return the page with a chat."""
    return (FOLDER / "chat.html").read_bytes()


def render_docs_page(paths: Iterable[PathDescription], needs_key: bool) -> bytes:
    """Return the page that describes the server's paths and their parameters.

    needs_key  whether examples send an API key
    """
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    entries = [(path, _format_curl(path, needs_key), [*_describe_parameters(path.schema)]) for path in paths]
    return environment.get_template("docs.html").render(entries=entries).encode()


def _format_curl(path: PathDescription, needs_key: bool) -> str:
    words = [f"curl http://HOST:PORT{path.path}"]
    if needs_key:
        words.append('-H "Authorization: Bearer $KEY"')
    if path.example:
        words += ["-H 'Content-Type: application/json'", f"-d '{json.dumps(path.example)}'"]
    return " \\\n    ".join(words)


def _describe_parameters(schema: type[BaseModel] | None) -> Iterator[tuple[str, str]]:
    """Yield the name and a description of each parameter that has an effect."""
    if schema is None:
        return
    document = schema.model_json_schema()
    for name, value in sorted(document["properties"].items()):
        choices = [choice for choice in value.get("anyOf", [value]) if choice.get("type") != "null"]
        words = [choices[0].get("type", "object" if "$ref" in choices[0] else "")]
        words += [text.format(choices[0][key]) for key, text in LIMITS.items() if key in choices[0]]
        if words[0]:  # the other parameters may only have values that change nothing
            yield name, ", ".join([*words, *(["required"] if name in document.get("required", ()) else [])])
