"""The experiments of `benchmarks/quality.py`: what is searched, and the arms compared on it.

An arm is a policy with settings under a budget.  Labels and budgets name arms in the stored rows,
so that renaming one means running it again.  ``h2o, shared`` ranks once for the whole model and
``raas, median`` by EpiKV's medians; bare names are the authors' forms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from arborsim.core.tiers import Budget
from arborsim.play.episode import Cell
from arborsim.policies.registry import build, find, parameters

#: Forms that are not the authors': one ranking for the whole model, and EpiKV's medians.
_SHARED, _MEDIAN = {"per": "shared"}, {"variant": "median"}
LINES = 32
PROMPT = 5 * LINES + 4  # tokens of a chain program of LINES lines
#: Shares of the whole search's tokens; the prompt is always kept.
CLIFF = ("0.95", "0.87", "0.81", "0.69", "0.56")
SHORT = ("0.95", "0.85", "0.7")  # of chains of 12 lines


@dataclass(frozen=True)
class Arm:
    """One cell: a policy with settings, under a budget."""

    label: str
    policy: str
    budget: str
    settings: dict[str, str] = field(default_factory=dict)

    def cell(self) -> Cell:
        return Cell(build(self.policy, self.settings), Budget.parse(self.budget))


@dataclass(frozen=True)
class Experiment:
    """What is searched, and the arms that are compared on it."""

    search: dict[str, Any]
    arms: tuple[Arm, ...]


CHAIN = {"model": "chain", "task_options": {"lines": LINES}}
GAME = {
    "model": "game24",
    "search": "tot-bfs",
    "search_options": {"keep": 5, "children": 8},
    "temperature": 0.7,
}
TREE = {
    "model": "chain",
    "task_options": {"lines": 24, "lines_per_thought": 4},
    "search": "tot-dfs",
    "temperature": 1.0,
    "dead_penalty": 0.3,  # the value sees dead ends late: the search has to come back, trees grow
}
#: No answer ends these searches: each goes on for as many thoughts, one leaf at a time, until its
#: tree is several times a path, as those that ArborKV's paper measures.
BUSHY = {
    "model": "chain",
    "task_options": {"lines": 24, "lines_per_thought": 4},
    "search": "dpts",
    "search_options": {"width": 1, "children": 3, "steps": 64, "accept": 2.0},
    "temperature": 1.0,
    "dead_penalty": 0.3,
}
FULL = Arm("full", "full", "1")


def _needed(*budgets: str, recent: str = "16") -> list[Arm]:
    """The bound for answers: alone, whatever the budget, and with what else a budget has room for.

    Alone its peak is what the task needs.
    """
    own = {"recent": recent}
    alone = Arm("needed, nothing else", "needed", "1", own | {"fill": "false"})
    return [alone, *(Arm("needed", "needed", budget, own) for budget in budgets)]


def _cliff() -> Experiment:
    kinds = {
        "random": ("random", {"recent": "16"}),
        "streaming": ("streaming-llm", {"sinks": str(PROMPT)}),
        "h2o, shared": ("h2o", _SHARED | {"pin_prompt": "true", "recent_share": "0.05"}),
        "epikv": ("epikv", {"recent": "16"}),
    }
    arms = [
        Arm(label, name, budget, settings)
        for label, (name, settings) in kinds.items()
        for budget in CLIFF
    ]
    for r in ("0.05", "0.1", "0.3", "0.5", "0.7"):
        settings = {
            "evict": "of-total", "evict_ratio": r, "hbm_ratio": "1", "recent": "16",
            "interval": "16",
        }  # fmt: skip
        arms.append(Arm(f"hierarchy r={r}", "hierarchy", "1", settings))
    pinned: dict[str, tuple[str, dict[str, str]]] = {
        "tova": ("tova", {"pin_prompt": "true"}),
        "raas, median": ("raas", _MEDIAN),
        "rkv": ("rkv", {"pin_prompt": "true", "interval": "16"}),
        "quest, 2 layers dense": ("quest", {"pin_prompt": "true"}),
        "adakv": ("adakv", {"pin_prompt": "true", "window": "16"}),
        "pyramidkv": ("pyramidkv", {"pin_prompt": "true", "window": "16"}),
    }
    arms += [
        Arm(label, name, budget, settings)
        for label, (name, settings) in pinned.items()
        for budget in ("0.95", "0.87", "0.81")
    ]
    arms += [Arm("raas, median", "raas", budget, _MEDIAN) for budget in ("0.69", "0.56")]
    return Experiment(CHAIN, (FULL, *arms, *_needed(*CLIFF, "0.5", "0.4", "0.25")))


def _family() -> Experiment:
    names = ("hs-variance", "epikv", "band-adaptive", "kv-key", "kv-value", "lag-kv", "attn-hs",
             "key-norm", "keydiff")  # fmt: skip
    arms = [
        Arm(name, name, budget, {"recent": "16"}) for name in names for budget in ("0.87", "0.69")
    ]
    return Experiment(CHAIN, (FULL, *arms))


def _epikv_rivals() -> Experiment:
    """EpiKV's family against the methods of its paper, and what its parts are good for.

    ThinKV keeps at most 64 of 128 tokens of a segment, so it never uses these budgets up; its
    short segments keep the share that the budgets leave.  Inverted arms swap both layers: they rank
    by ``z_B - z_A``.
    """
    kept = {"pin_prompt": "true", "recent": "16"}
    short = {"segment": "32", "keep_r": "32", "keep_e": "28", "keep_t": "20"}
    inverted = {"layer_a": str(21 / 32), "layer_b": str(10 / 32)}
    raw = {"window": "1"}
    both, one = ("0.95", "0.87"), ("0.87",)
    kinds: list[tuple[str, str, dict[str, str], tuple[str, ...]]] = [
        ("thinkv", "thinkv", {}, both),
        ("thinkv, short segments", "thinkv", short, both),
        ("segment-hs", "segment-hs", {}, both),
        ("segment-hs, short segments", "segment-hs", short, both),
        ("epikv, inverted", "epikv", inverted, ("0.95", "0.87", "0.69", "0.56")),
        ("hs-variance, inverted", "hs-variance", inverted, one),
        ("hs-variance, not smoothed", "hs-variance", raw, one),
        ("kv-key, not smoothed", "kv-key", raw, ("0.95", "0.87", "0.81", "0.69", "0.56")),
        ("kv-value, not smoothed", "kv-value", raw, ("0.87", "0.69")),
        *((name, name, {}, ("0.95",)) for name in (
            "hs-variance", "band-adaptive", "kv-key", "kv-value", "lag-kv", "attn-hs")),
    ]  # fmt: skip
    arms = [
        Arm(label, name, budget, kept | settings)
        for label, name, settings, budgets in kinds
        for budget in budgets
    ]
    # As the paper runs H2O: four sinks, prompt evictable, sums from the first generated token on.
    h2o = _SHARED | {"sinks": "4", "recent_share": "0.05", "count_prompt": "false"}
    arms += [
        Arm("h2o, shared, prompt evictable", "h2o", budget, h2o)
        for budget in ("0.95", "0.87", "0.5", "0.25")
    ]
    return Experiment(CHAIN, (FULL, *arms))


def _grid() -> Experiment:
    arms = []
    for beta in ("1", "0.5", "0.25"):
        for r in ("0", "0.1", "0.3"):
            settings = {
                "hbm_ratio": beta, "evict_ratio": r, "evict": "of-total", "recent": "16",
                "interval": "16",
            }  # fmt: skip
            arms.append(Arm(f"beta={beta} r={r}", "hierarchy", "1", settings))
    return Experiment(CHAIN, (FULL, *arms))


def _hierarchy() -> Experiment:
    """The memory hierarchy at its paper's own ratios (its Tables 3, 4, 12 and 17).

    Its window of 128 tokens and interval of 64 belong to chains of 1,422 tokens; searches have 263
    here, so both are scaled by that.  The share r is of the candidates of each decision, as its
    Algorithm 1 is printed.
    """
    scaled = {"recent": "24", "interval": "12"}
    arms = [
        Arm(f"beta={beta} r={r}", "hierarchy", "1", scaled | {"hbm_ratio": beta, "evict_ratio": r})
        for beta in ("0.5", "0.3", "0.7")
        for r in ("0.05", "0.03", "0.1")
    ]
    half = scaled | {"hbm_ratio": "0.5", "evict_ratio": "0.05"}
    arms.append(Arm("8 bit in DDR r=0.05", "hierarchy", "1", half | {"quantised_ratio": "1"}))
    keys = {"sketched": "false"}
    scores = {
        "redundancy": ("redundancy", {}),
        "attention x value": ("attn-val-redundancy", {"weight": "0"}),
        "attention x value - redundancy": ("attn-val-redundancy", {}),
        "redundancy, whole keys": ("redundancy", keys),
        "attention x value - redundancy, whole keys": ("attn-val-redundancy", keys),
    }
    arms += [Arm(label, name, "1", half | own) for label, (name, own) in scores.items()]
    rkv = {"pin_prompt": "true", "interval": "12"}
    arms += [Arm("rkv", "rkv", budget, rkv) for budget in ("0.83", "0.61", "0.5")]
    return Experiment(CHAIN, (FULL, *arms))


_TAILORS = ("arkv-origin", "arkv-quant", "arkv")


def _arkv() -> Experiment:
    """ARKV and its baselines: with the prompt evictable, kept, and as the public code decides."""
    own = {"window": "16", "slack": "1"}
    arms = [
        Arm(name, name, budget, own)
        for name in _TAILORS
        for budget in ("0.97", "0.9", "0.8", "0.5", "0.25")
    ]
    arms += [
        Arm(f"{name}, prompt kept", name, budget, own | {"pin_prompt": "true"})
        for name in _TAILORS
        for budget in ("0.95", "0.87", "0.69", "0.5")
    ]
    arms += [
        Arm(f"{name}, as published", name, budget, own | {"as_published": "true"})
        for name in _TAILORS
        for budget in ("0.97", "0.5")
    ]
    return Experiment(CHAIN, (FULL, *arms))


def _trees(search: dict[str, Any], *budgets: str) -> Experiment:
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        "arborkv": ("arborkv", {}),
        "arborkv, no rehydration": ("arborkv", {"rehydrate": "false"}),
        "random": ("random", {"recent": "8"}),
        "streaming": ("streaming-llm", {}),
        "h2o, shared": ("h2o", _SHARED),
        "epikv": ("epikv", {"recent": "8"}),
    }
    arms = [
        Arm(label, name, budget, settings)
        for label, (name, settings) in kinds.items()
        for budget in budgets
    ]
    return Experiment(search, (FULL, *arms, *_needed(*budgets, recent="8")))


def _arborkv_ablations() -> Experiment:
    """Tables 1, 3, 4 and 7 of ArborKV's paper, on trees that are several times a path."""
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        "arborkv": ("arborkv", {}),
        "arborkv, no rehydration": ("arborkv", {"rehydrate": "false"}),
        "thinkv": ("thinkv", {}),
        "streaming": ("streaming-llm", {}),
        "h2o, shared": ("h2o", _SHARED),
        "MSVE only": ("arborkv", {"lambda_distance": "0"}),
        "tail only": ("arborkv", {"retain": "tail", "pin_prompt": "false"}),
        "sinks + tail": ("arborkv", {"retain": "sinks+tail", "pin_prompt": "false"}),
        "sinks + tail + heavy hitters": ("arborkv", {"pin_prompt": "false"}),
        "TAE only": ("arborkv", {"msve": "false"}),
        "no v": ("arborkv", {"use_value": "false"}),
        "no u": ("arborkv", {"use_certainty": "false"}),
        "no a": ("arborkv", {"use_attention": "false"}),
        "no sibling coordination": ("arborkv", {"eta": "1"}),
    }
    arms = [
        Arm(label, name, budget, settings)
        for budget in ("0.25", "0.5")
        for label, (name, settings) in kinds.items()
    ]
    return Experiment(BUSHY, (FULL, *arms))


