"""Seconds of kernels on a grid of measured points: bounds, repairs and interpolation.

Between measured points the logarithm of the time is linear in the logarithms of the arguments, so
it never leaves the range of the points around it.  Beyond the grid the efficiency at its edge goes
on: the time there, scaled by a lower bound of arithmetic and bandwidth (`Peak`).

Two things are put right before a grid is used.  A kernel that was measured over and over on the
same data finds them in the L2 cache, and seems faster than memory.  It takes its roofline then, and
counts as extrapolated.  And more work never takes less time: where a measured time falls as tokens,
sequences or widths grow, it becomes the mean, in logarithms, of the largest time before it and the
smallest after it.  Other measured times stay as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.core.sourced import Basis

if TYPE_CHECKING:
    from arborsim.core.geometry import Geometry

LAUNCH_S = 2e-6  # what the lower bounds add, so that they never approach 0


@dataclass(frozen=True)
class Peak:
    """The peaks of one GPU."""

    flops_per_s: float  # dense, bf16
    bytes_per_s: float

    def product_s(
        self, rows: Any, out: Any, inner: Any, width: float, computed: float = 0.0
    ) -> Any:
        """A lower bound of ``rows x inner`` times ``inner x out``; `width` bytes per weight.

        `computed` is the width that they are multiplied in, their own if it is 0.
        """
        arithmetic_s = rows * out * inner * max(computed or width, 0.5) / self.flops_per_s
        moved = out * inner * width + 2 * rows * (out + inner)
        return np.maximum(arithmetic_s, moved / self.bytes_per_s) + LAUNCH_S

    def attention_s(self, pairs: Any, moved_bytes: Any, heads: Any, head_dim: Any) -> Any:
        """The same of attention over `pairs` of queries and keys."""
        arithmetic_s = 4 * heads * head_dim * pairs / self.flops_per_s
        return np.maximum(arithmetic_s, moved_bytes / self.bytes_per_s) + LAUNCH_S

    def roofline_s(self, flops: Any, read_bytes: Any, width: float = 2.0) -> Any:
        """The least that a kernel takes: arithmetic in numbers of `width` bytes, and HBM.

        Bytes that other kernels have just written do not count: they may be in the L2 cache.
        """
        narrower = max(2.0 / max(width, 0.5), 1.0) if width >= 1 else 4.0
        return np.maximum(flops / (narrower * self.flops_per_s), read_bytes / self.bytes_per_s)


#: A lower bound of the time from the values of all axes.
Bound = Callable[..., Any]


class Grid:
    """Seconds on a grid of `axes`; NaN where nothing was measured.

    Points without a measurement take the efficiency of the next one that has it, along the last
    axis first, and count as extrapolated.  So do those that beat the `roofline`, which take that.
    Along the last `rising` axes seconds never fall.
    """

    def __init__(
        self,
        axes: Sequence[np.ndarray],
        seconds: np.ndarray,
        bound: Bound,
        roofline: Bound | None = None,
        rising: int = 0,
    ) -> None:
        self.axes = [np.asarray(axis, dtype=float) for axis in axes]
        self.bound, self._roofline, self._rising = bound, roofline, rising
        measured = np.isfinite(seconds)
        least = np.log(bound(*np.meshgrid(*self.axes, indexing="ij", sparse=True)))
        least = np.broadcast_to(least, seconds.shape)
        taken = np.log(np.where(measured, seconds, 1.0))
        clamped = self._clamped(taken)
        basis = np.where(measured & (clamped <= taken), Basis.MEASURED, Basis.EXTRAPOLATED)
        self._basis = basis.astype(np.int8)
        along = tuple(range(seconds.ndim - rising, seconds.ndim))
        known = np.where(measured, _risen(clamped, measured, along), np.nan)
        if measured.all():
            self._log = known
            return
        filled = np.where(measured, known, _fill(known - least) + least)
        if rising:  # what was filled in lies between what was measured around it
            between = np.clip(self._clamped(filled), *_envelopes(known, measured, along))
            filled = _largest(between, along)
        self._log = filled

    def _clamped(self, log: np.ndarray) -> np.ndarray:
        """Logarithms of seconds at the grid's points, or of the roofline where that is longer.

        Rooflines are convex in logarithms, so that what lies between is no shorter either.
        """
        if self._roofline is None:
            return log
        least = self._roofline(*np.meshgrid(*self.axes, indexing="ij", sparse=True))
        return np.asarray(np.maximum(log, np.log(np.maximum(least, 1e-12))))

    def _like(
        self,
        axes: list[np.ndarray],
        log: np.ndarray,
        basis: np.ndarray,
        bound: Bound,
        roofline: Bound | None = None,
    ) -> Grid:
        found = object.__new__(Grid)
        found.axes, found._log, found._basis, found.bound = axes, log, basis, bound
        found._roofline, found._rising = roofline, min(self._rising, len(axes))
        return found

    def at(self, *fixed: float) -> Grid:
        """The grid of the remaining axes, with the first ones fixed."""
        log, basis, bound = self._log, self._basis, self.bound
        inside = []
        for axis, value in zip(self.axes, fixed, strict=False):
            inside.append(float(np.clip(value, axis[0], axis[-1])))
            low, high, share = place(axis, inside[-1])
            if share:
                log = (1 - share) * log[low] + share * log[high]
                basis = np.maximum(np.maximum(basis[low], basis[high]), Basis.INTERPOLATED)
            else:
                log, basis = log[low], basis[low]
        rest = self.axes[len(fixed) :]
        if inside != [float(value) for value in fixed]:
            others = np.meshgrid(*rest, indexing="ij", sparse=True)
            log = log + np.log(bound(*fixed, *others)) - np.log(bound(*inside, *others))
            basis = np.full(basis.shape, Basis.EXTRAPOLATED, dtype=np.int8)
            log = _largest(log, tuple(range(max(0, len(rest) - self._rising), len(rest))))
        roofline = self._roofline
        least = None if roofline is None else (lambda *others: roofline(*fixed, *others))
        found = self._like(rest, log, basis, lambda *others: bound(*fixed, *others), least)
        found._log = found._clamped(log)
        return found

    def shared(self, share: float) -> Grid:
        """The grid of an engine's own kernels, which take this share, but no less than they can."""
        found = self._like(self.axes, self._log, self._basis, self.bound, self._roofline)
        found._log = found._clamped(self._log + np.log(share))
        return found

    def scaled(self, factor: Callable[..., Any]) -> Grid:
        """The grid of another kernel, `factor` times as long at each point; it is extrapolated."""
        bound = self.bound
        factors = factor(*np.meshgrid(*self.axes, indexing="ij", sparse=True))
        basis = np.full(self._basis.shape, Basis.EXTRAPOLATED, dtype=np.int8)
        return self._like(
            self.axes, self._log + np.log(factors), basis, lambda *at: bound(*at) * factor(*at)
        )

    def seconds(self, *at: Any) -> np.ndarray:
        """Seconds at points of all axes; numbers or arrays of one shape."""
        if not at:
            return np.asarray(np.exp(self._log))
        if all(isinstance(each, int | float) for each in at) and (one := self._at_point(at)):
            return np.asarray(one)
        points = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in at))
        inside = [np.clip(x, axis[0], axis[-1]) for x, axis in zip(points, self.axes, strict=True)]
        places = [_places(axis, x) for axis, x in zip(self.axes, inside, strict=True)]
        found = np.zeros(points[0].shape)
        for corner in product((0, 1), repeat=len(places)):
            weight: Any = 1.0
            index = []
            for upper, (low, share), axis in zip(corner, places, self.axes, strict=True):
                weight = weight * (share if upper else 1 - share)
                index.append(np.minimum(low + upper, len(axis) - 1))
            found = found + weight * self._log[tuple(index)]
        if any((x != y).any() for x, y in zip(points, inside, strict=True)):
            found = found + np.log(self.bound(*points)) - np.log(self.bound(*inside))
            if self._roofline is not None:
                return np.asarray(np.maximum(np.exp(found), self._roofline(*points)))
        return np.asarray(np.exp(found))

    @cached_property
    def _points(self) -> list[tuple[list[float], list[float]]]:
        """Values of each axis, and their logarithms."""
        return [(axis.tolist(), np.log(np.maximum(axis, 0.5)).tolist()) for axis in self.axes]

    def _at_point(self, at: tuple[float, ...]) -> float:
        """`seconds` at one point within the axes, to the last bit; 0.0 outside.

        Most are asked for one by one, and arrays of one number cost ten times as much.
        """
        corners: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
        for (axis, logs), x in zip(self._points, at, strict=True):
            if not axis[0] <= x <= axis[-1]:
                return 0.0
            low = bisect_right(axis, x) - 1
            high = min(low + 1, len(axis) - 1)
            width = logs[high] - logs[low]
            share = (float(np.log(max(x, 0.5))) - logs[low]) / width if width > 0 else 0.0
            corners = [
                (weight * part, (*place, end))
                for weight, place in corners
                for part, end in ((1 - share, low), (share, high))
            ]
        found = 0.0
        for weight, place in corners:
            found += weight * float(self._log[place])
        return float(np.exp(found))

    def basis(self, *at: float) -> Basis:
        """The basis of the seconds at a point."""
        known, found = self._basis, Basis.MEASURED
        for axis, x in zip(self.axes, at, strict=True):
            if not axis[0] <= x <= axis[-1]:
                return Basis.EXTRAPOLATED
            low, high, share = place(axis, x)
            known = np.maximum(known[low], known[high]) if share else known[low]
            found = Basis.INTERPOLATED if share else found
        return max(found, Basis(int(known)))


