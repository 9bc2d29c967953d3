"""Answers counted live and fidelity, in words: what is not the same, and what would decide."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from arborsim.core.statistics import SIGNIFICANT, Score
from arborsim.play.results import ANY, BASELINE, Fidelity, ReplayResult, Row
from arborsim.policies.registry import changed, names
from arborsim.products.replay.answers import Searched, disagreement
from arborsim.report.words import counted, listed, nats

#: Follows answers that were counted on other problems of the trace's task.
OTHER = "*"
#: Tasks whose answers the live backend judges, and the search that each has by default.
_JUDGED = {"chain": "linear", "game24": "tot-bfs"}
_EPISODES = 100
_MOST_NAMED = 6
#: Options of ``arborsim live``, and their defaults, by how a recording calls them.
_OPTIONS = {"noise": 0.1, "dead_penalty": 1.0, "value_floor": 0.3, "split": "test"}


def short(row: Row) -> str:
    """``"140/200"``, the budget where another was counted, and a sign for other problems."""
    found = row.answers
    if found is None:
        return ""
    at = "" if found.own_budget else f" @{found.budget}"
    other = OTHER if any(not each.startswith("budget ") for each in found.differs) else ""
    return f"{found.right}/{found.n}{at}{other}"


def difference(row: Row) -> str:
    """Percentage points less or more than full retention; in brackets where that is not visible."""
    found = row.answers
    if found is None or math.isnan(found.difference) or row.is_baseline:
        return ""
    text = f"{100 * found.difference:+.1f}"
    return text if found.p < SIGNIFICANT else f"({text})"


def score(found: Score) -> str:
    """``"140 of 200 right (70.0%, 95% interval 63.1 to 76.3)"``."""
    return (
        f"{found.right} of {found.n} right ({found.accuracy:.1%}, 95% interval "
        f"{100 * found.low:.1f} to {100 * found.high:.1f})"
    )


def p_value(found: Score) -> str:
    return "p < 0.001" if found.p < 0.001 else f"p = {found.p:.2g}"


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Notes on the figures in `short`."""
    known = [row for row in rows if row.answers is not None]
    if not known:
        return []
    problems = list(dict.fromkeys(row.answers.problems for row in known if row.answers))
    said = (
        f"right: answers counted live, {_taken(known)}, on {listed(problems)}, with the recorded "
        "model and these settings"
    )
    if any(row.answers and not row.answers.own_budget for row in known):
        said += "; @: at this budget, not the row's"
    other: dict[tuple[str, ...], dict[str, None]] = {}
    for row in known:
        assert row.answers is not None
        differs = tuple(each for each in row.answers.differs if not each.startswith("budget "))
        if differs:
            other.setdefault(differs, {})[row.policy] = None
    if other:
        those = "; ".join(f"{', '.join(d)} for {listed(whose)}" for d, whose in other.items())
        said += f"; {OTHER}: other problems of the task than this trace's ({those})"
    return [f"{said}."]


def _taken(rows: Sequence[Row]) -> str:
    """How the live runs took away what policies evict; full retention evicts nothing."""
    masked = dict.fromkeys(row.policy for row in rows if row.answers and row.answers.masked)
    if not masked:
        return "tokens really removed"
    if all(row.is_baseline or row.policy in masked for row in rows):
        return "tokens masked, not removed"
    return f"tokens really removed, or masked ({', '.join(masked)})"


def not_ranking() -> str:
    """That attention kept does not rank answers, with the plainest example that was counted."""
    pair = disagreement()
    if pair is None:
        return ""
    more, less = pair
    said = [
        f"{each.label} at {each.budget} kept {each.attention_kept:.1%} of the attention and was "
        f"right in {each.right} of {each.n}"
        for each in pair
    ]
    return (
        f"It does not rank answers: on {more.searched.problems}, {said[0]}; {said[1]} "
        f"(full retention: {less.full_right})."
    )


