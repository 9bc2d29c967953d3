"""The host's time to launch kernels, graphs and decode steps, and to move tokens.

Until everything is launched, that is: nothing here waits for the device.  On a CPU, where a call
computes, only the dispatch of an operator on a few numbers says something about the host alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from arborsim.core.tiers import Tier
from arborsim.products.calibrate.backend import Launches, Moved, Spread
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.hardware.model import first_layers
from arborsim_torch.hardware.timing import Timer, aside, capture
from arborsim_torch.tiers.link import HostLink

_NUMBERS = 64  # of the tensor that a small kernel changes
_KERNELS = 128  # launched after each other: far fewer than a driver queues
_OF_LAYER = 32  # kernels of a graph for each layer of the model, about as many as a step's has
_PROMPT, _STEPS = 64, 12  # tokens; the first steps of a search are not like the others
_WARM = 4
#: Tokens that move together, and by which groups of the cache their policies decide.
_MOVED = (16, 64, 256)
_GROUPINGS = ("shared", "layer")


def measure_launches(timer: Timer, model: Any) -> Launches:
    """Seconds of the host, with their spread over repetitions."""
    small = torch.zeros(_NUMBERS, device=timer.device)

    def kernels(count: int = _KERNELS) -> None:
        for _ in range(count):
            small.add_(1.0)

    kernel = _spread(timer, kernels, _KERNELS)
    if timer.device.type != "cuda":
        return Launches(kernel)
    depth = model.config.num_hidden_layers
    with aside(timer.device):
        kernels(1)
    graph, _ = capture(partial(kernels, _OF_LAYER * depth), timer.device)
    steps = {layers: _steps(timer, model, layers) for layers in (max(1, depth // 2), depth)}
    replayed = None if graph is None else _spread(timer, graph.replay, 1)
    return Launches(kernel, replayed, steps)


def _spread(timer: Timer, work: Callable[[], Any], calls: int) -> Spread:
    """Seconds of one of the calls that `work` makes, until it returns."""
    work()
    taken = []
    for _ in range(timer.rounds * timer.repeats):
        timer.synchronize()
        began = timer.clock()
        work()
        taken.append((timer.clock() - began) / calls)
    timer.synchronize()
    return _of(taken)


def _of(taken: list[float]) -> Spread:
    return Spread(statistics.median(taken), min(taken), max(taken), len(taken))


def _steps(timer: Timer, model: Any, layers: int) -> Spread:
    """Decode steps of one sequence that keeps everything, launched kernel by kernel."""
    taken = []
    with first_layers(model, layers):
        decoder = TreeDecoder(model, graphs=False)
        decoder.prefill([1] * _PROMPT)
        decoder.open(1, 0)
        decoder.activate([1])
        for _ in range(_WARM + max(_STEPS, timer.rounds * timer.repeats)):
            timer.synchronize()
            began = timer.clock()
            decoder.step([1])
            taken.append(timer.clock() - began)
        timer.synchronize()
    return _of(taken[_WARM:])


def measure_moves(timer: Timer, model: Any) -> tuple[Moved, ...]:
    """Tokens that go to DDR and are staged on the device again; waits are left out.

    The copies themselves run behind the host's work, on the link's own streams or threads.
    """
    found = []
    for grouping in _GROUPINGS:
        layout = Layout.of(model, grouping)
        for tokens in _MOVED:
            size = layout.groups * tokens * layout.elements_per_group * layout.dtype.itemsize
            seconds = _moves(timer, layout, tokens, timer.rounds * timer.repeats)
            found.append(Moved(layout.groups, 2 * size, 2, statistics.median(seconds)))
    return tuple(found)


def _moves(timer: Timer, layout: Layout, tokens: int, rounds: int) -> list[float]:
    """Seconds of the host each time that other `tokens` of every group go down, and up again."""
    taken = []
    with HostLink(layout.device) as link:
        cache = TieredCache(layout, link=link)
        mover = Mover(cache, link)
        cache.open(0, -1)
        cache.activate([0])
        cache.begin(np.zeros((1, (rounds + 2) * tokens), dtype=np.int64))
        group = np.repeat(np.arange(layout.groups), tokens)
        target = np.full(len(group), Tier.DDR, dtype=np.int8)
        for first in range(0, (rounds + 1) * tokens, tokens):
            token = np.tile(np.arange(first, first + tokens), layout.groups)
            timer.synchronize()
            began, waited_s = timer.clock(), mover.held_up.host_s
            mover.move(GroupTokenPairs(group, token), target)
            mover.settle(wait=True)
            seconds = timer.clock() - began
            if timer.clock is not time.thread_time:  # which stands still meanwhile
                seconds -= mover.held_up.host_s - waited_s
            taken.append(seconds)
        assert (cache.place.values[:, : (rounds + 1) * tokens] == Place.STAGING).all()
    return taken[1:]  # the first round allocates what the others use again
