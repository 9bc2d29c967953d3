"""Write ``docs/performance.md`` from the figures in ``reports/benchmarks``.

``python benchmarks/page.py``, after ``python benchmarks/replay.py --out
reports/benchmarks/replay.json``, ``python benchmarks/decisions.py --out
reports/benchmarks/decisions.json`` and the same with ``ets``, ``live``, ``serving``, ``plan``,
``sweep``, ``search`` and ``kernels``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "reports" / "benchmarks"
PAGE = ROOT / "docs" / "performance.md"
NAMES = (
    "replay", "decisions", "ets", "live", "live_targets", "live_targets_before", "serving", "plan",
    "kernels", "sweep", "search",
)  # fmt: skip


def page(of: dict[str, dict[str, Any]]) -> str:
    """The whole page as Markdown."""
    replay = of["replay"]
    parts = (
        _head(replay), _short(of), _free(replay), _attention(replay), _long(replay),
        _starts(replay), _decisions(of["decisions"]), _ets(of["ets"]), _live(of["live"]),
        _targets(of["live_targets"], of["live_targets_before"]), _serving(of["serving"]),
        _plan(of["plan"]), _sweep(of["sweep"]), _search(of["search"]), _kernels(of["kernels"]),
    )  # fmt: skip
    return "\n".join(line for part in parts for line in part)


def _head(replay: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in replay["versions"].items())
    return [
        "# Performance",
        "",
        "Made by `python benchmarks/page.py` from `reports/benchmarks/*.json`, which",
        "`python benchmarks/replay.py --out reports/benchmarks/replay.json`,",
        "`python benchmarks/decisions.py --out reports/benchmarks/decisions.json`,",
        "`python benchmarks/ets.py --out reports/benchmarks/ets.json` (it needs PuLP),",
        "`python benchmarks/live.py --out reports/benchmarks/live.json`,",
        "`python benchmarks/live_targets.py --out reports/benchmarks/live_targets.json`,",
        "`python benchmarks/serving.py --out reports/benchmarks/serving.json`,",
        "`python benchmarks/plan.py --out reports/benchmarks/plan.json`,",
        "`python benchmarks/sweep.py --out reports/benchmarks/sweep.json`,",
        "`python benchmarks/search.py --out reports/benchmarks/search.json` and",
        "`python benchmarks/kernels.py --out reports/benchmarks/kernels.json` write.",
        f"One core, Python {replay['python']}, {versions}; generated traces on Llama-3.1-8B's",
        "geometry, H100 profile. The machine is shared: compare ratios, not seconds.",
        "",
    ]


def _short(of: dict[str, dict[str, Any]]) -> list[str]:
    """The figures that people ask for first."""
    replay, plan = of["replay"], of["plan"]
    peaks = replay["peak_mib"]
    first, last = min(peaks, key=int), max(peaks, key=int)
    ratios: dict[str, list[float]] = {}
    for row in of["live"]["speeds"]:
        ratios.setdefault(row["model"], []).append(row["ratio"])
    live = ", ".join(f"{min(r):.2f} to {max(r):.2f} on {model}" for model, r in ratios.items())
    epikv = replay["attention_free"]["epikv"]
    dense, sparse = (
        replay[kind]["policies"]["h2o per=shared"]["ratio"] for kind in ("dense", "sparse")
    )
    return [
        "## In short",
        "",
        f"- `epikv` over {epikv['tokens']:,} tokens in episodes of 32,768:",
        f"  {epikv['tokens_per_s']:,} tokens/s.",
        f"- `h2o per=shared`: {dense} times what pyarrow alone needs to decode the",
        f"  columns with dense attention, {sparse} times with sparse.",
        f"- Peak memory {peaks[first]} MiB with {first} episode, {peaks[last]} MiB with {last}.",
        f"- `arborsim plan`: {plan['candidates']} candidates, {plan['searches']:,} searches a run: "
        f"{plan['wall_s']:.0f} s on two cores.",
        "- Live with full retention, as a multiple of the speed of transformers' `DynamicCache`:",
        f"  {live}.",
        "",
    ]


def _free(replay: dict[str, Any]) -> list[str]:
    rows = sorted(replay["attention_free"].items(), key=lambda item: -item[1]["tokens_per_s"])
    tokens = rows[0][1]["tokens"]

    def of(row: dict[str, Any]) -> str:
        return "" if row["tokens"] == tokens else f" (over {row['tokens']:,})"

    peaks = ", ".join(
        f"{mib} MiB with {n} episode{'s' if n != '1' else ''}"
        for n, mib in replay["peak_mib"].items()
    )
    return [
        "## Replaying without attention",
        "",
        f"{tokens:,} tokens in episodes of 32,768, budget {replay['budget_tokens']} tokens,",
        "everything included (reading, decisions, simulated memory and time).",
        "",
        "| policy | tokens/s | simulating | over decoding | at least |",
        "|---|---:|---:|---:|---|",
        *(
            f"| `{name}` | {row['tokens_per_s']:,}{of(row)} | {_share(row)} | {_ratio(row)} "
            f"| {_least(row)} |"
            for name, row in rows
        ),
        "",
        "*Simulating*: the part of the time in which bytes, transfers and seconds are simulated;",
        "`-`: not measured. Policies whose rank is fixed at birth plan a whole run of iterations",
        "in one call. `keydiff` compares every key with a mean that each token changes. `kivi`,",
        "compositions and policies that move tokens to DDR decide one event at a time, and every",
        "transfer is simulated when it starts, as its end may change what the next iteration",
        "reads: that part bounds what faster decisions could gain. *Over decoding* and *at least*",
        "are as below.",
        "",
        f"Peak memory (`epikv`): {peaks}.",
        "",
    ]


def _attention(replay: dict[str, Any]) -> list[str]:
    dense, sparse = replay["dense"], replay["sparse"]
    names = [name for name in dense["policies"] if "+" not in name]
    names.sort(key=lambda name: dense["policies"][name]["ratio"])

    def cells(name: str) -> str:
        found = [
            kind["policies"].get(label)
            for kind in (dense, sparse)
            for label in (name, f"{name}+attention-kept")
        ]
        least = [_least(kind["policies"].get(name, {})) for kind in (dense, sparse)]
        ratios = ("-" if cell is None else f"{cell['ratio']:.1f}" for cell in found)
        return " | ".join((*ratios, *least))

    return [
        "## Replaying with attention",
        "",
        "Time of the whole replay over the time pyarrow alone takes to decode the columns that are",
        f"read. Dense: {dense['tokens']:,} tokens in episodes of 2,000 with whole rows, budget",
        f"{dense['budget']}; sparse: {sparse['tokens']:,} tokens in episodes of 32,768 with 256",
        f"positions per row, budget {sparse['budget']}. *kept*: with the attention-kept meter,",
        "the default of `arborsim replay`. *At least*: decoding, which is 1, and what the policy's",
        "rule takes in bare NumPy with nothing around it (`benchmarks/by_hand.py`), and",
        "*simulating*, the part of the replay in which bytes, transfers and seconds are simulated.",
        "It is the least that we know how to reach in NumPy, without an account of what was",
        "evicted; the rest is an interpreter's, some microseconds for each token.",
        "",
        "| policy | dense | dense, kept | sparse | sparse, kept | at least, dense "
        "| at least, sparse |",
        "|---|---:|---:|---:|---:|---|---|",
        *(f"| `{name}` | {cells(name)} |" for name in names),
        "",
        "The aim is 3. Rules that change the rank of all tokens with every row cannot come under",
        "it on sparse rows, where decoding is cheap: eviction by eviction, one row costs a dozen",
        "calls of NumPy. `thinkv` and `segment-hs` take all entropies anew with every row while",
        "their segments are full, `attn-hs` scales both its scores. Where `segment-hs` evicts,",
        "several tokens go at once: every decision is an event of its own, with a view of the",
        "tree, a plan and an iteration to price. The hierarchy and its",
        "ablations simulate every transfer when it starts, since its end may change what the next",
        "iteration reads, and add sparse rows one by one: what a row does not list is spread",
        "evenly, and such sums depend on their order. The rest is the tree, scores of per-layer",
        "signals and, where decisions fall between runs of iterations, half a millisecond each.",
        "",
    ]


def _least(row: dict[str, Any]) -> str:
    """Decoding, the rule by hand, and simulating: with their sum, as multiples of decoding."""
    if "by_hand" not in row:
        return "-"
    parts = 1.0, row["by_hand"], row["machine_share"] * row["ratio"]
    return f"{sum(parts):.1f} (1 + {parts[1]:.1f} + {parts[2]:.1f})"


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.1f}" if "ratio" in row else "-"


def _share(row: dict[str, Any]) -> str:
    return f"{100 * row['machine_share']:.0f}%" if "machine_share" in row else "-"


def _long(replay: dict[str, Any]) -> list[str]:
    """Traces of many searches."""
    if "long" not in replay:
        return []
    return [
        "## Many searches in one trace",
        "",
        "`arborsim generate --searches N`, and its replay with full retention and Llama-3.1-8B's",
        "geometry: both linear in tokens, in seconds of the processor.",
        "",
        "| searches | tokens | made in, s | replayed in, s | peak MiB of the replay |",
        "|---:|---:|---:|---:|---:|",
        *(
            f"| {row['searches']:,} | {row['tokens']:,} | {row.get('generate_cpu_s', '-')} "
            f"| {row['replay_cpu_s']} | {row['peak_mib']} |"
            for row in replay["long"]
        ),
        "",
    ]


def _starts(replay: dict[str, Any]) -> list[str]:
    """What every command takes at least."""
    if "starts" not in replay:
        return []
    return [
        "## Starting",
        "",
        "Seconds of the processor: `--help`, and a call that does little (`-` where a model runs,",
        "or it takes longer). Commands load what they need: SciPy's optimiser for the offline",
        "optimum and pandas for `--out` are a third of the call of `replay`.",
        "",
        "| command | `--help` | the call | arguments |",
        "|---|---:|---:|---|",
        *(
            f"| `{name}` | {row['help_s']:.2f} | {_call(row)} |"
            for name, row in replay["starts"].items()
        ),
        "",
    ]


def _call(row: dict[str, Any]) -> str:
    if "call_s" not in row:
        return "- | "
    return f"{row['call_s']:.2f} | " + (f"`{row['call']}`" if row["call"] else "")


def _decisions(decisions: dict[str, Any]) -> list[str]:
    rows = sorted(decisions["policies"].items(), key=lambda item: item[1]["decision_ms"] or 0.0)
    transition = decisions["arborkv_transition"]
    return [
        f"## One decision over {decisions['tokens']:,} tokens",
        "",
        "`Policy.decide` from view to plan, scores already accumulated, all tokens in HBM and one",
        "more than the budget allows. Policies per layer and KV head decide for 16 cache groups of",
        "that size each. `-`: nothing to decide on a chain.",
        "",
        "| policy | attention | groups | tokens | ms | ms per group |",
        "|---|---|---:|---:|---:|---:|",
        *(_decision(name, row) for name, row in rows),
        "",
        f"ArborKV, one Transition on {transition['nodes']:,} blocks and {transition['tokens']:,}",
        f"tokens: {transition['usual_ms']} ms when an earlier one has trimmed the blocks,",
        f"{transition['every_block_shrinks_ms']} ms when every block shrinks at once.",
        "",
    ]


def _decision(name: str, row: dict[str, Any]) -> str:
    reads = "fused" if row["fused"] else "rows"
    if row["decision_ms"] is None:
        return f"| `{name}` | {reads} | {row['groups']} | {row['tokens']:,} | - | - |"
    each = row["decision_ms"] / row["groups"]
    cost = f"{row['decision_ms']:.3f} | {each:.3f}"
    return f"| `{name}` | {reads} | {row['groups']} | {row['tokens']:,} | {cost} |"


def _ets(ets: dict[str, Any]) -> list[str]:
    """A step of ETS, and the same program by PuLP."""
    ways = {
        "solving: reduced, then HiGHS (what `ets` does)": "reduced_ms",
        "solving: whole, HiGHS": "highs_ms",
        "solving: whole and as printed, PuLP with CBC": "pulp_ms",
        "clustering": "cluster_ms",
        "the step: weights, tree, clustering, solving": "step_ms",
    }
    by_size = " and ".join(f"{ms:.0f} ms with {n}" for n, ms in ets["step_ms_by_size"].items())
    versions = ets["versions"]
    return [
        f"## A step of ETS at width {ets['width']}",
        "",
        f"{ets['problems']} levels of searches that REBASE and ETS grow on random thoughts, with",
        f"medians of {ets['leaves']:.0f} leaves, {ets['nodes']:.0f} nodes and",
        f"{ets['clusters']:.0f} clusters, each solved three ways, whose answers are worth the same",
        f"to 1e-9. scipy {versions['scipy']}, PuLP {versions['pulp']} with the CBC that it brings.",
        "",
        "| | median ms | 95th percentile |",
        "|---|---:|---:|",
        *(
            f"| {title} | {ets['median'][key]:.1f} | {ets['percentile_95'][key]:.1f} |"
            for title, key in ways.items()
        ),
        "",
        f"A step takes {by_size} numbers per embedding; the aim is 50 ms. PuLP takes",
        f"{ets['solve_ratio']} times as long to solve the program, and a step with it",
        f"{ets['step_ratio']} times as long (medians of the ratios); the aim is 3.",
        "",
    ]


def _live(live: dict[str, Any]) -> list[str]:
    """The live cache against transformers' own, and what policies cost there."""
    return [
        "## The live cache",
        "",
        "Decoding with full retention through arborsim's cache, over the speed with transformers'",
        f"`DynamicCache` and SDPA (torch {live['torch']}, transformers {live['transformers']}, one",
        "CPU thread, float32, random weights; steps of both in turns, medians). The aim is 0.95.",
        "",
        "| model (layers x width) | tokens in the cache | tokens/s | ratio |",
        "|---|---:|---:|---:|",
        *(
            f"| {row['model']} | {row['context_tokens']:,} | {row['ours_tokens_per_s']:,} "
            f"| {row['ratio']:.2f} |"
            for row in live["speeds"]
        ),
        "",
        "One search of 512 tokens under policies at half of them: shares of its wall time. The",
        "policy's holds signals, scores, decisions and moves.",
        "",
        "| model | policy | tokens/s | policy | exposed transfer | hidden transfer |",
        "|---|---|---:|---:|---:|---:|",
        *(
            f"| {row['model']} | `{row['policy']}` | {row['tokens_per_s']:,} "
            f"| {100 * row['policy_share']:.1f}% | {100 * row['exposed_share']:.1f}% "
            f"| {100 * row['hidden_share']:.1f}% |"
            for row in live["shares"]
        ),
        "",
    ]


