"""The golden cases: command lines, and what is read of their results.

In arguments, ``{tmp}`` is an empty folder; paths are relative to the root of the repository.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRACES = ("chain-linear", "chain-tree", "chain-vectors", "game24-tot")
RECALLS = ("stage", "stream", "near", "ondemand")
#: Forms that are not the authors': one ranking for the whole model needs no vectors.
_SHARED = ("--set", "h2o.per=shared")
_OLDER = (*_SHARED, "--set", "raas.variant=median")
_MODEL = ("--gpu", "h100", "--model", "llama-3.1-8b")


@dataclass(frozen=True)
class Case:
    """One command line.

    Attributes
    ----------
    name : str
    arguments : tuple of str
    quick : bool
        Part of the normal tests.
    keys : tuple of str
        Columns that name a row of a result table.
    skip : tuple of str
        Top-level keys of the JSON that are not stored.
    text : bool
        What is printed is kept as text, numbers of it are compared.
    copies : tuple of (str, str)
        Files copied into ``{tmp}`` first.
    unread : tuple of str
        Files in ``{tmp}`` whose content is not looked at.
    needs : str
        Module without which the case is left out.
    code : int
        Exit code.
    """

    name: str
    arguments: tuple[str, ...]
    quick: bool = False
    keys: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    text: bool = False
    copies: tuple[tuple[str, str], ...] = field(default=())
    unread: tuple[str, ...] = ()
    needs: str = ""
    code: int = 0


_REPLAY_KEYS = ("trace", "episode", "policy", "budget")


def _replay(name: str, trace: str, *more: str, quick: bool = False, count: int = 1) -> Case:
    arguments = (
        "replay", f"traces/{trace}.parquet", "--episodes", str(count), *more,
        *(() if "--no-oracle" in more else ("--oracle",)), "--json", "--out", "{tmp}/out.parquet",
    )  # fmt: skip
    return Case(f"replay-{name}", arguments, quick, _REPLAY_KEYS, ("episodes",))


def _replays() -> list[Case]:
    every = ("--policy", "all", "--budget", "0.5,0.75", *_OLDER)
    # What never leaves HBM costs the same in all recall modes; two traces say so, two are quicker.
    moving = ("--policy", "h2o,hierarchy,redundancy,attn-val-redundancy,staircase,arbor-epi,"
              "arborkv", "--budget", "0.5,0.75", "--no-oracle", *_SHARED)  # fmt: skip
    short = ("chain-vectors", "game24-tot")
    cases = [
        _replay(
            f"{trace}-{recall}", trace, *(every if recall == "stage" or trace in short else moving),
            *_MODEL, "--recall", recall, count=2 if trace == "game24-tot" else 1,
        )
        for trace in TRACES
        for recall in RECALLS
    ]  # fmt: skip
    few = ("--policy", "h2o,hierarchy,arborkv,staircase", "--budget", "0.4", *_SHARED)
    ddr = ("--policy", "hierarchy,staircase,arbor-epi,arborkv", "--budget", "0.5")  # fmt: skip
    cases += [
        _replay("own-geometry", "chain-vectors", *every, quick=True),
        _replay("own-geometry-tree", "chain-tree", *few),
        _replay("own-geometry-game24", "game24-tot", *few, quick=True, count=3),
        _replay("linear-second", "chain-linear", *few, *_MODEL, "--first", "1"),
        _replay("per-head", "chain-vectors", "--policy", "h2o,tova,arkv,snapkv,rkv",
                "--budget", "0.5,0.75", *_MODEL, quick=True, count=2),
        _replay("arkv", "chain-vectors", "--policy", "arkv,arkv-origin,arkv-quant",
                "--calibration", "chain-arkv", "--budget", "0.4,0.6", *_MODEL, count=2),
        _replay("arborkv-calibrated", "chain-tree", "--policy", "arborkv", "--calibration",
                "chain-msve", "--budget", "0.4", *_MODEL, count=2),
        _replay("tokens", "chain-linear", "--policy", "h2o,epikv,streaming-llm", "--budget",
                "768,1024", *_SHARED, *_MODEL),
        _replay("tight", "game24-tot", "--policy", "all", "--budget", "0.25,0.05", *_OLDER,
                *_MODEL),
        _replay("events", "game24-tot", *ddr, *_MODEL, "--event-by-event", quick=True),
        _replay("events-tree", "chain-tree", *ddr, *_MODEL, "--event-by-event"),
        _replay("matrices", "chain-tree", *few, *_MODEL, "--keep-matrices"),
        _replay("no-quality", "chain-tree", *few, *_MODEL, "--no-quality", "--no-oracle"),
        _replay("no-tree-attention", "chain-tree", *ddr, *_MODEL, "--no-tree-attention"),
        _replay("workers", "game24-tot", *few, *_MODEL, "--jobs", "2", count=2),
        _replay("hierarchy-set", "chain-tree", "--policy", "hierarchy,redundancy", "--set",
                "evict_ratio=0.05", "--set", "hierarchy.quantised_ratio=0.3", "--budget", "0.5",
                *_MODEL),
        _replay("deepseek-fp8", "chain-tree", "--policy",
                "hierarchy,arbor-epi,arborkv", "--budget", "0.5", "--gpu", "l40s", "--host",
                "ddr4-256gb", "--model", "deepseek-v2-lite", "--kv-dtype", "fp8"),
        _replay("h200", "chain-linear", *few, "--gpu", "h200", "--model", "qwen3-8b"),
    ]  # fmt: skip
    for pages in ("16", "64"):
        for recall in RECALLS:
            quick = pages == "16" and recall in ("stage", "ondemand")
            cases.append(
                _replay(f"game24-pages-{pages}-{recall}", "game24-tot", *ddr, *_MODEL,
                        "--page-size", pages, "--recall", recall, quick=quick, count=2)
            )  # fmt: skip
            cases.append(
                _replay(f"tree-pages-{pages}-{recall}", "chain-tree", *ddr, *_MODEL,
                        "--page-size", pages, "--recall", recall)
            )  # fmt: skip
    return cases


def _explained() -> list[Case]:
    cases = []
    policies = ("--policy", "h2o,arkv,hierarchy,staircase,arborkv,thinkv-paper", *_SHARED)
    for trace in ("chain-vectors", "chain-tree", "game24-tot", "chain-linear"):
        chosen = policies if trace == "chain-vectors" else (
            "--policy", "h2o,hierarchy,staircase,arborkv,arbor-epi", *_SHARED)  # fmt: skip
        for recall in RECALLS:
            arguments = ("replay", f"traces/{trace}.parquet", *chosen, "--budget", "0.5",
                         "--episodes", "1", *_MODEL, "--recall", recall, "--explain",
                         "--oracle")  # fmt: skip
            quick = trace == "chain-vectors" and recall == "stream"
            cases.append(Case(f"explain-{trace}-{recall}", arguments, quick, text=True))
    return cases


def _searches() -> list[Case]:
    keys = ("episode", "algorithm", "search", "width", "options", "setting", "policy", "budget")

    def one(name: str, bank: str, *more: str, quick: bool = False) -> Case:
        arguments = ("search", bank, *more, "--out", "{tmp}/out.parquet")
        return Case(f"search-{name}", arguments, quick, keys, text=True)

    bank = "tests/golden/bank.parquet"
    return [
        one("all", bank, "--algorithm", "all", "--width", "8,16", *_MODEL),
        one("policies", bank, "--algorithm", "rebase,ets,tot-bfs", "--width", "16",
            "--policy", "full,streaming-llm,h2o,hierarchy,arborkv", "--budget", "0.5,0.75",
            *_SHARED, *_MODEL, quick=True),
        one("policies-stream", bank, "--algorithm", "rebase,dpts", "--width", "8", "--policy",
            "full,hierarchy,staircase,arbor-epi", "--budget", "0.6", "--recall", "stream", *_MODEL),
        one("own-geometry", bank, "--algorithm", "rebase,ets,beam-4", "--width", "8",
            "--gpu", "h200", "--no-tree-attention", "--page-size", "16"),
        one("sweep", bank, "--algorithm", "ets,ets-kv", "--sweep", "lambda_b=1,1.5,2", *_MODEL),
        one("keep-duplicates", bank, "--algorithm", "tot-bfs", "--set", "tot-bfs.any_of=5",
            "--keep-duplicates", *_MODEL),
    ]  # fmt: skip


def _plans() -> list[Case]:
    def one(name: str, *arguments: str, quick: bool = False) -> Case:
        return Case(f"plan-{name}", ("plan", *arguments), quick, ("candidate", "name"))

    recorded, drawn = "tests/golden/workload.toml", "tests/golden/generated.toml"
    out = ("--json", "--out", "{tmp}/out.json")
    return [
        one("recorded", recorded, *out, quick=True),
        one("generated", drawn, *out, "--perfetto", "{tmp}/perfetto.json"),
        one("table", drawn, "--out", "{tmp}/out.parquet", "--json"),
        one("load", drawn, "--load", "30", "--gpu", "l40s", *out),
        Case("plan-explained", ("plan", recorded, "--explain"), text=True),
        Case("plan-example", ("plan", "--example"), quick=True, text=True),
    ]


def _facts() -> list[Case]:
    gpus = ("h100", "h200", "l40s", "rtx4090", "a100-80", "b200", "rtx6000-ada")
    models = ("llama-3.1-8b", "deepseek-v2-lite", "qwen3-8b")
    policies = ("h2o", "arborkv", "hierarchy", "staircase", "arkv", "arbor-epi", "snapkv")
    cases = [
        Case("hardware", ("hardware", "--json"), quick=True),
        Case("models", ("models", "--json"), quick=True),
        Case("policies", ("policies", "--json"), quick=True),
        Case("hardware-host", ("hardware", "h100", "--host", "ddr5-2tb", "--json"), quick=True),
        Case("models-fp8", ("models", "llama-3.1-8b", "--kv-dtype", "fp8", "--gpu", "l40s",
                            "--json"), quick=True),
        Case("generate", ("generate", "--out", "{tmp}/made.parquet", "--searches", "2", "--depth",
                          "uniform:low=2,high=4", "--first", "6", "--branching", "2", "--pruned",
                          "0.5", "--solved", "0.6", "--thought-tokens",
                          "lognormal:median=40,sigma=0.5,most=200"), quick=True),
    ]  # fmt: skip
    for command, names in (("hardware", gpus), ("models", models), ("policies", policies)):
        for name in names:
            cases.append(Case(f"{command}-{name}", (command, name, "--json"), quick=True))
    for trace in TRACES:
        path = f"traces/{trace}.parquet"
        cases.append(Case(f"inspect-{trace}", ("inspect", path, "--json"), trace == TRACES[2]))
        text = ("inspect", path, "--all", "--episodes", "1")
        cases.append(Case(f"inspect-{trace}-text", text, trace == TRACES[2], text=True))
    return cases


def _pages() -> list[Case]:
    report = ("--report", "{tmp}/page.html")
    validated = "tests/golden/validation.parquet"
    compared = ("h2o,tova,raas,vatp,snapkv,segment-hs,random,streaming-llm,keydiff,kv-value,epikv,"
                "arkv-quant")  # fmt: skip
    return [
        Case("replay", ("replay", "traces/chain-tree.parquet", "traces/chain-vectors.parquet",
                        "--policy", "full,h2o,hierarchy,arborkv", "--budget", "0.5,0.75", *_SHARED,
                        "--episodes", "1", "--oracle", *_MODEL, *report), text=True),
        Case("replay-quick", ("replay", "traces/chain-vectors.parquet", "--policy",
                              "h2o,staircase,arkv", "--budget", "0.5", *_SHARED, "--episodes", "1",
                              *_MODEL, "--view", "matrix", *report),
             quick=True, text=True),
        Case("search", ("search", "tests/golden/bank.parquet", "--algorithm",
                        "rebase,ets,beam-4,tot-bfs", "--width", "8,16",
                        "--policy", "full,streaming-llm", "--budget", "0.75",
                        *_MODEL, *report), quick=True, text=True),
        Case("plan", ("plan", "tests/golden/workload.toml", *report), text=True),
        Case("live", ("live", "--task", "game24", "--policy", "h2o,hierarchy", "--budget", "0.6",
                      "--episodes", "2", "--set", "keep=2", "--set", "h2o.sinks=2", *_SHARED,
                      "--out", "{tmp}/live.jsonl", "--resume", *report, "--json"),
             copies=(("tests/golden/live.jsonl", "live.jsonl"),), needs="torch"),
        Case("live-table", ("live", "--task", "game24", "--policy", "h2o,hierarchy", "--budget",
                            "0.6", "--episodes", "2", "--set", "keep=2", "--set", "h2o.sinks=2",
                            *_SHARED, "--out", "{tmp}/live.jsonl", "--resume"),
             copies=(("tests/golden/live.jsonl", "live.jsonl"),), needs="torch", text=True),
        Case("validation", ("validate", "--gpu", "reports/calibration/cpu-epyc.toml", "--task",
                            "game24", "--budget", "0.5,0.7", "--episodes", "2", "--policy",
                            compared, *_OLDER, "--out", "{tmp}/found", "--resume"),
             copies=((validated, "found/results.parquet"),), unread=("results.parquet",),
             needs="torch", text=True),
    ]  # fmt: skip


CASES = [*_replays(), *_explained(), *_searches(), *_plans(), *_facts(), *_pages()]
assert len({case.name for case in CASES}) == len(CASES), "names are unique"
