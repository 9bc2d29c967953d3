"""Run the tutorials and store their outputs: ``python docs/tools/tutorials.py [NAME ...]``.

A tutorial is a notebook in ``docs/tutorials``; it runs in that folder, on the CPU and offline.
Tests run all of them and compare what they print with what is stored (`outputs`).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
#: Pictures differ with fonts and the browser; they are stored, and not compared.
_PICTURES = {"image/svg+xml", "image/png"}


def run(path: Path) -> Any:
    """The notebook with the outputs of a fresh run, and nothing that differs between runs."""
    notebook = nbformat.read(path, as_version=4)
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="80", TQDM_DISABLE="1")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before["PATH"]])
    try:
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=300,
            resources={"metadata": {"path": str(FOLDER)}},
        ).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata = {key: cell.metadata[key] for key in ("tags",) if key in cell.metadata}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _stored(cell.outputs)
    return notebook


def _stored(given: list[Any]) -> list[Any]:
    """Without what differs between runs: counts, errors' colours, and how a text came in pieces."""
    kept: list[Any] = []
    for output in given:
        if output.get("name") == "stderr":
            continue
        if "execution_count" in output:
            output.execution_count = None
        if output.output_type in ("display_data", "execute_result"):
            output.metadata = {}
        if "text" in output:  # commands believe that they write to a terminal
            output.text = re.sub(r"\x1b\[[0-9;]*m", "", output.text).replace("\r\n", "\n")
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
                continue
        kept.append(output)
    return kept


def outputs(cell: Any) -> list[str]:
    """What a code cell printed and returned, as text."""
    return [_text(output) for output in cell.outputs]


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    data = {kind: made for kind, made in output.data.items() if kind not in _PICTURES}
    return re.sub(r"0x[0-9a-f]{6,}", "", "\n".join(str(data[kind]) for kind in sorted(data)))


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            nbformat.write(run(path), path)
            print(f"ran {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
