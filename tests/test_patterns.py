"""Regular expressions from files: the same matches as `re`, limits of size and time, and clear messages."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ktconvert.layouts import patterns
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs import ignore

FILE = Path("config.json")
NAME = "model.layers.12.mlp.experts.101.gate_proj"


@pytest.mark.parametrize(
    "text",
    [
        *(p.removeprefix("re:") for p in ignore.USUAL_PATTERNS),
        r"^(?!.*experts).*$",
        r"(.*\.)?layers\.12\..*",
        r"(a)|\1",
    ],
)
def test_patterns_match_as_re_does(text: str) -> None:
    ours, theirs = patterns.compile(text, FILE), re.compile(text)
    for name in (NAME, "model.layers.3.mlp.gate", "model.layers.3.self_attn.q_proj", "lm_head", ""):
        for method in ("match", "fullmatch", "search"):
            assert bool(getattr(ours, method)(name)) == bool(getattr(theirs, method)(name))


@pytest.mark.parametrize(
    "text",
    ["(", "*", "a{99999999999999999999}", "a{100000000}", "((a{1000}){1000}){1000}", "a{" + "9" * 5000 + "}", "(" * 2000 + ")" * 2000, "a" * 20000],
)  # fmt: skip
def test_invalid_and_large_patterns_are_refused(text: str) -> None:
    start = time.process_time()
    with pytest.raises(InputError, match=r"^config\.json: .*(not a regular expression|too large)") as caught:
        patterns.compile(text, FILE)
    assert len(str(caught.value)) < 300 and time.process_time() - start < 2


def test_a_match_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "ONE_MATCH", 0.02)
    with pytest.raises(InputError, match=r"^config\.json: the regular expression .* takes too long"):
        patterns.compile(r"(?:(?:.|..)*?)*[!#]", FILE).match(NAME * 4)


def test_all_patterns_of_a_file_share_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each match is short, but matching many names and patterns takes too long."""
    monkeypatch.setattr(patterns, "SLACK", 0.01)
    monkeypatch.setattr(patterns, "PER_MATCH", 0)
    one, other = patterns.compile_all([r".*\.mlp\.gate$", r".*\.mlp\.(gate|router)$"], FILE)
    with pytest.raises(InputError, match="takes too long"):
        for _ in range(1_000_000):
            one.match(NAME)
    with pytest.raises(InputError, match=r"'\.\*\\.+router.* takes too long"):
        other.match(NAME)
