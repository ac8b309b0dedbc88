"""Writes the generated pages, and the types that are made from the same models: `python -m scripts.docs [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.docs import FOLDER, PAGES
from scripts.spec_fields import FILE, spec_fields


def main(folder: Path = FOLDER) -> None:
    """Writes every page that is out of date, and prints its name."""
    for name, text in PAGES.items():
        _write(folder / name, text())


def _write(file: Path, text: str) -> None:
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")
        print(f"{file.parent.name}/{file.name}")


if __name__ == "__main__":
    if folders := sys.argv[1:]:
        main(*map(Path, folders))
    else:
        _write(FILE, spec_fields())
        main()
