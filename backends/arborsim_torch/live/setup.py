"""A live search's setup: its problems and options, the signals it takes, its controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.core.shape import CacheShape
from arborsim.play.controller import Controller, Executor, Meter
from arborsim.policies.base import Policy
from arborsim.searches import Search
from arborsim.trace.schema import VECTORS
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.capture import ALL_SIGNALS, Capture
from arborsim_torch.decoder import PREFILL_BLOCK
from arborsim_torch.live.feed import Feed
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.rewards.base import Embedder, Reward
from arborsim_torch.sampling import Sampler
from arborsim_torch.sources import Source

#: Fields of a setup that its recorders have, too.
_OF_RECORDER = (
    *("model", "source", "seed", "max_tokens", "dedupe"),
    *("prefill_block", "clock", "reward", "embedder", "graphs"),
)


@dataclass(frozen=True)
class SearchSetup:
    """The problems that are searched, and how; the same for every policy."""

    model: Any  #: A causal language model that `TreeDecoder` takes
    source: Source
    make_search: Callable[[], Search]  #: A new search object
    temperature: float
    seed: int
    max_tokens: int  #: generated tokens per path
    dedupe: bool = True
    attention_top: int = 0  #: positions kept per attention row.  0 keeps rows whole.
    prefill_block: int = PREFILL_BLOCK
    #: seconds since some moment: what all times are measured with
    clock: Callable[[], float] = time.perf_counter
    reward: Reward | None = None  #: None for the source's own
    embedder: Embedder | None = None  #: None for the model's mean last hidden states
    top_p: float = 1.0
    graphs: bool = True  #: on CUDA, replay decode steps as graphs wherever they can be captured

    def recorder(
        self,
        problem: Problem,
        capture: Capture | None,
        listener: Feed | None,
        cache: TieredCache | None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> EpisodeRecorder:
        shared: dict[str, Any] = {name: getattr(self, name) for name in _OF_RECORDER}
        return EpisodeRecorder(
            **shared,
            search=self.make_search(),
            capture=capture,
            sampler=Sampler(self.temperature, (self.seed, problem.index), self.top_p),
            on_tokens=on_tokens,
            listener=listener,
            cache=cache,
        )


@dataclass(frozen=True)
class CacheOptions:
    """How tokens below HBM take part in attention."""

    recall: str = "stage"  #: {"stage", "stream", "near", "ondemand"}
    overlap: bool = True  #: False waits for every copy at once
    page_tokens: int = 16  #: pools grow and shrink by this number of slots
    #: gather in the order of tokens: the same bits wherever tokens are, a reference, and slow
    ordered: bool = False


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
    """The capture of the signals that policies read; None if they read none.

    With `uses`, attention is reduced on the device to what policies need of it (`row_uses`), and of
    keys and values in `sizes` L1 norms are taken (`read_as_norms`), without, all rows and vectors
    are taken.  Outputs are taken of `hidden_layers` (of all `layers` without), if they are needed.
    Raises `UsageError`: a signal that no live search has.
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
        top,
        layers if vectors or sizes or of_heads else (),
        rows,
        sorted(hidden_layers) if Signal.HIDDEN in needs else (),
        signals=needs & ALL_SIGNALS,
        vectors=frozenset(VECTORS) if keep else vectors,
        embeddings=embeddings,
        keep=keep,
        uses=uses or frozenset(),
        sizes=sizes,
    )


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
    config = model.config
    sizes = {"layers": config.num_hidden_layers, "vocabulary": config.vocab_size}
    return Controller(
        policy, executor, budget_tokens=budget_tokens, shape=shape, meters=meters, **sizes
    )
