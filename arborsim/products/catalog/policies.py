"""`arborsim policies`: list the policies, or explain one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.products.declare import Option
from arborsim.products.options import Json, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from arborsim.policies.base import Policy
    from arborsim.policies.registry import Parameter

#: Headings of the list, and how the papers of their policies begin.
FAMILIES = (
    ("Hidden states and cheap signals (EpiKV)", "EpiKV"),
    ("Memory hierarchy", "semantics-aware memory hierarchy"),
    ("Mixed precision (ARKV)", "ARKV"),
    ("Trees of thoughts (ArborKV)", "ArborKV"),
)
BASELINES, COMPOSITIONS, INSTALLED = "Baselines", "Compositions", "Of your own"
#: From this width on, the list also tells the paper and what a decision is about.
_WIDE = 140
_BLOCKS = ("score", "allocate", "place", "schedule", "recover")
#: Words for when an engine runs operations
_WHEN = {
    "step": "in every step",
    "decision": "for the decisions of a step, together",
    "sequence": "for each sequence that decides, one after the other",
}
_PER = {"shared": "shared by all layers", "layer": "per layer", "head": "per layer and KV head"}
#: Short words for signals, where those of their names will not do.
_SIGNALS = {
    "hidden_change": "hidden state",
    "hidden": "hidden vectors",
    "rope": "RoPE",
    "key_variance": "key var.",
    "value_variance": "value var.",
    "lag_key": "lag",
    "lag_value": "lag",
    "eviction_time": "future",
    "attention_layers": "layers' attention",
}


def policies(
    name: Annotated[str, Option(complete="policy")] = "",
    *,
    json: Json = False,
    markdown: Annotated[bool, Option(panel="Output")] = False,
) -> None:
    """List the policies, or explain one: its method, source, parameters and what it reads.

    Parameters
    ----------
    name
        One policy, in detail: a name, file or class.
    json
        Print JSON instead of tables.
    markdown
        Print docs/policies.md.
    """
    from arborsim.policies.registry import available
    from arborsim.report.table import terminal

    found = [facts_of(one) for one in ([name] if name else available())]
    console = terminal()
    if markdown:
        print(document(found), end="")
    elif json:
        print_json(found[0] if name else found)
    elif name:
        _explain(console, found[0], name)
    else:
        _list(console, found)


def facts_of(name: str) -> dict[str, Any]:
    """Facts of the policy called `name`, at ``package.module:Class`` or in a file."""
    from arborsim.policies.registry import build, find, parameters

    kind, policy = find(name), build(name)
    method = policy.method
    return {
        "name": policy.name,
        "family": _family(kind),
        "paper": policy.paper,
        "official": policy.official,
        "summary": policy.summary,
        "description": cleandoc(kind.__doc__ or ""),
        "formula": method.formula,
        **{block: getattr(method, block) for block in _BLOCKS},
        "operations": {when: list(names) for when, names in policy.operations.items()},
        "granularity": method.granularity,
        "per": policy.grouping,
        "reads": sorted(str(signal) for signal in policy.reads()),
        "fused": policy.fused,
        "tiers": [tier.name for tier in policy.tiers],
        "formats": [
            {"bits": each.bits, "about": each.about}
            for rung, each in enumerate(policy.formats, 1)
            if any(tier.rung == rung for tier in policy.tiers)
        ],
        "knows_budget": policy.uses_budget,
        "keeps_budget": policy.bounded,
        "deviations": list(method.deviations),
        "parameters": [_parameter(each) for each in parameters(kind).values()],
    }


def document(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: which code each policy was compared with, and where it differs from its paper."""
    found = [facts for facts in found if facts["family"] != INSTALLED]
    lines = [
        "# Policies",
        "",
        "Where each policy comes from, which code it was compared with and how, and where it",
        "differs from paper or code. `arborsim policies --markdown > docs/policies.md` makes this",
        "page; `arborsim policies NAME` explains a policy.",
        "",
        "By family, and by what a trace must hold for them (with their default settings):",
        "",
        *_families(found),
        "",
        "Policies that need attention rows pay for it in simulated time: fused kernels do not",
        "write them. `arborsim inspect` says what a trace lacks for a policy, and how to record",
        "it.",
        "`--policy my_module:MyPolicy` takes one of yours, `--policy my-mix.toml` one put together",
        "from blocks without code: [a policy is one file](../CONTRIBUTING.md).",
        "",
        "## Papers and code",
        "",
        "*Literally*: both were run on the same random inputs, and the sets of tokens that they",
        "hold were compared; else the code was read. A dash: not compared with any.",
        "",
        "| policy | paper | authors' code and how it was compared | settings for it |",
        "|---|---|---|---|",
    ]
    for facts in found:
        names = [each["name"] for each in facts["parameters"]]
        published = [name for name in names if name.startswith("as_")]
        settings = " ".join(f"`{name}`" for name in published) or "-"
        cells = (f"`{facts['name']}`", facts["paper"], facts["official"], settings)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines += ["", "## Differences"]
    item = TextWrapper(116, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    for facts in found:
        if facts["deviations"]:
            lines += ["", f"### {facts['name']}", ""]
            for each in facts["deviations"]:
                lines += item.wrap(_plain(each))
    return "\n".join(lines) + "\n"


def _families(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of names: a row per family, a column per kind of recording that they need."""
    columns = (
        "structure and cheap signals",
        "attention rows",
        "queries, keys, values, hidden vectors",
    )
    cells: dict[str, list[list[str]]] = {}
    for facts in found:
        reads = set(facts["reads"])
        wide = reads & {"queries", "keys", "values", "hidden"}
        column = 2 if wide else 1 if reads & {"attention", "attention_layers"} else 0
        row = cells.setdefault(facts["family"], [[] for _ in columns])
        row[column].append(f"`{facts['name']}`")
    order = (BASELINES, *(heading for heading, _ in FAMILIES), COMPOSITIONS)
    rows = [(family, *map(" ".join, cells[family])) for family in order if family in cells]
    return [f"| {' | '.join(row)} |" for row in (("family", *columns), ("---",) * 4, *rows)]


def _plain(text: str) -> str:
    """Text in which Markdown finds no emphasis and no tags."""
    return re.sub(r"([*<_])", r"\\\1", text)


def _family(kind: type[Policy]) -> str:
    from arborsim.policies.composition import Composition

    for heading, paper in FAMILIES:
        if kind.paper.startswith(paper):
            return heading
    if issubclass(kind, Composition):
        return COMPOSITIONS
    return BASELINES if kind.__module__.startswith("arborsim.policies.") else INSTALLED


def _parameter(each: Parameter) -> dict[str, Any]:
    """All as text but the default. JSON knows no infinity."""
    options = getattr(each.kind, "__args__", (each.kind,))
    names = [getattr(option, "__name__", str(option)) for option in options]
    endless = isinstance(each.default, float) and not math.isfinite(each.default)
    return {
        "name": each.name,
        "default": str(each.default) if endless else each.default,
        "type": " or ".join("none" if name == "NoneType" else name for name in names),
        "unit": each.setting.unit,
        "allowed": each.setting.bounds,
        "about": each.setting.about,
    }


def short_paper(facts: Mapping[str, Any]) -> str:
    """Without identifiers: ``"Zhang et al. 2023"``."""
    short = re.split("[,:(]", facts["paper"], maxsplit=1)[0].strip()
    return short.removeprefix("semantics-aware ")


def tier_code(facts: Mapping[str, Any]) -> str:
    """A letter per tier, e.g. ``"H-D-x"``. Both formats of a memory share one."""
    from arborsim.core.tiers import Tier

    tiers = [Tier[name] for name in facts["tiers"]]
    narrow = any(each["bits"] < 8 for each in facts["formats"])
    kinds = (
        ("H", Tier.HBM in tiers),
        ("q" if narrow else "h", any(tier.in_hbm and tier.quantised for tier in tiers)),
        ("D", Tier.DDR in tiers),
        ("c" if narrow else "d", any(tier.offloaded and tier.quantised for tier in tiers)),
        ("x", Tier.EVICTED in tiers),
    )
    return "".join(letter if there else "-" for letter, there in kinds)


def _unit(facts: Mapping[str, Any]) -> str:
    """The unit of a decision, in a few words."""
    grain = facts["granularity"].partition(",")[0]
    return grain if facts["per"] == "shared" else f"{grain} per {facts['per']}"


def _sees(facts: Mapping[str, Any]) -> str:
    """The signals that it reads, in short words."""
    found = [_SIGNALS.get(each, each.replace("_", " ")) for each in facts["reads"]]
    return ", ".join(dict.fromkeys(found)) or "-"


def _list(console: Console, found: Sequence[Mapping[str, Any]]) -> None:
    """A table per family, with the same columns. Their heads are said once."""
    from rich.table import Column, Table
    from rich.text import Text

    columns = {
        "policy": [facts["name"] for facts in found],
        "paper": [short_paper(facts) for facts in found],
        "decides per": [_unit(facts) for facts in found],
        "reads": [_sees(facts) for facts in found],
        "kernel": ["fused" if facts["fused"] else "rows" for facts in found],
        "tiers": [tier_code(facts) for facts in found],
        "what it does": [facts["summary"] for facts in found],
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
        rows = [i for i, facts in enumerate(found) if facts["family"] == family]
        if not rows:
            continue
        first = family == families[0]
        heads = (Column(head, width=width, overflow="fold") for head, width in widths.items())
        look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": None}
        look |= {"pad_edge": False, "padding": (0, 2, 0, 0), "header_style": "dim"}
        table = Table(*heads, title=family, show_header=first, **look)
        for i in rows:
            table.add_row(*(Text(cells[i]) for cells in columns.values()))
        if not first:
            console.print()
        console.print(table)
    for note in (
        "",
        "kernel: fused kernels do, or rows of attention must be written out (slower).",
        "tiers: H HBM, h HBM in 8 bits (q in fewer), D DDR, d DDR in 8 bits (c in fewer), "
        "x evicted.",
        "`arborsim policies NAME` explains one; `--json` prints everything.",
    ):
        console.print(note, style="dim", markup=False)


def _explain(console: Console, facts: Mapping[str, Any], name: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from arborsim.report.table import grid

    facts = _printable(facts)

    def section(title: str, text: str = "") -> None:
        console.print()
        for part in (Text(title, style="bold"), Text(text)):
            if part:
                console.print(part)

    def pairs(found: Mapping[str, str]) -> None:
        rows = [(f"  {key}", text) for key, text in found.items()]
        console.print(grid(rows, dim={0}, least=13))

    console.print(Text.assemble((facts["name"], "bold"), f"  {facts['paper']}"))
    console.print(Text(facts["summary"]))
    section("", _flowing(facts["description"]))
    section("Formula", facts["formula"])
    section("Blocks")
    pairs({block: facts[block] for block in _BLOCKS})
    section("Needs and uses")
    formats = "; ".join(each["about"] for each in facts["formats"])
    formats = f" ({formats})" if formats else ""
    budget = "kept" if facts["keeps_budget"] else "used, but not kept: the cache can hold more"
    pairs(
        {
            "decides per": f"{facts['granularity']}; {_PER[facts['per']]}",
            "reads": ", ".join(facts["reads"]) or "nothing but positions and the tree",
            "kernel": "fused attention" if facts["fused"] else "writes attention rows out (slower)",
            "tiers": ", ".join(facts["tiers"]).lower().replace("_", " ") + formats,
            "budget": budget if facts["knows_budget"] else "ignored",
        }
    )
    if facts["operations"]:
        section("What an engine runs for it")
        pairs({_WHEN[when]: ", ".join(names) for when, names in facts["operations"].items()})
    if facts["parameters"]:
        section("Parameters")
        _show_parameters(console, facts["parameters"])
    if facts["official"] != "-":
        section("Compared with the authors' code", facts["official"])
    if facts["deviations"]:
        section("Deviations from the paper")
        for each in facts["deviations"]:
            console.print(Padding(Text(f"- {each}"), (0, 0, 0, 2)))
    section("Run it")
    command = f"  arborsim replay TRACE.parquet --policy {name} --budget 0.25,0.5"
    console.print(Text(command), soft_wrap=True)
    for first in facts["parameters"][:1]:
        setting = f"{facts['name']}.{first['name']}={_shown(first['default'])}"
        console.print(Text(f"  ... --set {setting}"), soft_wrap=True)


def _printable(value: Any) -> Any:
    """Facts of a composition come from its file: nothing in them may steer a terminal."""
    from arborsim.report.words import plain

    if isinstance(value, str):
        return "\n".join(map(plain, value.split("\n")))
    if isinstance(value, Mapping):
        return {key: _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list | tuple) else value


def _show_parameters(console: Console, parameters: Sequence[Mapping[str, Any]]) -> None:
    """As a table where there is room, else two lines each."""
    from rich.padding import Padding
    from rich.text import Text

    from arborsim.report.table import grid

    if console.width >= _WIDE:
        heads = ("  name", "default", "unit", "allowed", "meaning")
        rows = []
        for each in parameters:
            allowed = each["allowed"] or each["type"]
            name, default = f"  {each['name']}", _shown(each["default"])
            rows.append((name, default, each["unit"], allowed, each["about"]))
        console.print(grid(rows, heads))
        return
    for each in parameters:
        allowed = ", ".join(filter(None, (each["unit"], each["allowed"] or each["type"])))
        value = f"  {each['name']}={_shown(each['default'])}"
        console.print(Text.assemble(value, "  ", (allowed, "dim")))
        console.print(Padding(Text(each["about"]), (0, 0, 0, 6)))


def _flowing(text: str) -> str:
    """A docstring whose paragraphs the terminal breaks. Indented text and rules stay."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        part if "\n " in part or "---" in part else " ".join(part.split()) for part in paragraphs
    )


def _shown(value: object) -> str:
    """As ``--set`` takes it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
