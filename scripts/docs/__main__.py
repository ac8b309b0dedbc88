"""Writes the generated pages: `python -m scripts.docs [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.docs import FOLDER, PAGES


def main(folder: Path = FOLDER) -> None:
    """Writes every page that is out of date, and prints its name."""
    for name, text in PAGES.items():
        page = folder / name
        current = text()
        if not page.is_file() or page.read_text(encoding="utf-8") != current:
            page.write_text(current, encoding="utf-8")
            print(f"{folder.name}/{name}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
