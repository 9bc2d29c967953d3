"""Live searches under policies that really remove tokens, run together in one forward pass.

Policies that decide without removing anything are in `arborsim_torch.live.shadow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.core.measurements import Measurements
from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.core.shape import CacheShape
from arborsim.core.tiers import Tier
from arborsim.machine.live_memory import LiveSearch, last_rows_bytes, moving_bytes
from arborsim.memory.moves import MostMoved
from arborsim.play.controller import Controller, Executor, Meter
from arborsim.policies.base import Policy
from arborsim.searches import Search
from arborsim.trace.schema import PER_LAYER, VECTORS
from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.layout import STAGED, Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.ondemand import PageAttention
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.capture import ALL_SIGNALS, MAX_PENDING_BYTES, Capture
from arborsim_torch.decoder import PREFILL_BLOCK, Pass, TreeDecoder
from arborsim_torch.hardware.memory import usable_bytes
from arborsim_torch.live.executor import LiveExecutor, device_peak_bytes, waits_on
from arborsim_torch.live.feed import Feed
from arborsim_torch.models import cache_shape
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.recording import EpisodeResult, Iterations
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.rewards.base import Embedder, Reward
from arborsim_torch.sampling import Sampler
from arborsim_torch.sources import Source
from arborsim_torch.tiers.codec import codec_of
from arborsim_torch.tiers.link import HostLink
from arborsim_torch.token_signals import SKETCH_SIZE

_GAUGED_EVERY = 256  # iterations
_HOST_SHARE = 0.25  # of the host's free memory that a search sets aside at most
_WHILE_LEAVING = 64  # steps decoded, at most as a rule, while tokens are on their way to DDR


@dataclass(frozen=True)
class SearchSetup:
    """What is searched, and how; the same for every policy.

    Attributes
    ----------
    model
        A causal language model that `TreeDecoder` takes.
    source : Source
    make_search : callable
        A new search object.
    temperature, top_p : float
    seed : int
    max_tokens : int
        Generated tokens per path.
    dedupe : bool
    attention_top : int
        Positions kept per attention row; 0 keeps rows whole.
    prefill_block : int
    clock : callable
        Seconds since some moment: what all times are measured with.
    reward : Reward or None
        None for the source's own.
    embedder : Embedder or None
        None for the model's mean last hidden states.
    graphs : bool
        On CUDA, replay decode steps as graphs wherever they can be captured.
    """

    model: Any
    source: Source
    make_search: Callable[[], Search]
    temperature: float
    seed: int
    max_tokens: int
    dedupe: bool = True
    attention_top: int = 0
    prefill_block: int = PREFILL_BLOCK
    clock: Callable[[], float] = time.perf_counter
    reward: Reward | None = None
    embedder: Embedder | None = None
    top_p: float = 1.0
    graphs: bool = True

    def recorder(
        self,
        problem: Problem,
        capture: Capture | None,
        listener: Feed | None,
        cache: TieredCache | None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> EpisodeRecorder:
        return EpisodeRecorder(
            model=self.model,
            source=self.source,
            search=self.make_search(),
            capture=capture,
            sampler=Sampler(self.temperature, (self.seed, problem.index), self.top_p),
            seed=self.seed,
            max_tokens=self.max_tokens,
            dedupe=self.dedupe,
            on_tokens=on_tokens,
            listener=listener,
            cache=cache,
            prefill_block=self.prefill_block,
            clock=self.clock,
            reward=self.reward,
            embedder=self.embedder,
            graphs=self.graphs,
        )


@dataclass(frozen=True)
class CacheOptions:
    """How tokens below HBM take part in attention.

    Attributes
    ----------
    recall : {"stage", "stream", "near", "ondemand"}
    overlap : bool
        False waits for every copy at once.
    page_tokens : int
        Pools grow and shrink by this number of slots.
    ordered : bool
        Gather keys and values in the order of tokens, so that results are the same bits wherever
        tokens are: a reference, and slow.
    """

    recall: str = "stage"
    overlap: bool = True
    page_tokens: int = 16
    ordered: bool = False


@dataclass(frozen=True)
class LiveOutcome:
    """What came of one search under one policy.

    Attributes
    ----------
    episode : EpisodeResult
    measured : Measurements
    allocated_bytes : int
        Largest size of the pools' tensors on the device.
    device_peak_bytes : int
        Largest memory of PyTorch's allocator, weights included; 0 on the CPU.
    """

    episode: EpisodeResult
    measured: Measurements
    allocated_bytes: int
    device_peak_bytes: int


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


def capture_of_signals(
    needs: frozenset[Signal],
    layers: tuple[int, ...],
    top: int,
    search: Search,
    keep: bool = False,
    uses: frozenset[RowUse] | None = None,
    sizes: frozenset[Signal] = frozenset(),
    hidden_layers: Collection[int] | None = None,
) -> Capture | None:
    """What takes the signals that policies read; None if they read none.

    With `uses`, attention is reduced on the device to what policies need of it
    (`Policy.row_uses`), and of keys and values in `sizes` L1 norms are taken (`Policy.sizes`);
    without, all rows and vectors are taken.  Outputs are taken of `hidden_layers` (of all `layers`
    without), if they are needed.

    Raises
    ------
    UsageError
        A signal that no live search has.
    """
    if Signal.EVICTION_TIME in needs:
        raise UsageError("the offline optimum needs the future: replay a trace instead")
    vectors = needs & frozenset(VECTORS)
    if uses is not None:
        needs, vectors = _without_rows(needs, vectors - sizes, uses)
        sizes -= vectors
    elif Signal.HEAD_ATTENTION in vectors:
        vectors |= {Signal.KEYS}  # rows are made from queries and keys
    rows = layers if Signal.LAYER_ATTENTION in needs else ()
    of_heads = any(use.of_heads for use in uses or ())
    embeddings = keep or search.uses_embeddings
    hidden_layers = layers if hidden_layers is None else hidden_layers
    if needs <= {Signal.READERS} and not sizes and not (embeddings or uses):
        return None
    return Capture(
        top, layers if vectors or sizes or of_heads else (), rows,
        sorted(hidden_layers) if Signal.HIDDEN in needs else (),
        signals=needs & ALL_SIGNALS, vectors=frozenset(VECTORS) if keep else vectors,
        embeddings=embeddings, keep=keep, uses=uses or frozenset(), sizes=sizes,
    )  # fmt: skip


def _without_rows(
    needs: frozenset[Signal], vectors: frozenset[Signal], uses: frozenset[RowUse]
) -> tuple[frozenset[Signal], frozenset[Signal]]:
    """Signals and vectors that are left to take where rows are reduced as `uses` say."""
    kept = {(use.grouping, use.keeps) for use in uses}
    if ("shared", "rows") not in kept:
        needs -= {Signal.ATTENTION}
    if ("head", "rows") in kept:
        return needs, vectors | {Signal.KEYS}
    if ("head", "queries") not in kept:
        return needs - {Signal.HEAD_ATTENTION}, vectors - {Signal.HEAD_ATTENTION}
    return needs, vectors


class PolicySearch:
    """A search with a policy deciding what stays in the cache.

    Iterate over `steps`, sending logits, and ask for the `outcome`.  `wrap` may put another
    executor around the live one; the controller then drives that.

    Raises
    ------
    UsageError
        The policy needs what no live search has.
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
            uses=policy.row_uses(),
            sizes=policy.sizes(),
            hidden_layers=policy.hidden_layers(layout.layers),
        )
        self._link = HostLink(layout.device)
        self.cache = TieredCache(
            layout, page_tokens=machine.page_tokens, ordered=machine.ordered, recall=machine.recall,
            link=self._link,
            quantised=[codec_of(each, layout.head_dim) for each in policy.formats],
        )  # fmt: skip
        mover = Mover(self.cache, self._link, recall=machine.recall, overlap=machine.overlap)
        self._executor = LiveExecutor(mover, setup.clock)
        self._held_up = mover.held_up
        driven = self._executor if wrap is None else wrap(self._executor, mover)
        shape = cache_shape(model)
        controller = make_controller(policy, driven, budget_tokens, model, shape, meters)
        self._reserved_tokens = self._kept_tokens = 0
        self._reserve(policy, budget_tokens, len(problem.prompt), search.slots, machine)
        self._reserve_host(policy, budget_tokens, len(problem.prompt), search.slots)
        self._feed = Feed(
            [controller], capture, needs, layers, _Readable(self.cache), self._executor.attach,
            setup.clock,
        )  # fmt: skip
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
        offloads = machine.overlap and any(tier.offloaded for tier in policy.method.tiers)
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
                pool.keep(room if policy.bounds_page else expected)  # it reads some pages alone

    def _reserve_host(self, policy: Policy, budget: int, prompt: int, slots: int) -> None:
        """Set the host's memory aside that the policy's DDR will need, as engines do at start.

        Locking its pages while tokens move would hold the search up for longer than their copies.
        Each format has room for all: how many tokens there are of each is known later.  Of a tree,
        what the paths that are open at a time have; pools grow for the others.
        """
        places = [at for at in self._places if at.on_host]
        tokens = policy.ddr_tokens(prompt, slots * self._setup.max_tokens, budget)
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
        """What was measured so far, but for the seconds of the model."""
        measured = self._executor.measurements()
        time = measured.time
        # Outside forward passes the host waits for moves, which a clock of the thread's own time
        # does not see, and works on them.
        host_s = waits_on(self._clock) * self._held_up.host_s + self._executor.moving_s
        spent_s = self._feed.handling_s - self._feed.signals_s
        time.policy_s = max(0.0, spent_s - time.rehydration_s - host_s)
        return measured

    def memory(self, simulated: Measurements, geometry: Geometry, moved: MostMoved) -> LiveSearch:
        """Its memory on the device, as far as a simulation of the search can say.

        Parameters
        ----------
        simulated : Measurements
        geometry : Geometry
        moved : MostMoved
            Of the same simulation.
        """
        most = moved.most_tokens
        kept = most if moved.kept_tokens is None else moved.kept_tokens
        prompt = len(self._problem.prompt)
        uses = self._policy.row_uses()
        reduced = [
            use for use in uses
            if use.reduced and use.prompt and not use.of_heads and use.keeps != "sparsity"
        ]  # fmt: skip
        waiting, own = self._waiting_bytes(geometry)
        quantised, others = self._apart_bytes(simulated, moved)
        staged, groups = self._recall == "stage", self.cache.layout.groups
        first, later = moving_bytes(moved, geometry, self._policy.formats, groups, staged)
        return LiveSearch(
            geometry,
            prompt,
            most,
            kept=kept if kept < prompt else None,
            reserved=self._reserved_tokens,
            keeps=self._kept_tokens,
            rows_from=min((use.first(prompt) for use in reduced), default=None),
            counted_from=min(
                (use.first(prompt) for use in uses if use.keeps == "sparsity" and use.prompt),
                default=None,
            ),
            groups=groups,
            signals=not self._policy.reads() <= {Signal.READERS},
            waiting_bytes=waiting,
            own_bytes=own,
            last_rows_bytes=last_rows_bytes(uses, geometry, prompt),
            apart_bytes=quantised + others,
            first_apart_bytes=quantised,
            first_moving_bytes=first,
            moving_bytes=later,
            block=self._block,
            page=self.cache.pools[Place.HBM].page_tokens,
        )

    def _apart_bytes(self, simulated: Measurements, moved: MostMoved) -> tuple[int, int]:
        """Of quantised tokens in HBM and of staged ones: if there are any, what their pools keep.

        Tokens that lie quantised in DDR are staged as they are.
        """
        pools, here, found = self.cache.pools, 0, 0
        quantised, staged = simulated.peak_quantised_bytes, simulated.peak_staging_bytes
        if quantised and (own := [at for at in self._places if at.in_hbm and at.quantised]):
            here = max(quantised, sum(pools[at].kept_bytes for at in own))
        on_host = [at for at in self._places if at.on_host and moved.reached[Tier[at.name]]]
        attention = self.cache.host_attention
        if isinstance(attention, PageAttention):
            ddr = simulated.peak_ddr_bytes
            for at in on_host:
                size = pools[at].bytes_per_slot * pools[at].layout.groups
                found += attention.bytes_of(at, -(-ddr // size)) if quantised or not at.rung else 0
        elif staged:
            away = [at for at in on_host if quantised or not at.quantised]
            found += max(staged, sum(pools[STAGED[at]].kept_bytes for at in away))
        return here, found

    @property
    def _places(self) -> list[Place]:
        """Where the policy's tokens can be."""
        tiers = self._policy.method.tiers
        return sorted({Place[tier.name] for tier in tiers if tier != Tier.EVICTED})

    def _waiting_bytes(self, geometry: Geometry) -> tuple[int, int]:
        """Signals of the prompt that wait on the device until they are taken to the host.

        And those of its last block, but for queries, which are there as attention reads them.
        """
        g, prompt, reads = geometry, len(self._problem.prompt), self._policy.reads()
        queries = [
            min(prompt, use.prompt) for use in self._policy.row_uses()
            if use.of_heads or (use.grouping == "head" and use.keeps in ("rows", "queries"))
        ]  # fmt: skip
        vector, block = 2 * g.layers * g.head_dim, min(prompt, self._block)
        # A pass leaves those of its whole block, of which the last ones are taken.
        taken = max(block, *queries) if queries else 0
        reduced = self._policy.sizes()
        whole, layers = reads & {Signal.KEYS, Signal.VALUES} - reduced, reads & frozenset(PER_LAYER)
        of_token = g.kv_heads * (vector * len(whole) + 8 * g.layers * len(reduced))
        of_token += 2 * g.layers * len(layers) + 2 * SKETCH_SIZE * (Signal.KEY_SKETCH in reads)
        of_token += 2 * g.hidden * len(self._policy.hidden_layers(g.layers))
        total = taken * g.heads * vector + prompt * of_token
        of_block = min(block, taken) * g.heads * vector + block * of_token
        return min(total, MAX_PENDING_BYTES + of_block), block * of_token

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


def make_controller(
    policy: Policy,
    executor: Executor,
    budget_tokens: int,
    model: Any,
    shape: CacheShape,
    meters: Sequence[Meter],
) -> Controller:
    if shape.rope is None and Signal.ROPE in policy.reads():
        raise UsageError(
            f"{policy.name} needs to know how keys are rotated, but the RoPE of this model changes "
            "with the context's length, or from layer to layer"
        )
    return Controller(
        policy,
        executor,
        budget_tokens=budget_tokens,
        layers=model.config.num_hidden_layers,
        vocabulary=model.config.vocab_size,
        shape=shape,
        meters=meters,
    )