_OLDER = {
    "random": ("random", {"recent": "16"}),
    "streaming": ("streaming-llm", {}),
    "h2o, shared": ("h2o", _SHARED),
    "epikv": ("epikv", {"recent": "16"}),
}


def _newer(
    search: dict[str, Any], page: str, group: str, residual: str,
    older: dict[str, tuple[str, dict[str, str]]], budgets: tuple[str, ...] = ("0.5", "0.25"),
) -> Experiment:  # fmt: skip
    """Uneven budgets, selection, few bits and newer scores, at budgets that mean the same for all.

    No arm pins the prompt; windows and intervals suit searches of a few hundred tokens, pages of
    `page` tokens and KIVI's `group` and `residual` the length of their thoughts.  `older` policies
    are run next to them.
    """
    kinds: dict[str, tuple[str, dict[str, str]]] = older | {
        "adakv": ("adakv", {"window": "16"}),
        "duoattention": ("duoattention", {"sinks": "4", "recent": "16"}),
        "expected-attention": ("expected-attention", {"interval": "16"}),
        "hs-cosine": ("hs-cosine", {"recent": "16"}),
        "quest": ("quest", {"dense": "0", "page": page}),
        "quest, 2 layers dense": ("quest", {"page": page}),
        "freekv": ("freekv", {"sinks": page, "recent": page, "page": page}),
        "pyramidkv": ("pyramidkv", {"window": "16"}),
    }
    arms = []
    for label, (name, settings) in kinds.items():
        if "pin_prompt" in parameters(find(name)):
            settings = settings | {"pin_prompt": "false"}
        arms += [Arm(label, name, budget, settings) for budget in budgets]
    for bits, outliers in (("8", "0"), ("4", "0"), ("2", "0"), ("2", "0.01")):
        settings = {"bits": bits, "outliers": outliers, "group": group, "residual": residual}
        kept = ", outliers" if float(outliers) else ""
        arms.append(Arm(f"kivi, {bits} bits{kept}", "kivi", "1", settings))
    return Experiment(search, (FULL, *arms))