def place(axis: np.ndarray, value: float) -> tuple[int, int, float]:
    """The points around a value, kept inside, and the share of the second one."""
    low, share = _places(axis, np.clip(np.asarray(float(value)), axis[0], axis[-1]))
    return int(low), min(int(low) + 1, len(axis) - 1), float(share)


def _places(axis: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last point up to each value, and the share of the next one; axes may begin with 0."""
    low = np.clip(np.searchsorted(axis, inside, side="right") - 1, 0, len(axis) - 1)
    high = np.minimum(low + 1, len(axis) - 1)
    start = np.log(np.maximum(axis[low], 0.5))
    width = np.log(np.maximum(axis[high], 0.5)) - start
    way = np.log(np.maximum(inside, 0.5)) - start
    return low, np.where(width > 0, way / np.where(width > 0, width, 1.0), 0.0)


def _largest(log: np.ndarray, along: tuple[int, ...]) -> np.ndarray:
    """The largest value at a point and before it."""
    for axis in along:
        log = np.maximum.accumulate(log, axis=axis)
    return log


def _envelopes(
    log: np.ndarray, known: np.ndarray, along: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The largest known value up to each point, and the smallest from it on."""
    before = _largest(np.where(known, log, -np.inf), along)
    after = _largest(np.flip(np.where(known, -log, -np.inf), along), along)
    return before, -np.flip(after, along)


def _risen(log: np.ndarray, known: np.ndarray, along: tuple[int, ...]) -> np.ndarray:
    """Known values so that they never fall: the mean of both envelopes, which agree elsewhere."""
    falls = any((np.diff(log, axis=axis) < 0).any() for axis in along)
    if not falls and known.all():
        return log
    before, after = _envelopes(log, known, along)
    return np.where(known, before, 0.0) / 2 + np.where(known, after, 0.0) / 2


def _fill(values: np.ndarray) -> np.ndarray:
    """Each missing value as the nearest one before it, else after it, the last axis first."""
    for axis in reversed(range(values.ndim)):
        for backwards in (False, True):
            along = np.moveaxis(values, axis, 0)
            along = along[::-1] if backwards else along
            kept = [along[0]]
            for row in along[1:]:
                kept.append(np.where(np.isnan(row), kept[-1], row))
            stacked = np.stack(kept)
            stacked = stacked[::-1] if backwards else stacked
            values = np.moveaxis(stacked, 0, axis)
    return values


def attention_bound(peak: Peak, table: str, kind: str, least: bool) -> Bound:
    """A bound of attention's time, or the `least` that it can take."""
    width = {"fp8": 1, "bf16": 2}[kind]

    def bound(*axes: np.ndarray) -> np.ndarray:
        window, size, kv_heads, heads, sequences, tokens = axes
        seen = np.where(np.asarray(window) > 0, np.minimum(tokens, window), tokens)
        if table == "decode":
            pairs, moved = sequences * seen, sequences * seen * kv_heads * size * 2 * width
        elif least:  # a prompt's keys and values were just written
            seen = np.where(np.asarray(window) > 0, 0.0 * tokens, tokens)
            pairs, moved = sequences * tokens * seen / 2, 0.0 * kv_heads
        else:
            half = np.where(np.asarray(window) > 0, seen, seen / 2)
            pairs = sequences * tokens * half
            moved = sequences * tokens * 2 * (heads + kv_heads) * size * 2
        if least:
            return np.asarray(peak.roofline_s(4 * heads * size * pairs, moved, width))
        return np.asarray(peak.attention_s(pairs, moved, heads, size))

    return bound


def latent_bound(peak: Peak, table: str, kind: str, geometry: Geometry) -> Bound:
    width = {"fp8": 1, "bf16": 2}[kind]
    latent = geometry.latent_dim + geometry.rope_dim

    def bound(heads: np.ndarray, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if table == "latent-decode":
            pairs, size = sequences * tokens, latent
            moved = sequences * tokens * latent * width
        else:
            pairs, size = sequences * tokens * tokens / 2, geometry.head_dim
            moved = sequences * tokens * heads * size * 6
        return np.asarray(peak.attention_s(pairs, moved, heads, size))

    return bound


def all_reduce_bound(peak: Peak) -> Bound:
    """A ring whose links are as fast as memory, which none is."""

    def bound(gpus: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return np.asarray(2 * (gpus - 1) / gpus * 2 * numbers / peak.bytes_per_s + LAUNCH_S)

    return bound
