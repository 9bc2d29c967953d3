"""Forward passes of live searches: prefills, and decode iterations of several lanes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from arborsim.products.calibrate.backend import Pass
from arborsim_torch.hardware.model import Counted, first_layers
from arborsim_torch.hardware.searches import THOUGHT, Fanned, fanned
from arborsim_torch.hardware.timing import Timer


@dataclass(frozen=True)
class Design:
    """Which passes are timed, and which of them are held out of the fit.

    A pass is held out if its length, its lanes (both rising) or its layers are: with `held_layers`
    two thirds of the depth are timed, too, and held out.  All is gone through `sweeps` times, if
    there is time, with `rounds` searches over each length, whose thoughts have `thought` tokens.
    Longer lengths are left out when those before have taken `limit_s`.
    """

    lengths: tuple[int, ...]
    held_lengths: frozenset[int]
    lanes: tuple[int, ...]
    held_lanes: frozenset[int]
    held_layers: bool
    sweeps: int
    rounds: int
    thought: int
    limit_s: float

    def layers(self, depth: int) -> dict[int, bool]:
        """Numbers of layers, and whether they are held out."""
        third = max(1, depth // 3)
        between = (third + depth) // 2
        found = {third: False, depth: False}
        if self.held_layers and between not in found:
            found[between] = True
        return found


def make_design(on_gpu: bool, quick: bool) -> Design:
    """On a GPU, longer prompts: short ones all cost the same, since the weights are most of what
    is read, and few of their steps have the same graph."""
    lanes, held = (1, 2, 4, 8, 16), frozenset({2, 8})
    lengths: tuple[int, ...]
    if quick:
        lengths = (512, 2048, 8192) if on_gpu else (64, 256, 512, 1024)
        limit_s, held_lengths = 25.0 if on_gpu else 8.0, frozenset({lengths[-2]})
        return Design(lengths, held_lengths, lanes, held, False, 2, 1, THOUGHT, limit_s)
    if on_gpu:
        lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    else:
        lengths = (64, 128, 256, 512, 1024, 1536, 2048)
    return Design(lengths, frozenset(lengths[1::2]), lanes, held, True, 3, 2, THOUGHT, 80.0)


def time_passes(
    timer: Timer, model: Any, design: Design, tell: Callable[[int, int], None]
) -> tuple[list[Pass], list[str]]:
    """All passes of the design, and notes on those that would have taken too long."""
    if timer.device.type == "cuda":  # compile and load all kernels: that is no part of the limit
        for length in design.lengths:
            lanes = design.lanes if length == design.lengths[0] else (1,)
            fanned(timer, model, length, lanes, design.thought, math.inf)
    began = time.perf_counter()
    found: dict[_Key, list[Pass]] = {}
    notes: list[str] = []
    for sweep in range(design.sweeps):
        start = time.perf_counter()
        part = _Part(sweep, design.sweeps, tell)
        for key, one in _sweep(timer, model, design, part, [] if sweep else notes):
            found.setdefault(key, []).append(one)
        now = time.perf_counter()
        if 2 * now - start - began > design.limit_s:
            break  # another one would take too long
    tell(1, 1)
    # Medians, not the best: a search's iterations are not the best ones either.
    return [
        replace(each[0], seconds=statistics.median(one.seconds for one in each))
        for each in found.values()
    ], notes


#: Length, kind, layers and lanes.
_Key = tuple[int, str, int, int]


@dataclass(frozen=True)
class _Part:
    """Progress of one sweep as a part of all."""

    sweep: int
    sweeps: int
    tell: Callable[[int, int], None]

    def __call__(self, done: int, total: int) -> None:
        self.tell(self.sweep * total + done, self.sweeps * total)


def _sweep(
    timer: Timer, model: Any, design: Design, part: _Part, notes: list[str]
) -> Iterator[tuple[_Key, Pass]]:
    """Every pass once; `notes` get what would take longer than its share of the limit."""
    depths = design.layers(model.config.num_hidden_layers)
    for i, (layers, held_out) in enumerate(sorted(depths.items())):
        share_s = design.limit_s * layers / sum(depths)
        began, took_s, prefill_s, before = time.perf_counter(), 0.0, 0.0, 1
        prefills = 2 * design.rounds  # a chain's, and one before several lanes
        with first_layers(model, layers) as counted:
            timing = _Timing(timer, model, design, layers, counted, share_s)
            for j, length in enumerate(design.lengths):
                part(i * len(design.lengths) + j, len(depths) * len(design.lengths))
                start = time.perf_counter()
                # What prefills take grows with the length, and little else does.
                expected_s = took_s + prefills * prefill_s * ((length / before) ** 1.5 - 1)
                if j > 1 and start - began + expected_s > share_s:
                    kept = " ".join(map(str, design.lengths[:j]))
                    notes.append(f"{layers} layers: lengths {kept} only, longer ones take too long")
                    break
                for one in timing.of_length(length, held_out or length in design.held_lengths):
                    prefill_s = one.seconds if one.kind == "prefill" else prefill_s
                    yield (length, one.kind, one.layers, one.lanes), one
                took_s, before = time.perf_counter() - start, length


@dataclass(frozen=True)
class _Timing:
    timer: Timer
    model: Any
    design: Design
    layers: int
    counted: Counted
    limit_s: float

    def of_length(self, length: int, held_out: bool) -> Iterator[Pass]:
        """A prefill of `length` tokens, and decode iterations after it."""
        design = self.design
        share_s = self.limit_s / (len(design.lengths) * (design.rounds + 1))  # of one search
        if length == self.design.lengths[0]:  # the first pass of all is not like the others
            self._fanned(length, share_s)
        prefills, decodes = list[float](), dict[int, list[float]]()
        for _ in range(self.design.rounds):
            one = self._fanned(length, share_s)
            prefills.append(one.prefill_s)
            for lanes, seconds in one.iteration_s.items():
                decodes.setdefault(lanes, []).append(seconds)
        prefill_s, weights = statistics.median(prefills), self.counted.prefill
        lengths = (length, length, length)
        yield Pass("prefill", self.layers, weights, 1, *lengths, prefill_s, held_out)
        own = (self.design.thought + 2) / 2  # the first iteration of a thought is left out
        for lanes, taken in decodes.items():
            held, cached = held_out or lanes in self.design.held_lanes, length + lanes * own
            step_s, weights = statistics.median(taken), self.counted.decode
            yield Pass("decode", self.layers, weights, lanes, 1, length + own, cached, step_s, held)

    def _fanned(self, length: int, limit_s: float) -> Fanned:
        design = self.design
        return fanned(self.timer, self.model, length, design.lanes, design.thought, limit_s)
