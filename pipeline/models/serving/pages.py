"""The server's pages for browsers: a chat, and a list of its paths and parameters."""

from __future__ import annotations

import json
import re
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


ADDRESS = "http://HOST:PORT"  # of the server, in the page that render_docs_page returns
# Other characters of a Host header could change the meaning of a command in a shell.
HOST = re.compile(rb"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}


def read_chat_page(needs_key: bool) -> bytes:
    """Return the page with a chat.

    needs_key  whether it asks for an API key before it sends requests
    """
    page = (FOLDER / "chat.html").read_bytes()
    return page.replace(b"<body>", b"<body data-needs-key>") if needs_key else page


def render_docs_page(paths: Iterable[PathDescription], needs_key: bool) -> bytes:
    """Return the page that describes the server's paths and their parameters. It names the server ADDRESS.

    needs_key  whether examples send an API key
    """
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    entries = [(path, _format_curl(path, needs_key), [*_describe_parameters(path.schema)]) for path in paths]
    return environment.get_template("docs.html").render(entries=entries, address=ADDRESS).encode()


def insert_address(page: bytes, scheme: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a page of render_docs_page with the address to which a request was sent, if its headers have one."""
    host = dict(headers).get(b"host", b"")
    return page.replace(ADDRESS.encode(), b"%s://%s" % (scheme.encode(), host)) if HOST.fullmatch(host) else page


def _format_curl(path: PathDescription, needs_key: bool) -> str:
    words = [f"curl {ADDRESS}{path.path}"]
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
