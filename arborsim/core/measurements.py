"""Measurements of one search by an executor: the figures of every table and report.

Simulated and live executors fill in the same records, so that they can be laid side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from arborsim.core.errors import ResultError
from arborsim.core.tiers import BELOW_DDR

#: What rounding may take a share beyond its ends, and a sum of seconds below 0.
_ROUNDING = 1e-6


@dataclass
class TimeSplit:
    """Where the seconds of a search went. The parts add up to `total_s`."""

    #: Model computation of the prompt and of the decode iterations, weights and KV reads and the
    #: per-layer and per-step overheads included
    prefill_s: float = 0.0
    decode_s: float = 0.0
    #: Decisions on the host, and what scoring costs on the device (rows of attention written out)
    policy_s: float = 0.0
    #: What decoding waited for: recalls, and buffers that were not free yet
    exposed_transfer_s: float = 0.0
    rehydration_s: float = 0.0  # prefill passes over evicted spans
    hidden_transfer_s: float = 0.0  # transfers that ran behind computation; not part of the total

    @property
    def total_s(self) -> float:
        return (
            self.prefill_s
            + self.decode_s
            + self.policy_s
            + self.exposed_transfer_s
            + self.rehydration_s
        )

    @property
    def compute_s(self) -> float:
        return self.prefill_s + self.decode_s + self.rehydration_s


@dataclass
class MemorySeries:
    """Bytes by tier over time, sampled. All arrays have shape ``[samples]``.

    ``hbm_kv_bytes`` counts whole pages, ``staging_bytes`` HBM buffers for recalled tokens, and
    ``in_flight_bytes`` pages whose copy to DDR has not finished.
    """

    time_s: list[float] = field(default_factory=list)
    hbm_kv_bytes: list[int] = field(default_factory=list)
    staging_bytes: list[int] = field(default_factory=list)
    in_flight_bytes: list[int] = field(default_factory=list)
    ddr_bytes: list[int] = field(default_factory=list)


def thinned(series: MemorySeries, points: int) -> np.ndarray:
    """Indices of about `points` samples: first and last, and per stretch the extremes.

    The extremes are those of what is in HBM, so that a peak of one sample survives.
    """
    n = len(series.time_s)
    if n <= points:
        return np.arange(n)
    hbm = (
        np.asarray(series.hbm_kv_bytes)
        + np.asarray(series.staging_bytes)
        + np.asarray(series.in_flight_bytes)
    )
    edges = np.linspace(0, n, max(points // 2, 1) + 1).astype(int)
    stretches = [(a, b) for a, b in itertools.pairwise(edges.tolist()) if b > a]
    kept = {0, n - 1}
    for a, b in stretches:
        kept |= {a + int(np.argmax(hbm[a:b])), a + int(np.argmin(hbm[a:b]))}
    return np.array(sorted(kept))


@dataclass(frozen=True)
class Stored:
    """A search's use of one memory below DDR."""

    peak_bytes: int = 0
    to_bytes: int = 0  # traffic on its link, by direction
    from_bytes: int = 0
    usable_bytes: int = 0  # what the machine offers
    link_s: float = 0.0  # in which the link was busy, both directions


def stored_columns(stored: Mapping[str, Stored]) -> dict[str, float]:
    """Use of memories below DDR, a column for each figure: ``nvme_peak_bytes``."""
    return {
        f"{memory.lower()}_{name}": value
        for memory, each in stored.items()
        for name, value in vars(each).items()
    }


def stored_together(measured: Sequence[Measurements]) -> dict[str, Stored]:
    """The largest peak of several searches, and sums of their traffic."""
    return {
        memory: Stored(
            max(m.stored[memory].peak_bytes for m in measured),
            sum(m.stored[memory].to_bytes for m in measured),
            sum(m.stored[memory].from_bytes for m in measured),
            measured[0].stored[memory].usable_bytes,
            math.fsum(m.stored[memory].link_s for m in measured),
        )
        for memory in (measured[0].stored if measured else ())
    }


