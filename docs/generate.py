"""Writes the pages of docs/ that are made from the code: recipes.md, cli.md and mixers.md, and the pictures.

python docs/generate.py             writes them
python docs/generate.py --check     says which of them are out of date, and exits with 1 then
python docs/generate.py --missing   lists the fields of a recipe that nothing describes
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import draw
from cli_page import cli_page
from mixers_page import mixers_page
from recipes_page import missing_fields, recipes_page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES: dict[str, Callable[[], str]] = {"recipes.md": recipes_page, "cli.md": cli_page, "mixers.md": mixers_page}


def main(words: list[str]) -> int:
    if "--missing" in words:
        print("\n".join(missing_fields()))
        return 0
    check, stale = "--check" in words, []
    for name, make in PAGES.items():
        path, page = DOCS / name, make()
        if not check:
            path.write_text(page, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != page:
            stale.append(path.relative_to(ROOT))
    for path in stale:
        print(f"{path} is out of date; run: python docs/generate.py", file=sys.stderr)
    return max(draw.main(words), 1 if stale else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
