"""Results of replays: a record per search, and a row per trace, policy and budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from arborsim.core.errors import ArborsimError
from arborsim.core.measurements import (
    Measurements,
    Stored,
    TimeSplit,
    check_figures,
    check_peak,
    stored_together,
)
from arborsim.core.statistics import Score
from arborsim.policies.registry import titled

if TYPE_CHECKING:
    from arborsim.machine.serving import FullGpu
    from arborsim.machine.terms import Term
    from arborsim.play.pictures import TokenMap, TreePicture

BASELINE = "full"
ORACLE = "oracle"
#: What results call it (`Policy.label`): one for each kind of groups.
ORACLES = (ORACLE, f"{ORACLE}-layer", f"{ORACLE}-head")
#: Bounds that know the future: for attention, and for answers (`arborsim.policies` has both)
BOUNDS = (*ORACLES, "needed")
#: The budget of policies that do not know budgets.
ANY = "any"
#: Follows the name of a policy that does not keep to the budget.
MARK = "\u2020"
#: The setting that gives GPU, host, model and type of its cache in a line.
MACHINE = "simulated on"
_CLOCKS_S = 0.01  # live searches are shown by the same records
_UNKNOWN: Any = math.nan
TIMES = tuple(each.name for each in fields(TimeSplit))


@dataclass(frozen=True)
class EpisodeResult:
    """One search under one policy and budget.  Refuses impossible figures."""

    trace: str  # name of the trace file
    episode: int
    policy: str
    budget: str  # as the user gave it: tokens (``"2048"``) or a share (``"0.25"``)
    budget_tokens: int  # what that came to for this search
    measured: Measurements
    #: Share of the recorded attention that fell on readable tokens; NaN if unknown
    attention_kept: float
    #: Keys and values of one token over all layers; 0 if unknown.  Draws the budget in bytes
    kv_bytes_per_token: int = 0
    #: Relative error of the attention output on the captured layers; NaN if unknown
    output_error: float = math.nan
    bounded: bool = True  # whether the policy keeps within the budget after every decision
    terms: tuple[Term, ...] = ()  # what the time consists of; empty unless it was to be explained
    #: What has tiers of its own (`Policy.grouping`): "shared", "layer" or "head".  Attention kept
    #: of layers and heads is measured on rows of captured layers, else on the mean row of all
    per: str = "shared"
    kept_note: str = ""  # why attention kept is NaN on a trace that holds attention, or ""

    def __post_init__(self) -> None:
        check_figures(self.measured, self.whose, self.attention_kept, _CLOCKS_S)

    @property
    def whose(self) -> str:
        """Name of the search and policy, for messages."""
        return f"{self.trace}, episode {self.episode}, {at_budget(self.policy, self.budget)}"

    def simulated(self) -> EpisodeResult:
        """Itself, of one clock: refuses any negative time, and a peak that the budget rules out."""
        check_figures(self.measured, self.whose)
        if self.bounded:
            check_peak(self.measured, self.whose, self.budget_tokens)
        return self


@dataclass(frozen=True)
class LeftOut:
    """A policy that a trace cannot serve, under one budget or under any."""

    trace: str
    policy: str
    budget: str = ""  # empty if no budget would do
    #: Options of ``arborsim record`` that supply what the trace lacks; empty if that is not the
    #: reason, but a budget that is too small
    remedy: str = ""
    least: str = ""  # the least budget that could do, as far as is known; empty if there is none
    detail: str = ""  # the whole reason in one line
    instead: str = ""  # setting under which the policy can run here, e.g. ``"per=shared"``
    reason: str = ""  # why, for a cell of a table: ``"needs 0.53 or more: prompt 602 = ..."``
    unsuited: bool = False  # the policy has no meaning on the model whose bytes are charged
    unrecorded: str = ""  # why no recording supplies it (`TraceInfo.unrecorded`)


class NothingRan(ArborsimError):
    """No budget held any of the searches.  `reason` is the first of them, for a cell of a table."""

    def __init__(self, detail: str, reason: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def __reduce__(self) -> tuple[type[NothingRan], tuple[str, str]]:
        return NothingRan, (str(self), self.reason)  # so that workers can raise it


@dataclass(frozen=True, kw_only=True)
class Answered(Score):
    """Right answers counted live under a row's policy, with its settings."""

    budget: str  #: under which they were counted
    problems: str  #: on which: ``"chain (lines 32)"``
    #: What is not as in the row, as it was counted: ``("budget 0.87", "lines 32")``
    differs: tuple[str, ...] = ()
    own_budget: bool = True  #: whether the budget is the row's

    @property
    def exact(self) -> bool:
        """Whether they were counted under the row's budget, and on problems as the trace's."""
        return not self.differs


