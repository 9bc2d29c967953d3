"""Live searches under policies that really remove tokens, run together in one forward pass.

Policies that decide without removing anything are in `arborsim_torch.live.shadow`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from arborsim.core.geometry import Geometry
from arborsim.core.measurements import Measurements
from arborsim.machine.live_memory import LiveSearch
from arborsim.memory.moves import MostMoved
from arborsim.play.controller import Executor, Meter
from arborsim.policies.base import Policy, hidden_layers, hints_of, read_as_norms, row_uses
from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import Pass, TreeDecoder
from arborsim_torch.hardware.memory import usable_bytes
from arborsim_torch.live.executor import LiveExecutor, device_peak_bytes, waits_on
from arborsim_torch.live.feed import Feed
from arborsim_torch.live.memory import Forecast, places_of
from arborsim_torch.live.setup import CacheOptions, SearchSetup, capture_of_signals, make_controller
from arborsim_torch.models import cache_shape
from arborsim_torch.recording import EpisodeResult, Iterations
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.tiers.codec import codec_of
from arborsim_torch.tiers.link import HostLink

_GAUGED_EVERY = 256  # iterations
_HOST_SHARE = 0.25  # of the host's free memory that a search sets aside at most
_WHILE_LEAVING = 64  # steps decoded, at most as a rule, while tokens are on their way to DDR


@dataclass(frozen=True)
class LiveOutcome:
    """The outcome of one search under one policy."""

    episode: EpisodeResult
    measured: Measurements
    allocated_bytes: int  #: largest size of the pools' tensors on the device
    device_peak_bytes: int  #: largest memory of PyTorch's allocator, weights included; 0 on the CPU


@dataclass(frozen=True)
class _Readable:
    """Which tokens attention reads now, per captured layer and KV head."""

    cache: TieredCache

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        held = self.cache.selected(tokens)
        held &= self.cache.place.values[:, tokens] != Place.LOST
        layout = self.cache.layout
        if layout.grouping == "head":
            return held.reshape(layout.layers, layout.kv_heads, -1)
        shape = (layout.layers, layout.kv_heads, len(tokens))
        return np.asarray(np.broadcast_to(held[:, None], shape))


class PolicySearch:
    """A search with a policy deciding what stays in the cache.

    Iterate over `steps`, sending logits, and ask for the `outcome`.  `wrap` may put another
    executor around the live one; the controller then drives that.
    Raises `UsageError`: the policy needs what no live search has.
    """

    def __init__(
        self,
        setup: SearchSetup,
        problem: Problem,
        policy: Policy,
        budget_tokens: int,
        machine: CacheOptions,
        *,
        meters: Sequence[Meter] = (),
        on_tokens: Callable[[int], None] | None = None,
        wrap: Callable[[LiveExecutor, Mover], Executor] | None = None,
    ) -> None:
        model, self._setup, self._policy = setup.model, setup, policy
        layout = Layout.of(model, policy.grouping)
        layers = tuple(range(layout.layers))
        needs = policy.reads()
        search = setup.make_search()
        capture = capture_of_signals(
            needs,
            layers,
            setup.attention_top,
            search,
            uses=row_uses(policy),
            sizes=read_as_norms(policy),
            hidden_layers=hidden_layers(policy, layout.layers),
        )
        self._link = HostLink(layout.device)
        formats = [codec_of(each, layout.head_dim) for each in policy.formats]
        self.cache = TieredCache(
            layout,
            quantised=formats,
            page_tokens=machine.page_tokens,
            ordered=machine.ordered,
            recall=machine.recall,
            link=self._link,
        )
        mover = Mover(self.cache, self._link, recall=machine.recall, overlap=machine.overlap)
        self._executor = LiveExecutor(mover, setup.clock)
        self._held_up = mover.held_up
        driven = self._executor if wrap is None else wrap(self._executor, mover)
        shape = cache_shape(model)
        controller = make_controller(policy, driven, budget_tokens, model, shape, meters)
        self._reserved_tokens = self._kept_tokens = 0
        self._reserve(policy, budget_tokens, len(problem.prompt), search.slots, machine)
        self._reserve_host(policy, budget_tokens, len(problem.prompt), search.slots)
        watch = (_Readable(self.cache), self._executor.attach, setup.clock)
        self._feed = Feed([controller], capture, needs, layers, *watch)
        self._on_tokens, self._iterations = on_tokens, 0
        self._recorder = setup.recorder(problem, capture, self._feed, self.cache, self._went_on)
        self._problem, self._clock = problem, setup.clock
        self._block, self._recall = setup.prefill_block, machine.recall

    def _reserve(
        self, policy: Policy, budget: int, prompt: int, slots: int, machine: CacheOptions
    ) -> None:
        """Give pools the slots that are known to be needed: then none grows while decoding.

        HBM at full precision gets them at once, the others with their first tokens: quantised
        tokens are no more than the budget allows, staged ones no more than the path has.  A prompt
        that is larger than the budget has its slots until the first decision, and next to those of
        tokens on their way to DDR there is room for new ones.  How large a tree becomes without a
        budget is not known, nor a path that has no limit.
        """
        expected = prompt + slots * self._setup.max_tokens
        if policy.bounded:
            room = min(budget, expected) + slots + (slots > 1)  # what pads a batch takes one
        elif slots == 1 and expected <= self._setup.model.config.max_position_embeddings:
            room = expected
        else:  # the search's own end is not in sight
            return
        offloads = machine.overlap and any(tier.offloaded for tier in policy.tiers)
        spare = slots * _WHILE_LEAVING if offloads else 0
        pools = self.cache.pools
        self._reserved_tokens = max(room, prompt) + spare
        pools[Place.HBM].reserve(self._reserved_tokens)
        if self.cache.layout.groups == 1:  # otherwise groups share the budget as they see fit
            self._kept_tokens = room + spare
            pools[Place.HBM].keep(self._kept_tokens)
        for place, pool in pools.items():
            if place.in_hbm and place.quantised:
                pool.keep(room)
            # Of a tree, it is not known what active paths hold; other recall modes have buffers.
            elif place.staged and slots == 1 and machine.recall == "stage":
                reads_pages = hints_of(policy).bounds_page  # some of them alone
                pool.keep(room if reads_pages else expected)

    def _reserve_host(self, policy: Policy, budget: int, prompt: int, slots: int) -> None:
        """Set the host's memory aside that the policy's DDR will need, as engines do at start.

        Locking its pages while tokens move would hold the search up for longer than their copies.
        Each format has room for all: how many tokens there are of each is known later.  Of a tree,
        what the paths that are open at a time have; pools grow for the others.
        """
        places = [at for at in places_of(policy) if at.on_host]
        tokens = hints_of(policy).ddr_tokens(prompt, slots * self._setup.max_tokens, budget)
        if not places or not tokens:
            return
        room = int(_HOST_SHARE * usable_bytes(torch.device("cpu")))
        for place in places:
            pool = self.cache.pools[place]
            assert isinstance(pool, HostPool)
            room -= pool.reserve_up_to(tokens + slots * _WHILE_LEAVING, max(0, room))

    def steps(self) -> Iterations[EpisodeResult]:
        """See `EpisodeRecorder.steps`; raises `BudgetInfeasible` where the policy does."""
        try:
            return (yield from self._recorder.steps(self._problem))
        finally:
            self.cache.close()
            self._link.close()

    def prepare(self, tokens: list[int]) -> Pass:
        """See `EpisodeRecorder.prepare`."""
        return self._recorder.prepare(tokens)

    def _went_on(self, tokens: int) -> None:
        """An iteration is over; an executor hears of it when the next decision is due."""
        self._iterations += 1
        if self._iterations % _GAUGED_EVERY == 0:
            self._executor.gauge.observe(self._executor.clock())
        if self._on_tokens is not None:
            self._on_tokens(tokens)

    def measurements(self) -> Measurements:
        """Measurements so far, but for the seconds of the model."""
        measured = self._executor.measurements()
        time = measured.time
        # Outside forward passes the host waits for moves, which a clock of the thread's own time
        # does not see, and works on them.
        host_s = waits_on(self._clock) * self._held_up.host_s + self._executor.moving_s
        spent_s = self._feed.handling_s - self._feed.signals_s
        time.policy_s = max(0.0, spent_s - time.rehydration_s - host_s)
        return measured

    def memory(self, simulated: Measurements, geometry: Geometry, moved: MostMoved) -> LiveSearch:
        """Its memory on the device, as far as a simulation of the search can say (`moved` too)."""
        kept = (self._reserved_tokens, self._kept_tokens)
        prompt = len(self._problem.prompt)
        forecast = Forecast(self.cache, self._policy, prompt, self._block, self._recall, *kept)
        return forecast.memory(simulated, geometry, moved)

    @property
    def replayed_steps(self) -> int:
        """Decode steps so far that CUDA graphs computed."""
        decoder = self._recorder.decoder
        static = decoder.static if isinstance(decoder, TreeDecoder) else None
        return 0 if static is None or static.graphs is None else static.graphs.replays

    def outcome(self, episode: EpisodeResult) -> LiveOutcome:
        """Everything measured, once the search is over."""
        measured = self.measurements()
        # Inside forward passes the device waits for moves, and these for tokens from the host.
        waited_s = self._held_up.device_s + self.cache.pass_exposed_s
        measured.time.prefill_s = episode.prefill_s
        # What the device does for signals is part of decoding; what the host makes of them is not.
        decode_s = episode.forward_s + self._feed.signals_s
        measured.time.decode_s = max(0.0, decode_s - waits_on(self._clock) * waited_s)
        return LiveOutcome(
            episode,
            measured,
            self._executor.gauge.allocated_bytes,
            device_peak_bytes(self.cache.layout.device),
        )
