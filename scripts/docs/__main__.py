"""Writes the generated pages: `python -m scripts.docs`."""

from __future__ import annotations

from scripts.docs import FOLDER, PAGES


def main() -> None:
    """Writes every page that is out of date, and prints its name."""
    for name, text in PAGES.items():
        page = FOLDER / name
        current = text()
        if not page.is_file() or page.read_text(encoding="utf-8") != current:
            page.write_text(current, encoding="utf-8")
            print(f"docs/{name}")


if __name__ == "__main__":
    main()
