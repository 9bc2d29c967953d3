"""What the searches of `benchmarks/searches.py` show: sentences computed from their figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from benchmarks.searches_depth import PAPER, Depths, sentence
from benchmarks.searches_figures import Cell, Ratio, Searches, difference_text

#: Whose budgets are quoted of those that policies run at.
QUOTED = "0.5"


def findings(banks: Mapping[str, Searches], depths: Depths) -> list[str]:
    """One paragraph each, of the banks that there are."""
    full = [s for s in banks.values() if s.rebase(s.facts["widths"][0]) in s.groups]
    grown = [s for s in full if len(s.facts["widths"]) > 1]
    own = [s for s in full if s.name != "signals"]  # a part of another bank's problems
    found = [sentence(depths), *_deep(banks), *_reductions(grown), *_rule(grown)]
    found += [*_repeats(banks), *_bound(own), *_peak(grown)]
    found += [_widths(s) for s in grown]
    found += [_best(s, s.facts["widths"][-1]) for s in grown]
    for searches in full:
        if searches.facts["policies"]:
            found += _policies(searches)
    return found + _speed(grown)


def _reductions(banks: Iterable[Searches]) -> list[str]:
    """ETS as it is by default, on trees of three levels."""
    found = [
        f"`{searches.name}` {width}: {_kv(searches, Cell('ets', '', width))}"
        for searches in banks
        for width in searches.facts["widths"]
    ]
    if not found:
        return []
    return [
        "KV size of ETS (lambda_b 1, lambda_d 1) against REBASE on trees of three levels, times "
        f"less: {'; '.join(found)}."
    ]


def _kv(searches: Searches, cell: Cell) -> Ratio:
    return searches.ratio(cell, searches.rebase(cell.width), "kv_tokens")


def _rule(banks: Iterable[Searches]) -> list[str]:
    """lambda_b by the paper's rule, and at its largest."""
    found = []
    for searches in banks:
        taken, none, most = [], [], []
        for width in searches.facts["widths"]:
            for algorithm in ("ets", "ets-kv"):
                chosen, tried = searches.chosen(algorithm, width)
                if len(tried) < 2:
                    continue
                if chosen is None:
                    none.append(f"{algorithm} {width}")
                else:
                    taken.append(
                        f"{algorithm} {width}: {chosen.lambda_b:g}, {_worth(searches, chosen)}"
                    )
                largest = max(tried, key=lambda cell: cell.lambda_b)
                most.append(f"{algorithm} {width}: {_worth(searches, largest)}")
        if not most:
            continue
        nothing = f"; no value is good enough for {', '.join(none)}" if none else ""
        found.append(
            f"The paper's rule (the largest lambda_b in [1, 2] that costs at most 0.2 points) on "
            f"`{searches.name}` takes {'; '.join(taken) or 'nothing'}{nothing}. It chooses on the "
            f"{searches.facts['problems']} problems that are shown, which flatters it. At the "
            f"largest: {'; '.join(most)}."
        )
    return found


def _worth(searches: Searches, cell: Cell) -> str:
    points = difference_text(searches.paired(cell, searches.rebase(cell.width)))
    return f"{_kv(searches, cell)} times less KV at {points} points"


def _peak(banks: Iterable[Searches]) -> list[str]:
    """What ETS does to the largest size, not to the sum."""
    parts = []
    for searches in banks:
        width = searches.facts["widths"][-1]
        cell, reference = Cell("ets", "", width), searches.rebase(width)
        peak = searches.ratio(cell, reference, "peak_held_kv_bytes")
        area = searches.ratio(cell, reference, "held_kv_byte_s")
        parts.append(f"`{searches.name}` {width}: peak {peak}, byte-seconds {area}")
    if not parts:
        return []
    return [
        "Of what a search holds (given up is freed), ETS needs less than REBASE by: "
        f"{'; '.join(parts)}. A peak that does not move is that of the first level, where all "
        "thoughts stand before anything could be pruned."
    ]


