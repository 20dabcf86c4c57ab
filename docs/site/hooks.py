"""What mkdocs does with files outside docs/: CHANGELOG.md becomes a page. Links to other files are plain text on the
site, or lead to the repository where `repo_url` is set. In the repository itself they stay relative links.

The search ranks pages by BOOSTS.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

CHANGELOG = "changelog.md"
COMMANDS = "reference/commands/"
# Factors of the search, of the first beginning of a page's path that matches. Front matter would show on GitHub.
BOOSTS = {
    CHANGELOG: 0.001,
    "explanation/numerics.md": 0.1,
    "explanation/": 0.7,
    "how-to/troubleshoot.md": 1.4,
    "reference/python.md": 2,
    COMMANDS: 1.5,
}
OPTION_ROW = re.compile(r"^\| (?=(?:`-\w`, )?`--([\w-]+)`)", re.MULTILINE)  # of a table; its first long name
LINK_LINE = re.compile(r"^\[[^\]]+\]\([^)]+\)$", re.MULTILINE)  # a button on the first page
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\\\[|\\\])*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the page with the changelog."""
    text = (Path(config.docs_dir).parent / "CHANGELOG.md").read_text()
    text = re.sub(r"^## \[(.*?)\]", r"## \1", text, flags=re.MULTILINE)
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text).replace("](docs/", "](")
    files.append(File.generated(config, CHANGELOG, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite links that leave docs/, give options of commands anchors, and make buttons; code stays as it is."""
    folder = posixpath.dirname(page.file.src_uri)
    boost = next((factor for start, factor in BOOSTS.items() if page.file.src_uri.startswith(start)), 1)
    page.meta["search"] = {"boost": boost}

    def one(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        if target.startswith("docs/"):
            return match[0]
        if target == "CHANGELOG.md":
            return f"[{match[1]}]({posixpath.relpath(CHANGELOG, folder)})"
        if config.repo_url:
            return f"[{match[1]}]({config.repo_url.rstrip('/')}/blob/main/{target}{match[3] or ''})"
        return match[1]

    fenced = re.compile(r"^ *```.*?^ *```", re.M | re.S)
    parts, last = [], 0
    for block in fenced.finditer(markdown):
        parts += [LINK.sub(one, markdown[last : block.start()]), block[0]]
        last = block.end()
    text = "".join([*parts, LINK.sub(one, markdown[last:])])
    if page.file.src_uri == "index.md":  # not in the page, because GitHub would print these attributes
        page.meta["hide"] = ["navigation", "toc"]
        text = LINK_LINE.sub(r"\g<0>{ .md-button }", text).replace(" }", " .md-button--primary }", 1)
    if page.file.src_uri.startswith(COMMANDS):
        text = OPTION_ROW.sub(r'| <a class="option" id="\1" href="#\1" aria-label="Link to --\1"></a>', text)
    return text
