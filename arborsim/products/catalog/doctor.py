"""`arborsim doctor`: what is installed, what works with it, and what to do for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborsim.products.options import Json

if TYPE_CHECKING:
    from arborsim.core.installed import Installation


def doctor(*, json: Json = False) -> int:
    """Show what is installed here, which commands work with it, and how to get the others.

    Exit code 1 if something is broken that every command needs.

    Parameters
    ----------
    json
        Print JSON instead of tables.
    """
    from arborsim.core.documents import to_json
    from arborsim.core.installed import examine

    found = examine()
    if json:
        print(to_json(found))
    else:
        _print(found)
    return 0 if found.sound else 1


def _print(found: Installation) -> None:
    from arborsim.core.units import quantity
    from arborsim.report.table import grid, terminal
    from arborsim.report.words import counted, plain

    console = terminal()
    memory = f", {quantity('bytes', found.memory_bytes)} of memory" if found.memory_bytes else ""
    console.print(
        f"arborsim {found.arborsim}, Python {found.python}, {found.platform}, "
        f"{counted(found.cores, 'core')}{memory}",
        markup=False,
    )
    for gpu in found.gpus:
        size = quantity("bytes", gpu.memory_bytes)
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        console.print(f"GPU: {gpu.name}, {size}{driver}", markup=False)
    rows = []
    for each in found.abilities:
        rows.append(["works" if each.works else "no", each.name, plain(each.about)])
        if each.remedy:
            rows.append(["", "", f"-> {plain(each.remedy)}"])
    console.print()
    console.print(grid(rows))
    console.print()
    listed = [f"{p.name} {p.version or '-'}" for p in found.packages]
    console.print(f"Packages: {', '.join(listed)}", style="dim", markup=False)