def _targets(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What a quarter of the cache gains, now and before decode steps read slots in place."""
    theirs = now["gains"][-1]
    full = now["gains"][0]
    was = {row["policy"]: row for row in before["gains"]}
    cached_mb = 1e-6 * now["context"] * now["layers"] * 2 * now["kv_heads"] * 64 * 4
    weights = now["weight_mb"]
    bound = (cached_mb + weights) / (now["budget"] * cached_mb + weights)

    def row_of(row: dict[str, Any]) -> str:
        old = f"{was[row['policy']]['ratio']:.2f}" if row["policy"] in was else ""
        target = "" if row["target"] is None else f"{row['target']:.1f}"
        return (
            f"| `{row['policy']}` | {row['tokens_per_s']:.1f} "
            f"| {row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}] | {target} "
            f"| {old} | {100 * row['policy_share']:.1f}% | {100 * row['exposed_share']:.1f}% "
            f"| {row['decisions']} | {row['held_tokens']:,} | {100 * row['quantised_share']:.0f}% "
            f"| {row['kv_mb']:.0f} | {row['allocated_mb']:.0f} |"
        )

    return [
        "### What a smaller cache gains",
        "",
        f"A model of {now['layers']} layers x {now['width']} with {now['heads']} query and "
        f"{now['kv_heads']} KV heads, random weights in",
        f"float32, one thread. {now['context']:,} cached tokens take {cached_mb:.0f} MB, its "
        f"weights {weights:.0f} MB: by bytes,",
        f"{100 * now['budget']:.0f}% of the tokens can be {bound:.2f} times as fast as all of "
        "them. Each search cuts the",
        f"prompt, whose hidden states are computed once for all, and decodes {full['turns']} times "
        f"{full['steps'] // full['turns']} tokens,",
        "in turns with the others in one process.",
        "Ratio: tokens per second of the processor over full retention's in the same turns, mean",
        "and 95% interval over turns. *Before*: the ratio when decode steps did not read slots in",
        f"place ({before['date']}).",
        "",
        "| policy | tokens/s | ratio | target | before | policy | exposed | decisions "
        "| tokens read | in 8 bits | MB held | MB allocated |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(row_of(row) for row in now["gains"][1:-1]),
        "",
        f"`full` makes {full['tokens_per_s']:.1f} tokens/s; transformers' `DynamicCache`, which "
        "copies its tensors for every",
        f"token, {theirs['tokens_per_s']:.1f} ({theirs['ratio']:.2f}). The prompt is evictable "
        "(`pin_prompt=false`). `arkv-int8` is ARKV with a",
        "quarter of what it keeps in whole numbers of 8 bits: layers of random weights are about",
        "equally sensitive, so its own rule rounds next to nothing. ARKV decides once in about a",
        "thousand tokens. Under `hierarchy` every token takes part in attention, and on a CPU the",
        "host is no other memory: it can gain nothing here.",
        "",
    ]


def _us(run: dict[str, Any]) -> str:
    return f"{run['us_per_phase']:.1f}"


def _serving(serving: dict[str, Any]) -> list[str]:
    """Many searches on one GPU: speed, and the cost per event against their number."""
    cases = {name: case["runs"] for name, case in serving.items() if isinstance(case, dict)}
    curves = {name: runs for name, runs in cases.items() if len(runs) > 2}
    clients = [run["clients"] for run in next(iter(curves.values()))[:-1]]
    at_64 = {
        name: (next(run for run in runs if run["clients"] == 64), runs[-1])
        for name, runs in cases.items()
    }
    return [
        "## Many searches on one GPU",
        "",
        "The serving engine, Llama-3.1-8B on an H100, searches of the shipped traces one after the",
        "other from 64 clients; seconds are of the processor. The aim is 300,000 tokens/s.",
        "",
        "| trace, policy, budget, recall | million tokens/s | with half of the memory they need "
        "| preemptions there |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {whole['tokens_per_s'] / 1e6:.1f} | {half['tokens_per_s'] / 1e6:.1f} "
            f"| {half['preemptions']:,} |"
            for name, (whole, half) in at_64.items()
        ),
        "",
        "Microseconds per *phase* (what happens to one search: the end of a linear piece, a pass,",
        "a decision, the start of a transfer) against the number of searches at once; flat or",
        "falling means that more searches cost nothing extra:",
        "",
        f"| searches at once | {' | '.join(map(str, clients))} |",
        f"|---|{'---:|' * len(clients)}",
        *(
            f"| {name} | {' | '.join(_us(run) for run in runs[:-1])} |"
            for name, runs in curves.items()
        ),
        "",
    ]


def _plan(plan: dict[str, Any]) -> list[str]:
    """A whole capacity plan."""
    return [
        "## A capacity plan",
        "",
        f"`arborsim plan` over 4 GPUs, 6 policies and 3 budgets ({plan['candidates']} candidates,",
        f"as full retention knows no budget), {plan['searches']:,} searches a run, the largest",
        f"load of each found by search: {plan['wall_s']:.0f} s with {plan['jobs']} processes",
        f"({plan['processor_s']:.0f} s of the processor, {plan['peak_rss_mb']} MB).  The aim is",
        "300 s.",
        "",
    ]


def _sweep(sweep: dict[str, Any]) -> list[str]:
    """Many small cells: what each costs beyond its replay."""
    alone = {run["on"]: run["wall_s"] for run in sweep["runs"] if run["workers"] == 1}
    same = "The files are the same to the byte." if sweep["same_bytes"] else "FILES DIFFER."
    return [
        "## A sweep",
        "",
        f"`arborsim sweep` over {sweep['cells']:,} cells, each a search of about 30 tokens",
        f"(`python benchmarks/sweep.py`). {same} Reading and comparing them takes",
        f"{sweep['results_s']:.1f} s; a cell is {sweep['bytes'] / sweep['cells'] / 1e3:.0f} kB.",
        "",
        "| on | workers | seconds | cells/s | speed-up | a second sweep, s |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {run['on']} | {run['workers']} | {run['wall_s']:.0f} | {run['cells_per_s']:.1f} "
            f"| {alone[run['on']] / run['wall_s']:.2f} | {run['again_s']:.1f} |"
            for run in sweep["runs"]
        ),
        "",
    ]


#: What the packages of `arborsim` do in a search.
_DO = {
    "machine": "pricing, and the simulated clock",
    "policies": "decisions",
    "memory": "tokens and bytes of each tier, moves",
    "core": "trees, tables, checks of settings",
    "run": "the controller and its meters",
    "bank": "walking the thoughts, results",
    "trace": "reading the bank, events of a walk",
    "signals": "scores",
    "search": "what the search expands",
}


def _search(search: dict[str, Any]) -> list[str]:
    """Where the time of a search goes."""
    functions = [f"`{name}` {100 * share:.0f}%" for name, share in search["functions"].items()]
    return [
        "## A search",
        "",
        f"`arborsim search` with {search['algorithms'].replace(',', ', ')} at widths "
        f"{search['widths'].replace(',', ' and ')}, each under",
        f"{search['policies'].replace(',', ' and ')}, on {search['problems']} problems: "
        f"{search['replays']} replays in {search['seconds']:.1f} s of the processor",
        "(`python benchmarks/search.py`). Which package was running, by sampling:",
        "",
        "| package | share | what it does |",
        "|---|---:|---|",
        *(
            f"| `{name}` | {100 * share:.0f}% | {_DO[name]} |"
            for name, share in search["packages"].items()
            if name in _DO
        ),
        "",
        "The functions with the largest shares are",
        f"{', '.join(functions[:4])}:",
        "none stands out, and what is left is the number of events of many short searches.",
        "",
    ]


def _kernels(kernels: dict[str, Any]) -> list[str]:
    """Kernels that were left out of the tables, and interpolated from the others."""
    lines = [
        "## Measured kernels, interpolated",
        "",
        "What is left out of a shipped table is interpolated from the rest: absolute errors,",
        "median / 90th percentile. Products are sums over those of a layer, of "
        f"{len(kernels['layers'])} models on 1 to",
        "8 GPUs; *shape*: its neighbours of the same output width are there; *width*: none is.",
        "Decoding is up to 512 tokens. Attention is left out by number of heads. *Cached*:",
        "products of up to 64 tokens that took less than reading the weights from memory does,",
        "so that a cache had them; in a model it would not. Other types:",
        "`reports/benchmarks/kernels.json`.",
        "",
        "| GPU, engine, type | decode: shape | width | prefill: shape | width | cached "
        "| decode attention | prefill attention |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, errors in kernels["errors"].items():
        for kind in ("bf16", "fp8"):
            if kind not in errors["product"]:
                continue
            of = errors["product"][kind]
            cells = [
                _error(of[left_out][phase])
                for phase in ("decode", "prefill") for left_out in ("shape", "width")
            ]  # fmt: skip
            cells.append(f"{100 * of['cached']:.0f}%")
            cells += [_error(errors[table].get(kind)) for table in ("decode", "prefill")]
            lines.append(f"| {name} {kind} | {' | '.join(cells)} |")
    return [*lines, ""]


def _error(shares: dict[str, float] | None) -> str:
    return f"{100 * shares['median']:.1f} / {100 * shares['p90']:.0f}%" if shares else "-"


def main() -> None:
    PAGE.write_text(page({n: json.loads((FIGURES / f"{n}.json").read_text()) for n in NAMES}))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