def _long() -> Experiment:
    """The problems of the shipped trace ``chain-linear``, under policies as they come."""
    kinds: dict[str, tuple[str, dict[str, str]]] = {"h2o, shared": ("h2o", _SHARED)}
    kinds |= {name: (name, {}) for name in ("streaming-llm", "epikv", "arkv", "lag-kv")}
    arms = [
        Arm(label, name, budget, settings)
        for label, (name, settings) in kinds.items()
        for budget in ("0.95", "0.85", "0.7")
    ]
    return Experiment(CHAIN | {"task_options": {"lines": 120}}, (FULL, *arms))


#: Shares of a whole search of task `tail`, of which its prompt is about 0.11.
TAIL = ("0.1", "0.2", "0.3", "0.5", "0.7", "0.9")


def _layer(layer: int, depth: int) -> dict[str, str]:
    """Settings of `band-adaptive` under which one layer decides (the other's share is a 1000th)."""
    at = str(layer / depth)
    return {"a_first": at, "a_last": at, "weight_a": "1000"}


def _tail(model: str, depth: int, layer: int) -> Experiment:
    """A task of which most tokens are read by nothing later, under everything.

    Evictable is all but four sinks and the newest 32 tokens, as far as a policy can protect them;
    arms ``prompt kept`` pin the prompt, too.  ``epikv, one layer`` reads the `layer` of `depth`
    whose hidden-state change agrees best with what the task reads (`benchmarks.claims.epikv`).
    """
    free = {"pin_prompt": "false", "recent": "32"}
    tailor = {"window": "32", "slack": "1"}
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        "random": ("random", free | {"sinks": "4"}),
        "streaming": ("streaming-llm", {}),
        "h2o, shared": ("h2o", _SHARED | {"sinks": "4", "recent_share": "0.1"}),
        "tova": ("tova", {}),
        "snapkv": ("snapkv", {"window": "32"}),
        "rkv": ("rkv", {"window": "32", "interval": "16"}),
        "raas, median": ("raas", _MEDIAN | {"pin_prompt": "false"}),
        **{name: (name, free) for name in ("epikv", "band-adaptive", "hs-variance")},
        "epikv, one layer": ("band-adaptive", free | _layer(layer, depth)),
        "kv-key, not smoothed": ("kv-key", free | {"window": "1"}),
        **{name: (name, tailor) for name in _TAILORS},
    }
    arms = [
        Arm(label, name, budget, settings)
        for label, (name, settings) in kinds.items()
        for budget in TAIL
    ]
    del kinds["snapkv"]  # it cuts the prompt alone
    kinds["streaming"] = ("streaming-llm", {"sinks": "0"})
    arms += [
        Arm(f"{label}, prompt kept", name, budget, settings | {"pin_prompt": "true"})
        for label, (name, settings) in kinds.items()
        for budget in TAIL[1:]
    ]
    for r in ("0.05", "0.1", "0.3", "0.5", "0.7"):
        settings = {
            "evict": "of-total", "evict_ratio": r, "hbm_ratio": "1", "recent": "32",
            "interval": "16",
        }  # fmt: skip
        arms.append(Arm(f"hierarchy r={r}", "hierarchy", "1", settings))
    for bits in ("8", "4", "2"):
        settings = {"bits": bits, "group": "32", "residual": "32"}
        arms.append(Arm(f"kivi, {bits} bits", "kivi", "1", settings))
    return Experiment({"model": model}, (FULL, *_needed(*TAIL, recent="32"), *arms))