def _repeats(banks: Mapping[str, Searches]) -> list[str]:
    """Do repeated thoughts make room for ETS?"""
    found = []
    for reward in ("verifier", "value"):
        both = [banks.get(f"{reward}-{what}") for what in ("all", "distinct")]
        if None in both:
            continue
        going, dead = (searches for searches in both if searches is not None)
        width = going.facts["widths"][-1]
        cell = Cell("ets", "", width)
        with_, without = _kv(going, cell), _kv(dead, cell)
        apart = with_.low > without.high or with_.high < without.low
        verb = "changes" if apart else "does not visibly change"
        found.append(
            f"Letting repeated thoughts go on, as the paper does, {verb} what ETS saves at width "
            f"{width} with the {reward} as reward: {with_} with them, {without} without."
        )
    return found


def _bound(banks: Iterable[Searches]) -> list[str]:
    """What ETS could save at most."""
    parts = []
    for searches in banks:
        for text, own in searches.facts["candidate_tokens"].items():
            rebase = searches.groups[searches.rebase(int(text))]["kv_tokens"].sum()
            beam = _kv(searches, Cell("beam-4", "", int(text)))
            parts.append(f"`{searches.name}` {text}: {rebase / sum(own):.2f} (beam-4 {beam})")
    if not parts:
        return []
    return [
        "ETS saves ancestors, while the candidates' own tokens stay as many as the width allows. "
        "REBASE's KV size over the own tokens of its candidates is what it could save at most with "
        "as many candidates of the same lengths (in brackets what beam-4 gets, which keeps four "
        f"states whatever the width): {'; '.join(parts)}. More can come only from fewer "
        "or shorter candidates. The shallower the trees, the less there is to save: those of "
        "game24 have three levels, `chain` about six, `chain-deep` some thirty."
    ]


def _widths(searches: Searches) -> str:
    """Accuracy against width."""
    low, high = searches.facts["widths"][0], searches.facts["widths"][-1]
    rises: list[str] = []
    falls: list[str] = []
    other: list[str] = []
    for cell in searches.cells(width=low):
        wide = Cell(cell.algorithm, "", high)
        if wide not in searches.groups:
            continue
        pair = searches.paired(wide, cell)
        bottom, top = pair.interval()
        to = rises if bottom > 0 else falls if top < 0 else other
        to.append(f"{cell.algorithm} {difference_text(pair)}")
    right = [str(searches.accuracy(searches.rebase(w))[0]) for w in searches.facts["widths"]]
    named = (("rises", rises), ("falls", falls), ("cannot be told to change", other))
    parts = [f"{what} for {', '.join(rows)}" for what, rows in named if rows]
    return (
        f"REBASE on `{searches.name}` is right in {', '.join(right)} of "
        f"{searches.facts['problems']} at widths {', '.join(map(str, searches.facts['widths']))}. "
        f"From {low} to {high} accuracy, in points, {'; '.join(parts)}."
    )


def _deep(banks: Mapping[str, Searches]) -> list[str]:
    """The same model and task with a few levels, and with a level per line."""
    parts = []
    for name, what in (("chain-deep", "a line a thought"), ("chain", "four lines a thought")):
        searches = banks.get(name)
        if searches is None:
            continue
        (width,) = searches.facts["widths"]
        levels = searches.groups[searches.rebase(width)]["selections"].mean()
        cells = [
            cell
            for swept in (False, True)
            for cell in searches.cells(width=width, swept=swept)
            if cell.algorithm.startswith("ets") and not np.isnan(cell.lambda_b)
        ]
        worth = "; ".join(f"{cell.label} {_worth(searches, cell)}" for cell in cells)
        low, high = PAPER[width]
        parts.append(
            f"{what} (`{name}`, {levels:.0f} selections on average, width {width}, n = "
            f"{searches.facts['problems']}; the paper: {low} to {high}): {worth}"
        )
    return [f"Thoughts of a model, {'. '.join(parts)}."] if parts else []


