"""HTML in which every text is escaped: what is not Markup is text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """HTML as it goes onto a page."""

    __slots__ = ()


def markup(text: str) -> Markup:
    """Text as HTML; Markup stays."""
    return text if isinstance(text, Markup) else Markup(escape(text))


def element(name: str, *children: str, **attributes: object) -> Markup:
    """<name ...>children</name>, escaped unless they are Markup. attributes: None leaves one out, "class_" is class,
    and other "_" are "-".
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items())
    return Markup(f"<{name}{opening}>{''.join(map(markup, children))}</{name}>")


def together(parts: Iterable[str]) -> Markup:
    """One after the other, a line each."""
    return Markup("\n".join(map(markup, parts)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], label: str, numbers: Sequence[int] = ()) -> Markup:
    """A table with a header column and, unless head is empty, a header row, in a box that scrolls where it is narrow.

    label: for those who cannot see where it stands. numbers: the columns that are set flush right.
    """

    def cells(row: Sequence[str]) -> Iterable[Markup]:
        for column, cell in enumerate(row):
            how = "number" if column in numbers else None
            yield element("td", cell, class_=how) if column else element("th", cell, scope="row", class_=how)

    titles = (
        element("th", title, scope="col", class_="number" if column in numbers else None)
        for column, title in enumerate(head)
    )
    body = element(
        "table",
        *([element("thead", element("tr", *titles))] if head else []),
        element("tbody", together(element("tr", *cells(row)) for row in rows)),
    )
    return element("div", body, class_="box", tabindex="0", role="region", aria_label=label)


def folded(title: str, rows: Sequence[Sequence[str]], head: Sequence[str], most: int = 12) -> Markup:
    """A table of numbers, behind its title where it has more rows than `most`."""
    whole = table(head, rows, title, range(1, len(head)))
    return element("details", element("summary", title), whole) if len(rows) > most else whole
