"""Tutorials run, and print what is stored with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

from docs.tools import tutorials  # noqa: E402

PATHS = sorted(tutorials.FOLDER.glob("*.ipynb"))
#: By how much numbers may differ in cells with the tag "near": a model's that was made on the way,
#: whose last bits depend on the processor.
NEAR = 0.05
_NUMBER = re.compile(r"-?\d+\.\d+")


def test_every_tutorial_of_the_site_is_here() -> None:
    nav = (tutorials.ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"tutorials/([\w-]+)\.md", nav)
    assert sorted(listed) == [path.stem for path in PATHS]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_tutorials_print_what_is_stored(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    if "import torch" in path.read_text():
        pytest.importorskip("torch")
    made = tutorials.run(path)
    for before, after in zip(_cells(stored), _cells(made), strict=True):
        shown, expected = tutorials.outputs(after), tutorials.outputs(before)
        if "near" in before.metadata.get("tags", ()):
            assert _words(shown) == _words(expected), before.source
            assert _numbers(shown) == pytest.approx(_numbers(expected), abs=NEAR), before.source
        else:
            assert shown == expected, f"{before.source}\nrun `python docs/tools/tutorials.py`"


def _cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _words(texts: list[str]) -> str:
    return " ".join(_NUMBER.sub("", "\n".join(texts)).split())


def _numbers(texts: list[str]) -> list[float]:
    return [float(number) for text in texts for number in _NUMBER.findall(text)]
