"""Work out every number for the claims of papers, and show and write the verdicts.

::

    python -m benchmarks.register --out reports/claims --summary docs/claims.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from arborsim.core.errors import ArborsimError
from benchmarks.register.claims import read_papers
from benchmarks.register.tables import print_claims, write_claims


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.register", description=__doc__)
    add = parser.add_argument
    add("folder", nargs="?", type=Path, default=Path("reports/claims"), help="files of claims")
    add("--root", type=Path, default=Path(), help="where the paths of raw results start")
    add("--out", type=Path, help="folder for claims.parquet, index.html and README.md")
    add("--summary", type=Path, action="append", default=[], help="document with the summary")
    given = parser.parse_args(arguments)
    try:
        papers = read_papers(given.folder, given.root)
        write_claims(papers, given.out, given.summary)
    except ArborsimError as error:
        print(f"register: {error}", file=sys.stderr)
        return 2
    print_claims(papers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