@dataclass(frozen=True)
class Fidelity:
    """How near a row's policy, with its settings, keeps a model to full retention.

    As `arborsim fidelity` measured it (`arborsim.products.fidelity.known`), on documents.
    """

    kl: float  #: mean KL(full || policy), nats
    low: float  #: the ends of its 95% interval; NaN where there is none
    high: float
    agreement: float  #: share of judged tokens with the same most probable next token
    tokens: int  #: judged
    documents: int
    budget: str  #: under which it was measured
    model: str


@dataclass(frozen=True)
class EqualBudget:
    """The budget at which a policy takes the memory that was asked for (`replay.equal`)."""

    trace: str
    policy: str
    budget: str  # as it was asked for, by which rows go
    found: str  # as a share or in tokens
    measure: str  # "peak" or "byte-seconds"
    #: Bytes, or byte-seconds
    wanted: float
    held: float

    @property
    def off(self) -> float:
        """The error of the memory, as a share of what was wanted."""
        return self.held / self.wanted - 1


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """All results of a replay, and what they rest on."""

    episodes: tuple[EpisodeResult, ...]
    pictures: tuple[TreePicture, ...]
    #: GPU, model geometry, recall mode, page size, traces with their sha256, versions, seeds
    settings: dict[str, str]
    assumed: tuple[str, ...]  # numbers of the hardware profile that were not measured
    left_out: tuple[LeftOut, ...] = ()
    token_maps: tuple[TokenMap, ...] = ()
    notes: tuple[str, ...] = ()  # cautions about single policies on these traces
    does_not_fit: tuple[str, ...] = ()  # what needs more memory than there is, and how much more
    #: What each trace, by its name, was recorded from (`TraceInfo.recording`)
    recordings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: All settings of each policy, by its label
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Counted live (`arborsim.products.replay.answers.answered`), by trace, policy and budget
    answers: Mapping[tuple[str, str, str], Answered] = field(default_factory=dict)
    fidelity: Mapping[tuple[str, str, str], Fidelity] = field(default_factory=dict)  # by the same
    equal: tuple[EqualBudget, ...] = ()  # budgets that were found, in a comparison at equal memory
    #: A GPU full of these searches, by trace, policy and budget
    full: Mapping[tuple[str, str, str], FullGpu] = field(default_factory=dict)
    asked: tuple[str, ...] = ()  # labels of the policies that were asked for; empty if all were

    def found(self) -> dict[tuple[str, str, str], EqualBudget]:
        """`equal`, by trace, policy and the budget that was asked for."""
        return {(each.trace, each.policy, each.budget): each for each in self.equal}

    def rows(self, left_out: Iterable[LeftOut] = ()) -> tuple[Row, ...]:
        """One row per trace, policy and budget (`aggregate`), with its answers and fidelity."""
        answers, equal, rows = self.answers, self.found(), aggregate(self.episodes, left_out)

        def whole(row: Row) -> Row:
            full = self.full.get(row.cell)
            rates = (math.nan, math.nan) if full is None else (full.searches, full.tokens_per_s)
            return replace(
                row,
                title=titled(row.policy, self.policies.get(row.policy, {})),
                answers=answers.get(row.cell),
                fidelity=self.fidelity.get(row.cell),
                equal=equal.get(row.cell),
                at_once=rates[0],
                full_tokens_per_s=rates[1],
            )

        return related([whole(row) for row in rows])

    def was_asked(self, row: Row) -> bool:
        """Whether the user asked for its policy, which is then no mere reference."""
        return not self.asked or row.policy in self.asked


@dataclass(frozen=True)
class Relative:
    """A row against full retention on the same trace, NaN where there is none.

    1.0 is "the same": 0.25 of the memory, 1.3 times the time.
    """

    peak_hbm: float = math.nan
    mean_peak_hbm: float = math.nan
    time: float = math.nan
    tokens_per_s: float = math.nan
    attention_kept: float = math.nan
    at_once: float = math.nan
    full_tokens_per_s: float = math.nan


