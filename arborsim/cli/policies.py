"""`arborsim policies`: what there is to choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from arborsim.policies.base import Policy


def policies(
    name: Annotated[str, typer.Argument(help="One policy, in detail.", show_default=False)] = "",
) -> None:
    """List the policies, or explain one: its method, source and parameters."""
    from rich.console import Console

    from arborsim.policies.registry import available, find

    console = Console(highlight=False)
    if name:
        _explain(console, find(name))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("policy", "attention", "reads", "what it does"):
        table.add_column(column, overflow="fold")
    for key, kind in available().items():
        reads = ", ".join(sorted(str(signal) for signal in kind.needs)) or "-"
        table.add_row(key, "fused" if kind.fused else "rows", reads, kind.summary)
    console.print(table)
    console.print("\n[dim]arborsim policies NAME explains one and lists its parameters.[/dim]")


def _explain(console: Console, kind: type[Policy]) -> None:
    from inspect import cleandoc

    from arborsim.policies.registry import parameters

    console.print(f"[bold]{kind.name}[/bold]  ({kind.paper})\n")
    console.print(cleandoc(kind.__doc__ or ""), markup=False)
    if values := [f"{each.name}={each.default}" for each in parameters(kind).values()]:
        console.print("\n[bold]--set[/bold] " + "  ".join(values), markup=True)