def _best(searches: Searches, width: int) -> str:
    """Which searches differ from REBASE in accuracy."""
    reference = searches.rebase(width)
    better: list[str] = []
    worse: list[str] = []
    rest = 0
    for cell in searches.cells(width=width):
        if cell == reference:
            continue
        low, high = searches.paired(cell, reference).interval()
        if low > 0:
            better.append(cell.algorithm)
        elif high < 0:
            worse.append(cell.algorithm)
        else:
            rest += 1
    right, judged = searches.accuracy(reference)
    return (
        f"At width {width} on `{searches.name}` REBASE is right in {right} of {judged}; better: "
        f"{', '.join(better) or 'none'}; worse: {', '.join(worse) or 'none'}; not distinguished: "
        f"{rest}."
    )


def _policies(searches: Searches) -> list[str]:
    """Pruning and managing, each alone and together."""
    width, names = searches.facts["widths"][0], searches.facts["managed"]
    reference = searches.rebase(width)

    def less(cell: Cell, how: str) -> str:
        own = ("peak_held_kv_bytes", "held_kv_byte_s") if how == "held" else _HBM
        peak, area = (
            searches.ratio(cell, reference, figure, against)
            for figure, against in zip(own, _HBM, strict=True)
        )
        return f"{cell.algorithm} {peak} and {area}"

    parts = [
        "freeing what is given up: " + ", ".join(less(Cell(n, "", width), "held") for n in names)
    ]
    for policy in searches.facts["policies"]:
        cells = [Cell(name, "", width, policy, QUOTED) for name in names]
        rows = [
            f"{less(cell, 'hbm')} (n = {len(searches.groups[cell])})"
            for cell in cells
            if cell in searches.groups
        ]
        parts.append(f"{searches.label(policy)} at {QUOTED}: {', '.join(rows) or 'no search fits'}")
    return [
        f"Peak bytes and byte-seconds at width {width} on `{searches.name}`, times less than "
        f"REBASE with all of its tree kept: {'; '.join(parts)}. A budget is a share of each "
        "search's own tokens, so a policy takes as much from either search; freeing what is given "
        "up costs no answer at all, and is not part of the policies' peaks."
    ]


_HBM = ("peak_hbm_kv_bytes", "hbm_kv_byte_s")


def _speed(banks: Iterable[Searches]) -> list[str]:
    found = []
    for searches in banks:
        seconds, others = (searches.facts["cpu_s"].get(k, 0.0) for k in ("width 64", "others"))
        kinds = sum(1 for _ in searches.cells(width=64))
        rest = searches.facts["algorithms"] - kinds
        found.append(
            f"`{searches.name}` {seconds:.0f} s for {kinds} searches, and {others:.0f} s for the "
            f"{rest} that have no width together with the sweep of lambda_b at all widths"
        )
    if not found:
        return []
    return [f"CPU time at width 64, 100 problems, one core: {'; '.join(found)}."]


def limits(banks: Mapping[str, Searches]) -> list[str]:
    """What this cannot say, with the size of what it would miss."""
    halves = []
    for searches in banks.values():
        width = searches.facts["widths"][-1]
        cell = Cell("ets", "", width)
        if cell in searches.groups:
            low, high = searches.paired(cell, searches.rebase(width)).interval()
            halves.append(100 * (high - low) / 2)
    wide = f"{np.median(halves):.0f}" if halves else "unknown"
    return [
        f"Whether ETS costs accuracy: the intervals of its difference to REBASE are about {wide} "
        "points wide to either side, the paper's margin is 0.2 points. That it costs nothing "
        "cannot be shown with this many problems, only that no large loss is there.",
        "What ETS costs in accuracy on deep trees of a real model: `chain-deep` has a tiny model, "
        "and the answers of synthetic trees are drawn.",
        "How searches rank on a real model: the thoughts are those of a tiny model trained on the "
        "task, the rewards are a noisy exact verifier or the same model's own judgement, and "
        "embeddings are its hidden states, not those of a sentence model.",
        "Why best-of-n falls with the noisy verifier: rewards are clipped to 1, so that many "
        "finished chains share the top score, and the one that ended first wins; on the first five "
        "problems that was a broken chain each time. Another way to break ties would give other "
        "figures for it.",
        "Differences one by one: there are about ten comparisons per width, each at 95%, not "
        "corrected for their number.",
    ]