@dataclass(frozen=True)
class Row:
    """One policy under one budget, over all searches of a trace.

    Peaks are the largest over searches (`mean_*`: the mean).  Times, tokens, byte-seconds, moves
    and traffic are summed.  `attention_kept` and `output_error` are weighted by generated tokens
    (NaN if unknown for all searches).  `oracle_gap` is what the oracle that decides for the same
    groups (`per`) keeps under the same budget, less what this policy keeps: negative for policies
    that quantise, offload, recompute or hold more than the budget (not `bounded`), NaN without such
    an oracle.  `fits` is whether the machine has the memory for every search.  A row that was left
    out has its reason in `left_out`, and NaN for figures.
    """

    trace: str
    policy: str
    budget: str
    searches: int = _UNKNOWN
    prompt_tokens: int = _UNKNOWN
    generated_tokens: int = _UNKNOWN
    iterations: int = _UNKNOWN
    peak_hbm_kv_bytes: int = _UNKNOWN
    mean_peak_hbm_kv_bytes: float = _UNKNOWN
    peak_hbm_kv_tokens: int = _UNKNOWN
    peak_ddr_bytes: int = _UNKNOWN
    peak_quantised_bytes: int = _UNKNOWN
    mean_peak_ddr_bytes: float = _UNKNOWN
    evicted_tokens: float = _UNKNOWN
    offloaded_tokens: float = _UNKNOWN
    quantised_tokens: float = _UNKNOWN
    rehydrated_tokens: float = _UNKNOWN
    rehydrations: int = _UNKNOWN
    to_ddr_bytes: int = _UNKNOWN
    from_ddr_bytes: int = _UNKNOWN
    decisions: int = _UNKNOWN
    kv_read_bytes: int = _UNKNOWN
    bounds_read_bytes: int = _UNKNOWN
    peak_after_first_decision_bytes: int = _UNKNOWN
    hbm_byte_seconds: float = _UNKNOWN
    #: Of a GPU full of such searches (`machine.serving.full_gpu`): how many, and tokens of all
    at_once: float = _UNKNOWN
    full_tokens_per_s: float = _UNKNOWN
    time: TimeSplit = field(default_factory=lambda: TimeSplit(*[math.nan] * len(TIMES)))
    attention_kept: float = _UNKNOWN
    output_error: float = _UNKNOWN
    bounded: bool = True
    fits: bool = True
    oracle_gap: float = _UNKNOWN
    per: str = ""  # as in `EpisodeResult`
    kept_note: str = ""
    title: str = ""  # the policy with the settings that are not its authors'
    relative: Relative = Relative()
    answers: Answered | None = None  # counted live; None where that was not done
    fidelity: Fidelity | None = None  # None where it was not measured
    stored: dict[str, Stored] = field(default_factory=dict)  # by memory below DDR
    counters: dict[str, float] = field(default_factory=dict)  # others of `Measurements`
    left_out: str = ""
    equal: EqualBudget | None = None  # in a comparison at equal memory

    @property
    def cell(self) -> tuple[str, str, str]:
        """Trace, policy and budget."""
        return self.trace, self.policy, self.budget

    @property
    def moved_bytes(self) -> int:
        """Traffic over PCIe, both directions."""
        return self.to_ddr_bytes + self.from_ddr_bytes

    @property
    def read_bytes_per_token(self) -> float:
        """Keys and values that attention read for a generated token, mean."""
        return _ratio(self.kv_read_bytes, self.generated_tokens)

    @property
    def model_s(self) -> float:
        """Prefill and decode: what the search would cost with all KV in place."""
        return self.time.prefill_s + self.time.decode_s

    @property
    def total_s(self) -> float:
        return self.time.total_s

    @property
    def tokens_per_s(self) -> float:
        return _ratio(self.generated_tokens, self.total_s)

    @property
    def idle(self) -> bool:
        """Whether its policy did nothing: every search fits the budget."""
        acts = (self.evicted_tokens, self.offloaded_tokens, self.quantised_tokens)
        others = (self.rehydrated_tokens, self.bounds_read_bytes, len(self.stored))
        return not (self.is_baseline or self.left_out or any(acts) or any(others))

    @property
    def is_baseline(self) -> bool:
        return self.policy == BASELINE

    @property
    def is_bound(self) -> bool:
        """Whether the policy knows the future, so that it competes with no other."""
        return self.policy in BOUNDS

    @property
    def is_oracle(self) -> bool:
        return self.policy in ORACLES

    @property
    def label(self) -> str:
        """The policy for people, with its settings; marked if it does not keep to the budget."""
        return self.name if self.bounded or self.is_baseline else self.name + MARK

    @property
    def name(self) -> str:
        """The policy for people: a name alone stands for what its authors run."""
        return self.title or self.policy

    @property
    def budget_label(self) -> str:
        """The budget for people: full retention has none."""
        return "all" if self.is_baseline else self.budget


def at_budget(policy: str, budget: str) -> str:
    """``"h2o at budget 0.5"``, or only the name of a policy that knows no budget."""
    return policy if budget == ANY else f"{policy} at budget {budget}"