def _published(search: dict[str, Any], below: str, *budgets: str) -> Experiment:
    """Methods as their authors run them: no setting differs from theirs but where a label says so.

    H2O ranks for each layer and KV head; a second arm pins its prompt.  RaaS counts pages (by
    medians, as EpiKV's authors have it, it is in other experiments).  SnapKV compresses the prompt
    alone, once: budgets above the prompt are all the same to it, and it has one `below`.
    """
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        "h2o": ("h2o", {}),
        "h2o, prompt kept": ("h2o", {"pin_prompt": "true"}),
        "tova": ("tova", {}),
        "raas": ("raas", {}),
        "rkv": ("rkv", {}),
        "adakv": ("adakv", {}),
    }
    arms = [
        Arm(label, name, budget, settings)
        for label, (name, settings) in kinds.items()
        for budget in budgets
    ]
    arms += [Arm("snapkv", "snapkv", budget, {}) for budget in (*budgets, below)]
    return Experiment(search, (FULL, *arms))


EXPERIMENTS = {
    "cliff": _cliff,
    "published": lambda: _published(CHAIN, "0.3", *CLIFF),
    "published-12": lambda: _published(CHAIN | {"task_options": {"lines": 12}}, "0.3", *SHORT),
    "published-tail": lambda: _published({"model": "tail"}, TAIL[0], *TAIL[2:]),
    "published-deep": lambda: _published({"model": "tail-deep"}, TAIL[0], *TAIL[2:]),
    "family": _family,
    "epikv-rivals": _epikv_rivals,
    "grid": _grid,
    "hierarchy": _hierarchy,
    "arkv": _arkv,
    "game24": lambda: _trees(GAME, "0.7", "0.6", "0.5", "0.25"),
    "chain-tree": lambda: _trees(TREE, "0.5", "0.25"),
    "arborkv-ablations": _arborkv_ablations,
    "long": _long,
    "newer": lambda: _newer(CHAIN, "16", "32", "32", {}),
    "tail": lambda: _tail("tail", 6, 2),
    "tail-deep": lambda: _tail("tail-deep", 24, 8),
    "newer-game24": lambda: _newer(
        GAME,
        "4",
        "8",
        "16",
        _OLDER | {"tova": ("tova", {})} | {each: (each, {"window": "8"}) for each in _TAILORS},
        ("0.5", "0.35", "0.25"),
    ),
}
