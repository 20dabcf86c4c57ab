"""Functions that damage valid files: bytes anywhere; values, keys and structure of JSON, safetensors headers and TOML.

Each takes a random generator and the bytes of a file, and returns damaged bytes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

EDITS = 3  # maximum number of edits of a file
DEEP = 3000  # levels, beyond Python's recursion limit
NESTED = 400  # levels, within that limit

# Replacements of any JSON value, as text; some are not valid JSON.
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
    """A JSON value, as the text that represents it."""

    text: str


class Object:
    """A JSON object as an ordered list of members, so that a key can occur twice."""

    def __init__(self, members: list[tuple[str, Any]]) -> None:
        self.members = [list(member) for member in members]


def write(node: Any) -> str:
    """Return a document of Text, Object, list and plain values as JSON."""
    match node:
        case Text():
            return node.text
        case Object():
            return "{" + ",".join(f"{json.dumps(key)}:{write(value)}" for key, value in node.members) + "}"
        case list():
            return "[" + ",".join(map(write, node)) + "]"
        case _:
            return json.dumps(node)


def _draw_value(random: Random) -> str:
    """Draw a JSON value as text; often a simple one of a different type."""
    return random.choice(SIMPLE if random.random() < 0.4 else VALUES)


def find_places(node: Any) -> list[tuple[Any, int]]:
    """Return (list or member of an object, position in it) for each value below a node."""
    own = [(m, 1) for m in node.members] if isinstance(node, Object) else []
    own += [(node, at) for at in range(len(node))] if isinstance(node, list) else []
    return own + [place for where, at in own for place in find_places(where[at])]


def close_value(random: Random, value: Any) -> Any:
    """Return a different value of the same type that is close to this one."""
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
            return Text(_draw_value(random))


def damage_json(random: Random, file: bytes) -> bytes:
    """Replace values, and remove, rename, duplicate or add members of a JSON document."""
    root = [json.loads(file, object_pairs_hook=Object)]  # in a list, so that the whole document is also a value
    for _ in range(random.randint(1, EDITS)):
        if not (every := find_places(root)):
            break
        where, at = random.choice(every)
        match random.randint(0, 9):
            case 0 | 1 | 2 | 3 | 4:
                where[at] = Text(_draw_value(random))
            case 5:
                where[at] = close_value(random, where[at])
            case 6:  # a value from elsewhere
                other, position = random.choice(every)
                where[at] = Text(write(other[position]))
            case action:
                _damage_structure(random, root, action)
    return ",".join(map(write, root)).encode()


def _damage_structure(random: Random, root: list[Any], action: int) -> None:
    """Remove (7), rename (8), duplicate or add a member or an element somewhere in a document."""
    every = (root[0], *(where[at] for where, at in find_places(root[0])))
    nodes = [node for node in every if isinstance(node, Object | list)]
    entries = getattr(node := random.choice(nodes), "members", node) if nodes else []
    if not entries:
        return
    at = random.randrange(len(entries))
    if action == 7:
        del entries[at]
    elif isinstance(node, list):
        entries.insert(at, entries[at])
    elif action == 8:
        key = entries[at][0]
        entries[at][0] = random.choice((*KEYS, key[:-1], f"{key}0", key.upper()))
    else:
        entries.append([random.choice((entries[at][0], *KEYS)), Text(_draw_value(random))])


def damage_bytes(random: Random, file: bytes) -> bytes:
    """Flip bits, truncate, and remove, duplicate, zero or insert pieces."""
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


def damage_lines(random: Random, file: bytes) -> bytes:
    """Remove, duplicate or replace lines, and damage the JSON document of a line."""
    lines = file.splitlines()
    for _ in range(random.randint(1, EDITS)):
        at = random.randrange(len(lines))
        match random.randint(0, 7):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(random.randint(0, len(lines)), lines[at])
            case 2:
                lines[at] = _draw_value(random).encode()
            case _:
                try:
                    lines[at] = damage_json(random, lines[at])
                except (ValueError, RecursionError):  # an earlier edit has damaged it
                    lines[at] = damage_bytes(random, lines[at])
    return b"".join(line + b"\n" for line in lines)


def damage_safetensors(random: Random, file: bytes) -> bytes:
    """Damage the header: its length, its bytes, or its JSON with a correct length."""
    length = int.from_bytes(file[:8], "little")
    header, data = file[8 : 8 + length], file[8 + length :]
    action = random.randint(0, 9)
    if action == 0:
        length = random.choice((0, 1, length - 1, length + 1, 1 << 20, 1 << 40, (1 << 64) - 1))
    else:
        header = (damage_bytes if action < 3 else damage_json)(random, header)
        length = len(header)
    return length.to_bytes(8, "little") + header + data


def damage_gguf(random: Random, file: bytes) -> bytes:
    """Damage numbers, texts and lengths in the header (the first 1000 bytes), or the length of the file."""
    data = bytearray(file)
    for _ in range(random.randint(1, EDITS)):
        at = random.randrange(min(len(data), 1000) or 1)
        width = random.choice((1, 2, 4, 4, 8, 8))
        old = int.from_bytes(data[at : at + width], "little")
        large = (1 << 20, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1)
        new = random.choice((0, 1, 8, 9, 139, old + 1, old - 1, old * 2, *large))
        data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    return damage_bytes(random, bytes(data)) if random.random() < 0.2 else bytes(data)


def damage_toml(random: Random, file: bytes) -> bytes:
    """Damage lines of a TOML document, and the values in them."""
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


def damage(kind: Callable[[Random, bytes], bytes], file: bytes, seed: int) -> bytes:
    """Damage a file one to three times with `kind` (damage_json ...); a quarter of the files, anywhere in the bytes."""
    random = Random(seed)
    return damage_bytes(random, file) if random.random() < 0.25 else kind(random, file)