def oracles(results: Iterable[EpisodeResult]) -> dict[tuple[str, int, str, str], float]:
    """Attention that an oracle keeps, by trace, episode, budget and what it decides for (`per`)."""
    bounds = (each for each in results if each.policy in ORACLES)
    return {(r.trace, r.episode, r.budget, r.per): r.attention_kept for r in bounds}


def aggregate(
    episodes: Iterable[EpisodeResult], left_out: Iterable[LeftOut] = ()
) -> tuple[Row, ...]:
    """One row per (trace, policy, budget), and one for each of `left_out`.

    Rows follow the traces as they came: within a trace full retention leads, then budgets and,
    within a budget, policies as they came.  What was left out under a budget follows what was not.
    Budgets under which all was, being too small, come first.
    """
    cells: dict[tuple[str, str, str], list[EpisodeResult]] = {}
    for result in episodes:
        cells.setdefault((result.trace, result.policy, result.budget), []).append(result)
    rows = [_row(results) for results in cells.values()]
    ran = {row.budget for row in rows}
    rows += [Row(w.trace, w.policy, w.budget or ANY, left_out=w.reason) for w in left_out]
    traces = list(dict.fromkeys(row.trace for row in rows))
    budgets = list(dict.fromkeys(row.budget for row in rows if not row.is_baseline))
    budgets.sort(key=ran.__contains__)

    def place(row: Row) -> tuple[int, int]:
        return traces.index(row.trace), -1 if row.is_baseline else budgets.index(row.budget)

    return related(sorted(rows, key=place))


R = TypeVar("R", bound="Row")


def related(
    rows: Sequence[R], place: Callable[[R], Hashable] = lambda row: row.trace
) -> tuple[R, ...]:
    """Rows with what is relative to full retention, and their gap to the oracle.

    Those that share a `place` (a trace on a machine) are compared.
    """
    baselines = {place(row): row for row in reversed(rows) if row.is_baseline}
    known = (row for row in rows if row.is_oracle)
    bounds = {(place(row), row.budget, row.per): row.attention_kept for row in known}

    def found(row: R) -> R:
        bound, full = bounds.get((place(row), row.budget, row.per)), baselines.get(place(row))
        gap = math.nan if bound is None else bound - row.attention_kept
        return replace(row, oracle_gap=gap, relative=_relative(row, full) if full else Relative())

    return tuple(map(found, rows))


#: Counters of which a row has the largest over its searches; it has the sum of all others.
_LARGEST = ("peak_", "weight_", "workspace_", "usable_")
_SUMS: dict[str, Callable[[Iterable[Any]], Any]] = {"int": sum, "float": math.fsum}


def _row(results: list[EpisodeResult]) -> Row:
    first, measured = results[0], [result.measured for result in results]
    known = {each.name for each in fields(Row)}
    found: dict[str, Any] = {"counters": {}}
    for each in fields(Measurements):
        if each.type in ("int", "float"):
            values = (getattr(m, each.name) for m in measured)
            add = max if each.name.startswith(_LARGEST) else _SUMS[each.type]
            (found if each.name in known else found["counters"])[each.name] = add(values)
    parts = (math.fsum(getattr(m.time, name) for m in measured) for name in TIMES)
    return Row(
        trace=first.trace,
        policy=first.policy,
        budget=first.budget,
        searches=len(results),
        mean_peak_hbm_kv_bytes=sum(m.peak_hbm_kv_bytes for m in measured) / len(results),
        mean_peak_ddr_bytes=sum(m.peak_ddr_bytes for m in measured) / len(results),
        time=TimeSplit(*parts),
        stored=stored_together(measured),
        attention_kept=_mean((r.attention_kept, r.measured.generated_tokens) for r in results),
        output_error=_mean((r.output_error, r.measured.generated_tokens) for r in results),
        bounded=first.bounded,
        fits=all(m.fits for m in measured),
        per=first.per,
        kept_note=first.kept_note,
        **found,
    )


def _relative(row: Row, full: Row) -> Relative:
    peaks = "peak_hbm_kv_bytes", "mean_peak_hbm_kv_bytes"
    figures = *peaks, "total_s", "tokens_per_s", "attention_kept", "at_once", "full_tokens_per_s"
    return Relative(*(_ratio(getattr(row, name), getattr(full, name)) for name in figures))


def _mean(weighted: Iterable[tuple[float, int]]) -> float:
    """Mean of (value, weight) pairs whose value is known."""
    known = [(value, weight) for value, weight in weighted if not math.isnan(value)]
    total = math.fsum(value * weight for value, weight in known)
    return _ratio(total, sum(weight for _, weight in known))


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan
