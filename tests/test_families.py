"""Every mixture-of-experts family of the installed transformers, as docs/reference/architectures.md says: converted and computed
with the logits of the original, or refused with the sentence that is expected."""

import re
from pathlib import Path

import pytest

from families import HEAD, Outcome, families, line, outcome
from rig.family_rows import PLAIN, ROWS, Row

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/architectures.md"
# Measured, the largest of all families: 0.036. Another expert's weights give about 1.
ERROR = 0.05
DECISIVE = 0.4  # the smallest that experts move the logits: 0.48
QUICK = ("granitemoe", "qwen3_omni_moe_thinker")  # the others take minutes


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def expected(row: Row, installed: tuple[int, ...]) -> Row:
    """What the row says of this version of transformers."""
    if row.loads_since and installed >= version(row.loads_since):
        return Row(warned=row.warned)
    return row


def check_computed(seen: Outcome) -> None:
    assert seen.error < ERROR, seen
    assert seen.without > DECISIVE, f"the experts do not decide: {seen}"


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ROWS]
)
def test_a_family_is_as_its_row_says(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    installed = version(transformers.__version__)
    row = ROWS[model_type]
    if installed < version(row.since):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    want, seen = expected(row, installed), outcome(model_type, row, tmp_path)
    for said, words in ((seen.unbuilt, want.unbuilt), (seen.refused, want.refused), (seen.computes, want.computes)):
        assert words in said and bool(words) == bool(said), seen
    assert seen.warned == want.warned, seen
    if not (want.unbuilt or want.refused or want.computes):
        check_computed(seen)


@pytest.mark.long
def test_a_family_without_a_row_is_computed_or_refused(tmp_path: Path) -> None:
    """Those of a transformers that is newer than the table; each is an exception of ours or has the original's logits."""
    pytest.importorskip("transformers")
    unlisted = [name for name in families() if name not in ROWS]
    for name in unlisted:
        seen = outcome(name, PLAIN, tmp_path / name)
        print(f"{name}: {seen}")
        if not (seen.unbuilt or seen.refused or seen.computes):
            check_computed(seen)


def test_the_rows_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    installed = version(transformers.__version__)
    assert {name for name, row in ROWS.items() if version(row.since) <= installed} <= {*families()}


def test_the_table_of_families_is_that_of_the_rows() -> None:
    """All but the measured figures, which must be within the bound."""
    page = PAGE.read_text(encoding="utf-8")
    assert HEAD in page, (
        "docs/reference/architectures.md has no table of families: paste what `python tests/families.py` prints"
    )
    rows = page.split(f"{HEAD}\n")[1].split("\n\n")[0].splitlines()
    figures = [row.removesuffix(" |").rpartition("| ")[2].strip() for row in rows]
    assert rows == [line(*item, figure) for item, figure in zip(ROWS.items(), figures, strict=True)]
    for row, figure in zip(ROWS.values(), figures, strict=True):
        loads = not (row.unbuilt or row.refused) and (not row.computes or bool(row.loads_since))
        assert (0 < float(figure) < ERROR) if loads else not figure
