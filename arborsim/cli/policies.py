"""`arborsim policies`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from arborsim.cli.policy_facts import PolicyFacts

#: From this width on, the list also tells the paper and what a decision is about.
_WIDE = 140
_BUDGET = {
    (True, True): "kept",
    (True, False): "used, but not kept: the cache can hold more",
    (False, True): "ignored",
    (False, False): "ignored",
}


def policies(
    name: Annotated[
        str,
        typer.Argument(help="One policy, in detail: a name, file or class.", show_default=False),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="The same facts as JSON.")] = False,
) -> None:
    """List the policies, or explain one: its method, source, parameters and what it reads."""
    from arborsim.cli.policy_facts import facts_of
    from arborsim.policies.registry import available

    found = [facts_of(one) for one in ([name] if name else available())]
    if json:
        import json as to_json

        document = [facts.to_dict() for facts in found]
        typer.echo(to_json.dumps(document[0] if name else document, indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if name:
        _explain(console, found[0], name)
    else:
        _list(console, found)


def _list(console: Console, found: Sequence[PolicyFacts]) -> None:
    """A table per family, with the same columns."""
    from arborsim.cli.policy_facts import BASELINES, COMPOSITIONS, FAMILIES, INSTALLED

    columns = {
        "policy": [facts.name for facts in found],
        "paper": [facts.short_paper for facts in found],
        "decides per": [facts.unit for facts in found],
        "reads": [facts.sees for facts in found],
        "kernel": ["fused" if facts.fused else "rows" for facts in found],
        "tiers": [facts.tier_code for facts in found],
        "what it does": [facts.summary for facts in found],
    }
    most = {"policy": 24, "paper": 22, "decides per": 22, "reads": 26}
    if console.width < _WIDE:
        del columns["paper"], columns["decides per"]
        most["reads"] = 12 if console.width < 100 else 26
    widths = {
        head: min(most.get(head, 99), max(map(len, (head, *cells))))
        for head, cells in columns.items()
    }
    taken = sum(widths.values()) - widths["what it does"] + 2 * (len(widths) - 1)
    widths["what it does"] = max(20, console.width - taken)
    families = (BASELINES, *(heading for heading, _ in FAMILIES), COMPOSITIONS, INSTALLED)
    for family in families:
        rows = [i for i, facts in enumerate(found) if facts.family == family]
        if rows:
            if family != families[0]:
                console.print()
            console.print(_family_table(family, columns, widths, rows))
    _footer(console)


def _family_table(
    family: str, columns: dict[str, list[str]], widths: dict[str, int], rows: Iterable[int]
) -> Table:
    from rich.table import Table
    from rich.text import Text

    from arborsim.cli.policy_facts import BASELINES

    first = family == BASELINES  # column heads are said once
    table = Table(
        title=family, title_justify="left", title_style="bold", show_header=first, box=None,
        pad_edge=False, padding=(0, 2, 0, 0), header_style="dim",
    )  # fmt: skip
    for head, width in widths.items():
        table.add_column(head, width=width, overflow="fold")
    for i in rows:
        table.add_row(*(Text(cells[i]) for cells in columns.values()))
    return table


def _footer(console: Console) -> None:
    notes = (
        "",
        "kernel: fused kernels do, or rows of attention must be written out (slower).",
        "tiers: H HBM, h HBM in 8 bits, D DDR, d DDR in 8 bits, x evicted.",
        "`arborsim policies NAME` explains one; `--json` prints everything.",
    )
    for note in notes:
        console.print(note, style="dim", markup=False)


def _explain(console: Console, facts: PolicyFacts, name: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(Text.assemble((facts.name, "bold"), f"  {facts.paper}"))
    console.print(Text(facts.summary))
    _section(console, "", _flowing(facts.description))
    _section(console, "Formula", facts.formula)
    blocks = ("score", "allocate", "place", "schedule", "recover")
    _section(console, "Blocks")
    _pairs(console, {block: getattr(facts, block) for block in blocks})
    _section(console, "Needs and uses")
    _pairs(
        console,
        {
            "decides per": f"{facts.granularity}; {facts.per_text}",
            "reads": ", ".join(facts.reads) or "nothing but positions and the tree",
            "kernel": "fused attention" if facts.fused else "writes attention rows out (slower)",
            "tiers": ", ".join(tier.lower().replace("_", " ") for tier in facts.tiers),
            "budget": _BUDGET[facts.knows_budget, facts.keeps_budget],
        },
    )
    if facts.parameters:
        _section(console, "Parameters")
        _show_parameters(console, facts)
    if facts.deviations:
        _section(console, "Deviations from the paper")
        for each in facts.deviations:
            console.print(Padding(Text(f"- {each}"), (0, 0, 0, 2)))
    _section(console, "Run it")
    command = f"arborsim replay TRACE.parquet --policy {name} --budget 0.25,0.5"
    console.print(Text(f"  {command}"), soft_wrap=True)
    if facts.parameters:
        first = facts.parameters[0]
        console.print(
            Text(f"  ... --set {facts.name}.{first.name}={_shown(first.default)}"), soft_wrap=True
        )


def _section(console: Console, title: str, text: str = "") -> None:
    from rich.text import Text

    console.print()
    if title:
        console.print(Text(title, style="bold"))
    if text:
        console.print(Text(text))


def _pairs(console: Console, pairs: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=13, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in pairs.items():
        table.add_row(f"  {name}", Text(text))
    console.print(table)


def _show_parameters(console: Console, facts: PolicyFacts) -> None:
    """As a table where there is room, else two lines each."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if console.width < _WIDE:
        for each in facts.parameters:
            allowed = ", ".join(filter(None, (each.unit, each.allowed or each.type)))
            value = f"  {each.name}={_shown(each.default)}"
            console.print(Text.assemble(value, "  ", (allowed, "dim")))
            console.print(Padding(Text(each.about), (0, 0, 0, 6)))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("  name", "default", "unit", "allowed", "meaning"):
        table.add_column(head, overflow="fold", no_wrap=head != "meaning")
    for each in facts.parameters:
        allowed = each.allowed or each.type
        cells = (f"  {each.name}", _shown(each.default), each.unit, allowed, each.about)
        table.add_row(*map(Text, cells))
    console.print(table)


def _flowing(text: str) -> str:
    """A docstring whose paragraphs the terminal breaks; indented text and rules stay."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        part if "\n " in part or "---" in part else " ".join(part.split()) for part in paragraphs
    )


def _shown(value: object) -> str:
    """As ``--set`` takes it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