@dataclass
class Measurements:
    """One search under one policy."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    iterations: int = 0
    #: Largest sum of KV pages, staging buffers and pages in flight in HBM at any moment
    peak_hbm_kv_bytes: int = 0
    #: The same after the first decision that moved or destroyed something, so that policies differ
    #: that all let HBM fill up first; the whole search's if there was none
    peak_after_first_decision_bytes: int = 0
    #: Integral of that sum over the search's seconds
    hbm_byte_seconds: float = 0.0
    #: Largest number of tokens whose KV was in HBM (the hardware-independent figure)
    peak_hbm_kv_tokens: int = 0
    peak_ddr_bytes: int = 0
    #: Largest size of what is held quantised, in HBM (tokens, not pages) and DDR together
    peak_quantised_bytes: int = 0
    #: Moves into those tiers, in tokens (a token moved in half of the groups counts 0.5); a token
    #: may count several times
    evicted_tokens: float = 0.0
    offloaded_tokens: float = 0.0
    quantised_tokens: float = 0.0
    rehydrated_tokens: float = 0.0
    rehydrations: int = 0  # prefill passes that brought evicted tokens back
    #: Traffic on the two PCIe directions
    to_ddr_bytes: int = 0
    from_ddr_bytes: int = 0
    decisions: int = 0
    #: Keys and values that attention read in decode iterations, in HBM or by the CPU in DDR, and
    #: bounds of pages that were read to choose them; 0 where it was not counted
    kv_read_bytes: int = 0
    bounds_read_bytes: int = 0
    #: Largest size of the HBM buffers for recalled tokens (part of `peak_hbm_kv_bytes`)
    peak_staging_bytes: int = 0
    #: HBM that weights take, and the largest need of activations, logits and attention matrices
    weight_bytes: int = 0
    workspace_bytes: int = 0
    #: What the machine offers (HBM less its reserve); 0 if unknown
    usable_hbm_bytes: int = 0
    usable_ddr_bytes: int = 0
    stored: dict[str, Stored] = field(default_factory=dict)  # by memory below DDR
    time: TimeSplit = field(default_factory=TimeSplit)
    series: MemorySeries = field(default_factory=MemorySeries)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Measurements:
        """The measurements that became the columns of a row. The series is in no table."""
        apart = ("time", "series", "stored")
        own = {each.name: row[each.name] for each in fields(cls) if each.name not in apart}
        time = TimeSplit(**{part.name: row[part.name] for part in fields(TimeSplit)})
        names = [each.name for each in fields(Stored)]
        stored = {
            memory: Stored(*(row[f"{memory.lower()}_{name}"] for name in names))
            for memory in BELOW_DDR
            if f"{memory.lower()}_{names[0]}" in row
        }
        return cls(**own, time=time, stored=stored)

    @property
    def needed_hbm_bytes(self) -> int:
        """Weights, workspace and cache at their peaks (which need not coincide: an upper bound)."""
        return self.weight_bytes + self.workspace_bytes + self.peak_hbm_kv_bytes

    @property
    def fits(self) -> bool:
        """Whether the search fits the machine's memories. True where those are unknown."""
        in_hbm = not self.usable_hbm_bytes or self.needed_hbm_bytes <= self.usable_hbm_bytes
        in_ddr = not self.usable_ddr_bytes or self.peak_ddr_bytes <= self.usable_ddr_bytes
        below = all(each.peak_bytes <= each.usable_bytes for each in self.stored.values())
        return in_hbm and in_ddr and below

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.time.total_s if self.time.total_s else float("nan")

    @property
    def widest(self) -> int:
        """No iteration can have decoded more tokens than this: each has decoded one."""
        return max(1, self.generated_tokens - self.iterations + 1)


def check_figures(
    measured: Measurements, whose: str, kept: float = math.nan, clocks_s: float = 0.0
) -> None:
    """Raise `ResultError` for figures that no search can have. `whose` are they, in words.

    Bytes, tokens and seconds are finite and not below 0 (but for `clocks_s`, by which clocks of a
    live machine may differ), attention kept (NaN: unknown) is a share, every iteration decodes a
    token, and no more tokens are held, or are gone for good, than there ever were.
    """
    slack = clocks_s + _ROUNDING * max(1.0, abs(measured.time.total_s))
    for record in (measured, measured.time):
        for each in fields(record):
            value = getattr(record, each.name)
            if not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                raise impossible(whose, f"{each.name} is {value}")
            if value < -slack * isinstance(value, float):
                raise impossible(whose, f"{each.name} is {value:.6g}, below 0")
    check_share(kept, "attention kept", whose)
    tokens = measured.prompt_tokens + measured.generated_tokens
    gone = measured.evicted_tokens - measured.rehydrated_tokens
    for what, value, most in (
        ("iterations", measured.iterations, measured.generated_tokens),
        ("peak_hbm_kv_tokens", measured.peak_hbm_kv_tokens, tokens),
        ("evicted_tokens less rehydrated_tokens", gone, tokens * (1 + _ROUNDING)),
    ):
        if value > most:
            raise impossible(whose, f"{what} is {value:.6g}, above {most:.6g}")


def check_peak(measured: Measurements, whose: str, budget_tokens: int) -> None:
    """Raise `ResultError` if HBM held more than a policy that keeps to a budget can hold.

    That is the prompt, or the budget and what one iteration decodes.  Live, tokens that are on
    their way out count as well, so this is for simulated searches.
    """
    most = max(measured.prompt_tokens, budget_tokens + measured.widest)
    if measured.peak_hbm_kv_tokens > most:
        held = f"{measured.peak_hbm_kv_tokens} tokens in HBM"
        why = f"{held}, although the policy keeps to {budget_tokens} and could reach {most}"
        raise impossible(whose, why)


def check_share(share: float | None, what: str, whose: str) -> None:
    """Raise `ResultError` unless a share lies in [0, 1], up to rounding, or is not known."""
    if share is not None and (share < -_ROUNDING or share > 1 + _ROUNDING):
        raise impossible(whose, f"{what} is {share:.6g}, not between 0 and 1")


def impossible(whose: str, why: str) -> ResultError:
    """The error to raise for a figure that cannot be."""
    return ResultError(
        f"{whose}: {why}: no search can have that; the file is damaged (make it again), or this is "
        "a fault of arborsim or of a policy of your own (report it)"
    )
