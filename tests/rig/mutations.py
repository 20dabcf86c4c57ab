"""Damages valid files, each in its own way: bytes anywhere, and values, keys and structure of JSON, safetensors headers
and TOML. Every function takes a generator of random numbers and the whole file, and returns a damaged one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

EDITS = 3  # at most, of one file
DEEP = 3000  # deeper than Python's limit of recursion
NESTED = 400  # less deep than it

# What may stand in the place of any JSON value, as text: not all of it is valid JSON.
VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2", "7", "1.5", "-0.0", "1e400", "NaN", "Infinity", "-Infinity"),
    *("4294967296", "9223372036854775807", "9223372036854775808", "9" * 400, "9" * 5000, "-" + "9" * 400),
    *('""', '"a"', '"0"', '"all"', r'"\ud800"', r'"\u0000"', r'"a\nb"', r'"\u001b[31m"', '"../x"', '"/etc/passwd"'),
    *('"."', '"{layer}"', '"{layer}{expert}"', '"{0}"', '"{"', f'"{"x" * 5000}"', '"%s"', '"ü"'),
    *("[]", "{}", "[null]", "[1]", "[-1]", '["a"]', "[[]]", "[{}]", "[1.5, true]", '{"a":1}', '{"":null}', "[[1, 2]]"),
    *("[" * DEEP + "]" * DEEP, "[" * DEEP, "[" * NESTED + "]" * NESTED, '{"text_config":' * NESTED + "{}" + "}" * NESTED),
    *('{"a":1,"a":2}', "[1", "", "nul"),
)  # fmt: skip
SIMPLE = ("null", "true", "0", "-1", "1.5", '""', '"a"', "[]", "{}", "[[]]", "[{}]")
KEYS = (
    "",
    "a",
    "\ud800",
    "x" * 5000,
    "\n",
    "\x1b]0;",
    "0",
    "__metadata__",
    "text_config",
    "name",
    "transformers_weights",
)
INSERTED = ("0", "0", "9" * 20, ".", "../", "\0", "\x1b[2J", "\x85", "\ud800", "漢", "*", "(", "{")
SNIPPETS = (b"\0", b"\xff", b'"', b"{", b"}", b"\n", b"[[", b"\xed\xa0\x80", b"=")
TOML_VALUES = (*VALUES, "1979-05-27", "0x7f", "inf", "nan", "'a'", "{a = 1}", "{a.b = {}}")
TOML_LINES = ("[stored]", "[[stored]]", "[a]", "a.b.c = 1", "[[stored.gate]]")
TOML_KEYS = ("refusal", "layers", "hidden", "a", "interleaved")


@dataclass
class Text:
    """A JSON value as the text that it is written with."""

    text: str


class Object:
    """A JSON object as its members in order: a key may appear twice."""

    def __init__(self, members: list[tuple[str, Any]]) -> None:
        self.members = [list(member) for member in members]


def write(node: Any) -> str:
    """A document of Text, Object, list and plain values, as JSON."""
    match node:
        case Text():
            return node.text
        case Object():
            return "{" + ",".join(f"{json.dumps(key)}:{write(value)}" for key, value in node.members) + "}"
        case list():
            return "[" + ",".join(map(write, node)) + "]"
        case _:
            return json.dumps(node)


def _value(random: Random) -> str:
    """A JSON value as text, often a simple one of another type."""
    return random.choice(SIMPLE if random.random() < 0.4 else VALUES)


def places(node: Any) -> list[tuple[Any, int]]:
    """(list or member of an object, position in it) of every value below a node."""
    held = [(m, 1) for m in node.members] if isinstance(node, Object) else []
    held += [(node, at) for at in range(len(node))] if isinstance(node, list) else []
    return held + [place for where, at in held for place in places(where[at])]


def near(random: Random, value: Any) -> Any:
    """Another value of the same type, close to this one."""
    match value:
        case bool():
            return not value
        case int():
            return random.choice((value + 1, value - 1, -value, value * 2, value << 40, (1 << 63) - 1 - value, 1 << 31))
        case str():
            cut = random.randint(0, len(value))
            long, inserted = value.rjust(300, "x"), f"{value[:cut]}{random.choice(INSERTED)}{value[cut:]}"
            return random.choice((value[:cut], value[cut:], inserted, value * 2, value.upper(), long))
        case _:
            return Text(_value(random))


def of_json(random: Random, file: bytes) -> bytes:
    root = [json.loads(file, object_pairs_hook=Object)]  # in a list, so that the whole document is a value, too
    for _ in range(random.randint(1, EDITS)):
        if not (every := places(root)):
            break
        where, at = random.choice(every)
        match random.randint(0, 9):
            case 0 | 1 | 2 | 3 | 4:
                where[at] = Text(_value(random))
            case 5:
                where[at] = near(random, where[at])
            case 6:  # a value from elsewhere
                other, position = random.choice(every)
                where[at] = Text(write(other[position]))
            case what:
                _structure(random, root, what)
    return ",".join(map(write, root)).encode()


def _structure(random: Random, root: list[Any], what: int) -> None:
    """Remove (7), rename (8), or double or add a member or an element somewhere in a document."""
    every = (root[0], *(where[at] for where, at in places(root[0])))
    nodes = [node for node in every if isinstance(node, Object | list)]
    entries = getattr(node := random.choice(nodes), "members", node) if nodes else []
    if not entries:
        return
    at = random.randrange(len(entries))
    if what == 7:
        del entries[at]
    elif isinstance(node, list):
        entries.insert(at, entries[at])
    elif what == 8:
        key = entries[at][0]
        entries[at][0] = random.choice((*KEYS, key[:-1], f"{key}0", key.upper()))
    else:
        entries.append([random.choice((entries[at][0], *KEYS)), Text(_value(random))])


def of_bytes(random: Random, file: bytes) -> bytes:
    """Bits flipped, the end cut off, pieces removed, doubled, zeroed or inserted."""
    data = bytearray(file)
    for _ in range(random.randint(1, EDITS)):
        at = random.randint(0, len(data))
        chunk = slice(at, at + random.choice((1, 1, 2, 8, 64, 4096)))
        match random.randint(0, 6):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << random.randint(0, 7)
            case 2:
                del data[at:]
            case 3:
                del data[chunk]
            case 4:
                data[at:at] = data[chunk]
            case 5:
                data[chunk] = bytes(len(data[chunk]))
            case _:
                data[at:at] = random.choice(SNIPPETS)
    return bytes(data)


def of_lines(random: Random, file: bytes) -> bytes:
    """Lines removed, doubled or replaced, and the JSON document of a line."""
    lines = file.splitlines()
    for _ in range(random.randint(1, EDITS)):
        at = random.randrange(len(lines))
        match random.randint(0, 7):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(random.randint(0, len(lines)), lines[at])
            case 2:
                lines[at] = _value(random).encode()
            case _:
                try:
                    lines[at] = of_json(random, lines[at])
                except (ValueError, RecursionError):  # it was damaged before
                    lines[at] = of_bytes(random, lines[at])
    return b"".join(line + b"\n" for line in lines)


def of_safetensors(random: Random, file: bytes) -> bytes:
    """The header's length, its bytes, or its JSON with the length kept true."""
    length = int.from_bytes(file[:8], "little")
    header, data = file[8 : 8 + length], file[8 + length :]
    what = random.randint(0, 9)
    if what == 0:
        length = random.choice((0, 1, length - 1, length + 1, 1 << 20, 1 << 40, (1 << 64) - 1))
    else:
        header = (of_bytes if what < 3 else of_json)(random, header)
        length = len(header)
    return length.to_bytes(8, "little") + header + data


def of_gguf(random: Random, file: bytes) -> bytes:
    """Numbers, texts and lengths of the header, which are in its first 1000 bytes; the length of the file."""
    data = bytearray(file)
    for _ in range(random.randint(1, EDITS)):
        at = random.randrange(min(len(data), 1000) or 1)
        width = random.choice((1, 2, 4, 4, 8, 8))
        old = int.from_bytes(data[at : at + width], "little")
        large = (1 << 20, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1)
        new = random.choice((0, 1, 8, 9, 139, old + 1, old - 1, old * 2, *large))
        data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    return of_bytes(random, bytes(data)) if random.random() < 0.2 else bytes(data)


def of_toml(random: Random, file: bytes) -> bytes:
    """Lines of a TOML document, and the values in them."""
    lines = file.decode().splitlines()
    for _ in range(random.randint(1, EDITS)):
        at = random.randrange(len(lines) + 1)
        value = random.choice(TOML_VALUES)
        match random.randint(0, 7):
            case 0:
                del lines[at : at + 1]
            case 1:
                lines[at:at] = lines[at : at + 1]
            case 2:
                lines.insert(at, random.choice(TOML_LINES))
            case 3:
                lines.insert(at, f"{random.choice(TOML_KEYS)} = {value}")
            case _ if at < len(lines):
                lines[at] = f"{lines[at].partition('=')[0]}= {value}"
    return "\n".join(lines).encode()


def damaged(kind: Callable[[Random, bytes], bytes], file: bytes, seed: int) -> bytes:
    """A file of this kind (of_json ...) with one to three damages; one in four has them anywhere in its bytes."""
    random = Random(seed)
    return of_bytes(random, file) if random.random() < 0.25 else kind(random, file)