def deciding(rows: Sequence[Row], result: ReplayResult) -> str:
    """The live run that would count the answers of a trace's rows that have none of their own.

    Empty where all have them, or where live runs judge no answers of the trace's task.
    """
    lacking = _lacking(rows)
    recording = result.recordings.get(rows[0].trace) if rows else None
    if not lacking or recording is None or recording["task"] not in _JUDGED:
        return ""
    if recording["model"] != f"arborsim-{recording['task']}":
        return ""
    policies = list(dict.fromkeys(row.policy for row in lacking))
    budgets = list(dict.fromkeys(row.budget for row in lacking if row.budget != ANY))
    known = [policy for policy in policies if policy in names()]
    files = [f"{policy}.toml" for policy in policies if policy not in known]  # of compositions
    parts = ["arborsim", "live", *_problems(recording), "--policy", ",".join([*known, *files])]
    parts += ["--budget", ",".join(budgets)] if budgets else []
    for policy in known:
        for name, value in changed(policy, result.policies.get(policy, {})).items():
            parts += ["--set", f"{policy}.{name}={_text(value)}"]
    return shlex.join([*parts, "--episodes", f"{_EPISODES}", "--out", "answers.jsonl"])


def _lacking(rows: Sequence[Row]) -> list[Row]:
    """Rows of which no answers of their own were counted."""
    others = (row for row in rows if not (row.is_baseline or row.is_oracle))
    return [row for row in others if not (row.answers and row.answers.exact)]


def _problems(recording: Mapping[str, Any]) -> list[str]:
    """The problems of a recording and their search, as options of ``arborsim live``."""
    searched = Searched.of_recording(recording)
    parts = ["--task", searched.task]
    for name, value in sorted(searched.options.items()):
        parts += [f"--{name.replace('_', '-')}", _text(value)]
    if searched.search != _JUDGED[searched.task]:
        parts += ["--search", searched.search]
    parts += ["--temperature", f"{searched.temperature:g}"]
    from arborsim.searches import search_options

    defaults = search_options(searched.search)
    for name, value in searched.search_options.items():
        if defaults[name] != value:
            parts += ["--set", f"search.{name}={_text(value)}"]
    given = recording["search_parameters"]
    for name, default in _OPTIONS.items():
        if given.get(name, default) != default:
            parts += [f"--{name.replace('_', '-')}", _text(given[name])]
    return parts


def would_decide(rows: Sequence[Row], result: ReplayResult) -> str:
    """Which answers were not counted, and what would count them; "" if all were."""
    lacking = _lacking(rows)
    if not lacking:
        return ""
    if rows[0].trace not in result.recordings:
        return ""
    command = deciding(rows, result)
    if not command:
        return (
            "Which setting keeps its answers right was not counted, and live runs judge no answers "
            f"of {result.recordings[rows[0].trace]['task']}: compare what it generates under each "
            "setting by a measure of your own."
        )
    some = any(row.answers and row.answers.exact and row.policy != BASELINE for row in rows)
    policies = list(dict.fromkeys(row.policy for row in lacking))
    named = listed(policies) if len(policies) <= _MOST_NAMED else f"{len(policies)} policies"
    what = f"of {named} at some of these budgets" if some else "at these budgets"
    return (
        f"No answers {what} have been counted on problems like these. This counts them: "
        f"{command}; then replay with --answers answers.jsonl."
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


# --- fidelity ---


def divergence(row: Row) -> str:
    """``"0.021"``, and the budget where another was measured."""
    found = row.fidelity
    if found is None:
        return ""
    return nats(found.kl) + ("" if found.budget in (row.budget, ANY) else f" @{found.budget}")


def near_full(found: Fidelity) -> str:
    """``"KL 0.021 to full retention, same top token 95.3%"``."""
    return f"KL {nats(found.kl)} to full retention, same top token {found.agreement:.1%}"


def fidelity_notes(rows: Sequence[Row]) -> list[str]:
    """The texts, tokens and model that the fidelity of rows rests on."""
    known = [row.fidelity for row in rows if row.fidelity is not None]
    if not known:
        return []
    most = max(known, key=lambda each: each.tokens)
    return [
        f"KL: fidelity to full retention on {most.model}, {counted(most.tokens, 'judged token')} "
        f"of {counted(most.documents, 'document')}, not on the recorded searches."
    ]
