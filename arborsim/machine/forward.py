"""A forward pass in measured kernels: seconds of one GPU of those that share a model.

`arborsim.machine.kernels` has the times of single kernels; here they are put together as the layers
of a model need them.  What was not measured is derived from what was:

- fp32 takes twice as long as bf16.
- products with a type that has no table of its own (int4, or nvfp4 where only the weights are that
  narrow) take the time of bf16, scaled by a lower bound of arithmetic in bf16 and of bytes moved.
- a prompt that is computed on top of cached tokens takes the share of a whole prefill's attention
  that its pairs of queries and keys are.
- layers with a window take its kernels, with the window full.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import HEAD, KV_B, WEIGHT_BITS, Product
from arborsim.core.sourced import Basis
from arborsim.machine.grid import (
    LAUNCH_S,
    Bound,
    Grid,
    Peak,
    all_reduce_bound,
    attention_bound,
    latent_bound,
)
from arborsim.machine.kernels import TABLES, load_tables

if TYPE_CHECKING:
    from arborsim.core.geometry import Geometry
    from arborsim.machine.engine import EngineProfile
    from arborsim.machine.profile import HardwareProfile

REDUCES = 2  # all-reduces of a layer: after attention, and after the feed-forward part
_WIDTH = {"bf16": 2.0, **{name: bits / 8 for name, bits in WEIGHT_BITS.items()}}
#: Types of weights that are multiplied in their own type, which a GPU may lack.
_NATIVE = ("fp8", "fp8_block", "nvfp4")
_FUSED = ("fp8", "nvfp4")  # whose input engines quantise on the way
#: Kernels of experts by type of weights, where others than those of its name can compute them.
_EXPERT_KERNELS = {"mxfp4": ("mxfp4-mxfp8", "mxfp4"), "fp8": ("fp8", "fp8_block", "bf16")}
_FP32 = 4  # bytes
_KNOTS = 4  # of attention's curve between two measured numbers of tokens
#: What a module of latent attention includes of `arborsim.core.geometry.Geometry.products`.
_LATENT = ("q_a_kv_a", "q_b", "query", "kv_a", KV_B, "output")


class Forward:
    """Seconds of the parts of a pass; a `UsageError` if the tables lack what the model needs."""

    def __init__(
        self,
        profile: HardwareProfile,
        engine: EngineProfile,
        geometry: Geometry,
        gpus: int = 1,
        expert_parallel: int = 1,
    ) -> None:
        self.engine, self.geometry, self.gpus = engine, geometry, gpus
        self.profile, self._expert_parallel = profile, min(expert_parallel, gpus)
        self.tables = load_tables(profile.tables(engine.kernels))
        self.peak = Peak(profile.flops_per_s, profile.hbm_bytes_per_s)
        self._products_s: dict[tuple[int, int], float] = {}
        self._experts_s: dict[int, float] = {}
        self._prefill_s: dict[tuple[int, int], float] = {}
        self._attention: dict[tuple[str, int], Grid] = {}
        self._decodes: dict[int, Grid] = {}  # by window
        self._reduces: dict[bool, Grid] = {}
        self._curves: dict[int, tuple[list[float], list[float]]] = {}
        self._kv = {1: "fp8", 2: "bf16"}.get(geometry.kv_bytes_per_element, "bf16")
        heads = -(-geometry.heads // gpus)
        kv_heads = -(-geometry.kv_heads // gpus)
        self._heads, self._kv_heads = heads, kv_heads
        self.products = [each for each in geometry.products(gpus) if not self._inside(each)]

    def _inside(self, each: Product) -> bool:
        """Whether a product is part of the measured attention."""
        if not self.geometry.latent_dim or each.name not in _LATENT:
            return False
        return self._latent_module or each.name == KV_B

    @cached_property
    def _latent_module(self) -> bool:
        return self.tables.latent_covers == "module" and bool(self.tables.types("latent-decode"))

    # What depends on the number of tokens of a pass, and of sequences whose next token it gives.

    def products_s(self, tokens: int, sequences: int) -> float:
        """All matrix products but the routed experts'."""
        found = self._products_s.get((tokens, sequences))
        if found is None:
            found = 0.0
            for each, grids in zip(self.products, self._product_grids, strict=True):
                rows = max(1, sequences if each.name == HEAD else tokens)
                found += each.times * min(float(grid.seconds(rows)) for grid in grids)
            self._products_s[tokens, sequences] = found
        return found

    @cached_property
    def kernel_s(self) -> float:
        """The shortest measured product: launching it, and little more."""
        return float(self.tables.columns("product", "bf16")[-1].min())

    @cached_property
    def product_flops_per_s(self) -> float:
        """The rate of a measured product as those of queries and keys are: the head is the inner
        width.
        """
        rows = 2048
        each = Product("scores", rows, self.geometry.head_dim, 1)
        seconds = float(self._products_of("bf16", each).seconds(rows))
        return 2.0 * rows * rows * self.geometry.head_dim / seconds

    @cached_property
    def least_s(self) -> float:
        """Reading the weights of these products once, at the peak."""
        plain = self.geometry.weight_bytes_per_element
        widths = (_WIDTH[each.weights] if each.weights else plain for each in self.products)
        read = sum(each.size * width for each, width in zip(self.products, widths, strict=True))
        return read / self.peak.bytes_per_s

    @cached_property
    def _product_grids(self) -> list[list[Grid]]:
        """Seconds of each product by tokens, by the kernels that bound it: the fastest counts.

        Weights in 8 and 4 bits with one scale a matrix take no longer than bf16 would.  What was
        measured beyond that is launching and the pass that quantises the input, which engines fuse
        with the norm or the activation before it.
        """
        found = []
        for each in self.products:
            share = self.engine.quantised_share if each.weights else self.engine.product_share
            found.append([self._measured_product(each).shared(share)])
            if each.weights in _FUSED:
                plain = self._products_of("bf16", each)
                found[-1].append(plain.shared(self.engine.product_share))
        return found

    def _measured_product(self, each: Product) -> Grid:
        kind = each.weights or "bf16"
        known = self.tables.types("product")
        if kind in known:
            found = self._products_of(kind, each)
            single = not each.weights and self.geometry.weight_bytes_per_element == _FP32
            return found.scaled(_twice) if single else found
        if kind in _NATIVE:
            raise UsageError(
                f"{self.profile.name} has no measured {kind} products under "
                f"{self.engine.kernels} ({', '.join(known)}): choose other --weights, or another "
                "GPU or engine"
            )
        peak, shape, wide = self.peak, (each.out_features, each.in_features), _WIDTH["bf16"]
        return self._products_of("bf16", each).scaled(  # widened to bf16 before they are used
            lambda rows: (
                peak.product_s(rows, *shape, _WIDTH[kind], wide)
                / peak.product_s(rows, *shape, wide)
            )
        )

    def _products_of(self, kind: str, each: Product) -> Grid:
        width = _WIDTH[kind]

        def bound(out: Any, inner: Any, rows: Any) -> Any:
            return self.peak.product_s(rows, out, inner, width)

        def roofline(out: Any, inner: Any, rows: Any) -> Any:
            return self.peak.roofline_s(2 * rows * out * inner, out * inner * width, width)

        shape = each.out_features, each.in_features
        return self.tables.grid("product", kind, bound, *shape, roofline=roofline)

    def experts_s(self, tokens: int) -> float:
        """The routed experts of all layers."""
        if self._experts is None:
            return 0.0
        seconds = self._experts_s.get(tokens)
        if seconds is None:
            layers, found = self._experts
            seconds = layers * min(share * float(grid.seconds(tokens)) for grid, share in found)
            self._experts_s[tokens] = seconds
        return seconds

    @cached_property
    def _experts(self) -> tuple[int, list[tuple[Grid, float]]] | None:
        """Layers, and the kernels that can compute one, each with the share of its time.

        The fastest counts, those for fewer GPUs included.  Weights in fp8 with one scale a matrix
        run in kernels for a scale a block as well, and take no longer than bf16: the kernels for
        one scale that were measured of vLLM on Hopper (FlashInfer's CUTLASS) reach a fifth of the
        roofline.
        """
        wanted = self.geometry.experts_product()
        if wanted is None:
            return None
        kind = wanted.weights or "bf16"
        known = self.tables.types("experts")
        width, peak, parts = _WIDTH[kind], self.peak, self.gpus
        matrices = 3 * wanted.hidden * wanted.expert_dim

        def bound(tokens: np.ndarray) -> np.ndarray:
            used = 1 - (1 - wanted.experts_per_token / wanted.experts) ** tokens
            moved = matrices / parts * wanted.experts * used * width
            arithmetic = tokens * wanted.experts_per_token * matrices / parts / peak.flops_per_s
            return np.asarray(np.maximum(arithmetic, moved / peak.bytes_per_s) + LAUNCH_S)

        def roofline(tensor: int, expert: int) -> Bound:
            each = matrices * wanted.experts_per_token / tensor / expert  # those of one token
            read = each * width
            return lambda tokens: peak.roofline_s(2 * tokens * each, read + 0 * tokens, width)

        shape = wanted.hidden, wanted.expert_dim, wanted.experts, wanted.experts_per_token
        split = self.gpus // self._expert_parallel, self._expert_parallel
        model = dict(zip(TABLES["experts"], (*shape, *split), strict=False))
        kinds = [each for each in _EXPERT_KERNELS.get(kind, (kind,)) if each in known]
        kinds = kinds if set(kinds) != {"bf16"} or kind == "bf16" else []
        fewer = [split[0] >> n for n in range(split[0].bit_length())]
        made = [
            self.tables.experts(each, {**model, "tensor_parallel": tensor}, bound, roofline)
            for each, tensor in product(kinds, fewer)
        ]
        share = self.engine.expert_share
        if found := [(grid.shared(share), part) for grid, part in filter(None, made)]:
            return wanted.layers, found
        if not kinds:
            raise UsageError(
                f"{self.profile.name} has no measured {kind} experts under {self.engine.kernels} "
                f"({', '.join(known) or 'none at all'}): choose another GPU or engine"
            )
        # Experts of another shape: the lower bound, at the efficiency of large products.
        axis = np.unique(np.geomspace(1, 1 << 15, 40).round())
        efficiency = 1 / self.profile.mfu
        unknown = Grid([axis], bound(axis), bound).scaled(lambda tokens: efficiency + 0 * tokens)
        return wanted.layers, [(unknown, 1.0)]

    def elementwise_s(self, tokens: float) -> float:
        """Norms, rotations, activations and residuals of all layers: traffic of HBM."""
        g = self.geometry
        width = g.weight_bytes_per_element
        active = g.intermediate * (g.layers - g.expert_layers) / self.gpus
        active += (g.expert_dim * g.experts_per_token / self.gpus) * g.expert_layers
        moved = self.engine.elementwise_passes * g.hidden * g.layers + 3 * active
        return moved * width * tokens / (self.profile.hbm_bytes_per_s * self.profile.mbu)

    def all_reduce_s(self, tokens: int, prefill: bool = False) -> float:
        """Adding up the activations of a pass over all GPUs, twice a layer."""
        if self.gpus == 1:
            return 0.0
        numbers = tokens * self.geometry.hidden
        grid = self._all_reduce(prefill)
        seconds, least_s = float(grid.seconds(numbers)), float(grid.seconds(grid.axes[0][0]))
        latency_s = min(seconds, least_s)
        whole_s = self.engine.reduced_s(latency_s, seconds - latency_s)
        return REDUCES * self.geometry.layers * whole_s

    def _all_reduce(self, prefill: bool) -> Grid:
        found = self._reduces.get(prefill)
        if found is None:
            found = self._reduces[prefill] = self._all_reduce_grid(prefill)
        return found

    def _all_reduce_grid(self, prefill: bool) -> Grid:
        known = self.tables.types("all-reduce")
        launched = prefill or not self.engine.graphs
        kind = "eager" if launched and "eager" in known else "graph"
        if kind not in known:
            raise UsageError(
                f"{self.profile.name} has no measured all-reduces under {self.engine.kernels}: "
                "choose one GPU, or another engine"
            )
        return self.tables.grid("all-reduce", kind, all_reduce_bound(self.peak), self.gpus)

    # Attention.

    def attention(self, sequences: int) -> tuple[list[float], list[float]]:
        """A decode step's attention in the layers that keep every token, piecewise linear.

        Tokens that are read in a layer, summed over the sequences, and seconds of all layers.
        """
        found = self._curves.get(sequences)
        if found is None:
            tokens = self._knots
            seconds = self.geometry.full_layers * self._decode(0).seconds(float(sequences), tokens)
            seconds = np.maximum.accumulate(seconds)
            found = self._curves[sequences] = (sequences * tokens).tolist(), seconds.tolist()
        return found

    @cached_property
    def _knots(self) -> np.ndarray:
        """Tokens of a sequence between which attention's seconds are taken to be linear."""
        measured = np.maximum(self._decode(0).axes[-1], 1.0)
        between = [np.geomspace(a, b, _KNOTS, endpoint=False) for a, b in pairwise(measured)]
        return np.concatenate([*between, measured[-1] * 2.0 ** np.arange(5)])

    def attention_s(self, sequences: int, tokens: float) -> float:
        """The same at a number of tokens."""
        if not sequences:
            return 0.0
        knots, seconds = self.attention(sequences)
        i = min(max(bisect_right(knots, tokens) - 1, 0), len(knots) - 2)
        share = (tokens - knots[i]) / (knots[i + 1] - knots[i])
        return seconds[i] + max(share, 0.0) * (seconds[i + 1] - seconds[i])

    def attention_each(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The same of many steps; arrays ``[n]``."""
        found = np.zeros(len(sequences))
        for count in np.unique(sequences).tolist():
            at = np.flatnonzero(sequences == count)
            if count:
                knots, seconds = map(np.asarray, self.attention(int(count)))
                i = np.clip(np.searchsorted(knots, tokens[at], side="right") - 1, 0, len(knots) - 2)
                slope = (seconds[i + 1] - seconds[i]) / (knots[i + 1] - knots[i])
                found[at] = seconds[i] + np.maximum(tokens[at] - knots[i], 0.0) * slope
        return found

    def windows_s(self, sequences: int) -> float:
        """A decode step's attention in layers with a window, once it is full."""
        g = self.geometry
        if not g.window_layers or not sequences:
            return 0.0
        return g.window_layers * float(self._decode(g.window).seconds(sequences, g.window))

    def prefill_attention_s(self, tokens: int, present: int = 0) -> float:
        """Attention of a prompt's `tokens` to themselves and to `present` ones before them."""
        seconds = self._prefill_s.get((tokens, present))
        if seconds is None:
            g = self.geometry
            whole = tokens + present
            share = 1.0 - (present / whole) ** 2
            seconds = g.full_layers * share * float(self._prefill(0).seconds(1, whole))
            if g.window_layers:
                seconds += g.window_layers * float(self._prefill(g.window).seconds(1, tokens))
            self._prefill_s[tokens, present] = seconds
        return seconds

    def _decode(self, window: int) -> Grid:
        """Seconds of one layer by sequences and cached tokens of each."""
        found = self._decodes.get(window)
        if found is None:
            latent = self.geometry.latent_dim
            found = self._latent("latent-decode") if latent else self._grouped("decode", window)
            found = self._decodes[window] = found.shared(self.engine.attention_share)
        return found

    def _prefill(self, window: int) -> Grid:
        """Seconds of one layer by sequences and prompt tokens of each."""
        if self.geometry.latent_dim:
            return self._latent("latent-prefill")
        return self._grouped("prefill", window)

    def _grouped(self, table: str, window: int) -> Grid:
        found = self._attention.get((table, window))
        if found is None:
            bound, roofline = (
                attention_bound(self.peak, table, self._kv, least) for least in (False, True)
            )
            model = window, self.geometry.head_dim, self._kv_heads, self._heads
            # A GPU without products in 8 bits widens such a cache, and computes prompts in 16.
            known = self.tables.types(table)
            kind = self._kv if self._kv in known or self._kv != "fp8" else "bf16"
            found = self.tables.grid(table, kind, bound, *model, roofline=roofline)
            if self.geometry.kv_bytes_per_element == _FP32:
                found = found.scaled(_twice)
            self._attention[table, window] = found
        return found

    def _latent(self, table: str) -> Grid:
        known = self.tables.types(table)
        if not known:
            raise UsageError(
                f"{self.profile.name} has no measured latent attention under "
                f"{self.engine.kernels}: choose another GPU or engine"
            )
        kind = self._kv if self._kv in known else known[0]
        bound = latent_bound(self.peak, table, kind, self.geometry)
        return self.tables.grid(table, kind, bound, self._heads)

    # What it rests on.

    def basis(self, part: str, tokens: int, context: float = 0.0) -> Basis:
        """The least trustworthy of the kernels of a part at a number of tokens or sequences."""
        g = self.geometry
        if part == "products":
            return max(self._product_basis(max(1, tokens), *each) for each in self._product_grids)
        if part == "experts":
            if self._experts is None:
                return Basis.MEASURED
            grid, share = self._experts[1][0]
            fastest = (
                share * float(grid.seconds(tokens)) <= self.experts_s(tokens) / self._experts[0]
            )
            return grid.basis(tokens) if share == 1.0 and fastest else Basis.EXTRAPOLATED
        if part == "attention":
            return self._decode(0).basis(tokens, context)
        if part == "prefill attention":
            return self._prefill(0).basis(1, tokens)
        if part == "windows":
            return self._decode(g.window).basis(tokens, g.window)
        if part == "all-reduce":
            return self._all_reduce(False).basis(tokens * g.hidden)
        raise ValueError(f"a pass has no {part}")

    @staticmethod
    def _product_basis(tokens: int, own: Grid, *others: Grid) -> Basis:
        """That of the kernel for its type, unless another one bounds it."""
        bound_s = min((float(other.seconds(tokens)) for other in others), default=np.inf)
        return Basis.EXTRAPOLATED if bound_s < own.seconds(tokens) else own.basis(tokens)


def _twice(*_: np.ndarray) -> float:
    """fp32, which was not measured, has twice the bytes of bf16 and at most half its rate."""
    return 2.0


_FORWARDS: dict[tuple[object, ...], Forward] = {}
_KEPT = 32


def forward_of(
    profile: HardwareProfile, engine: EngineProfile, geometry: Geometry, gpus: int, experts: int
) -> Forward:
    """A `Forward`, kept for the next search: every one has a price of its own."""
    numbers = profile.name, profile.flops_per_s, profile.hbm_bytes_per_s, profile.mfu, profile.mbu
    key = (profile.kernels, numbers, repr(engine), geometry, gpus, experts)
    found = _FORWARDS.get(key)
    if found is None:
        if len(_FORWARDS) >= _KEPT:
            _FORWARDS.clear()
        found = _FORWARDS[key] = Forward(profile, engine, geometry, gpus, experts)
    return found
