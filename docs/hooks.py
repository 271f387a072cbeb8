"""What mkdocs runs over a page: links to files of the repository outside docs/ become plain text, as the site has no
copy of them. A link to a file that does not exist stays, so that `mkdocs build --strict` refuses it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def plain(link: re.Match[str]) -> str:
        words, target = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
        if path.startswith("docs/") or "://" in target or not (ROOT / path).exists():
            return link[0]
        return words if words.strip("`") == path else f"{words} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)", plain, markdown)
