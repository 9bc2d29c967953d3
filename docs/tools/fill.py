"""Write what is made from the code into the pages that show it: ``python -m docs.tools.fill``.

`cli.md`, `api.md` and `trace-format.md` hold it between a mark and its end, so that they can be
read in the repository; the site is built of the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from docs.tools.hooks import DOCS, columns, commands, reference

#: Of each page the mark, and what makes the lines below it.
PAGES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "cli.md": ("commands", commands),
    "api.md": ("reference", reference),
    "trace-format.md": ("columns", columns),
}


def filled(name: str) -> str:
    """The page with what the code says now."""
    mark, made = PAGES[name]
    text = (DOCS / name).read_text(encoding="utf-8")
    head, begin, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- /{mark} -->\n")
    lines = "\n".join(line.rstrip() for line in made()).strip("\n")
    return f"{head}{begin}\n{lines}\n\n{end}{tail}"


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(filled(page), encoding="utf-8")
        print(f"wrote docs/{page}")
