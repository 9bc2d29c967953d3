"""The error a policy makes in the output of attention, from recorded vectors (quality level 2)."""

from __future__ import annotations

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import HeadRows
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.memory.fp8 import quantised
from arborsim.memory.moves import ALL_GROUPS, Moves

_QUANTISED = (Tier.HBM_QUANTISED, Tier.DDR_QUANTISED)


class OutputError:
    """Relative error of the attention output of generated tokens, on the captured layers.

    For every generated token and captured layer the output over all recorded tokens, ``o = P V``,
    is compared with ``o'``, for which evicted tokens are missing (their share of the softmax goes
    to the others) and quantised tokens have keys and values rounded to FP8 e4m3.  The error is
    ``||o - o'|| / ||o||`` over the heads of a layer, averaged over layers and tokens.

    The queries are the recorded ones: how an error changes later layers and tokens is not in it.
    """

    def __init__(self) -> None:
        self._keys: list[np.ndarray] = []  # one per run, [tokens, layers, KV heads, head_dim]
        self._values: list[np.ndarray] = []
        self._sum = 0.0
        self._rows = 0

    @property
    def error(self) -> float:
        """At least 0; NaN if nothing was generated."""
        return self._sum / self._rows if self._rows else float("nan")

    def prefilled(self, run: TokenRun) -> None:
        observed = run.observed
        assert observed.keys is not None, "the reader was not asked for keys"
        assert observed.values is not None, "the reader was not asked for values"
        self._keys.append(observed.keys)
        self._values.append(observed.values)

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        self.prefilled(run)  # the run's own tokens have vectors too
        self._rows += run.num_tokens
        if not tier.any() and not len(moves):
            return
        rows = run.observed.head_attention
        assert rows is not None, "the reader was not asked for the attention of heads"
        fresh = np.zeros((len(tier), run.num_tokens), dtype=np.int8)
        tier = np.concatenate([tier, fresh], axis=1)
        vectors = self._vectors(bool(np.isin([*np.unique(tier), *moves.target], _QUANTISED).any()))
        paths = [tree.path(leaf) for leaf in run.leaves]
        for step in range(run.steps):
            for w, path in enumerate(paths):
                self._sum += _token_error(rows, step * len(paths) + w, path, tier, vectors)
            _carry_out(moves.at(step), tier)

    def moved(self, moves: Moves, tier: np.ndarray) -> None:
        pass

    def _vectors(self, with_quantised: bool) -> _Vectors:
        self._keys = [np.concatenate(self._keys)]
        self._values = [np.concatenate(self._values)]
        return _Vectors(self._keys[0], self._values[0], with_quantised)


class _Vectors:
    """Keys and values of all tokens so far, as they are and as FP8 returns them."""

    def __init__(self, keys: np.ndarray, values: np.ndarray, with_quantised: bool) -> None:
        self.values = values
        self.quantised_values = quantised(values) if with_quantised else None
        self.key_change = quantised(keys) - keys if with_quantised else None


def _carry_out(moves: Moves, tier: np.ndarray) -> None:
    for group, token, target in zip(moves.group, moves.token, moves.target, strict=True):
        tier[slice(None) if group == ALL_GROUPS else group, token] = target


def _token_error(
    rows: HeadRows, i: int, path: np.ndarray, tier: np.ndarray, vectors: _Vectors
) -> float:
    """Relative output error of token `i` of a run, mean over the captured layers."""
    row = rows.row(i)
    at = path[: row.shape[-1]]
    held = tier[:, at]
    if not ((held != Tier.HBM) & (held != Tier.DDR)).any():  # all of it there at full precision
        return 0.0
    layers, kv_heads = vectors.values.shape[1:3]
    # Tiers are [1 or layers, 1 or KV heads, 1, positions], masses [layers, KV heads, queries, ...]
    held = held.reshape(layers if len(held) > 1 else 1, -1, 1, len(at))
    mass = row.reshape(layers, kv_heads, -1, len(at))
    values = vectors.values[at].astype(np.float32).transpose(1, 2, 0, 3)
    exact = np.matmul(mass, values)
    small = np.isin(held, _QUANTISED)
    if vectors.key_change is not None and small.any():
        assert vectors.quantised_values is not None
        change = vectors.key_change[at].transpose(1, 2, 3, 0)
        queries = rows.query(i).reshape(layers, kv_heads, -1, change.shape[2])
        mass = mass * np.exp(np.where(small, np.matmul(queries, change), 0))
        rounded = vectors.quantised_values[at].transpose(1, 2, 0, 3)
        values = np.where(small[:, :, 0, :, None], rounded, values)
    mass = np.where(held == Tier.EVICTED, 0, mass)
    total = mass.sum(axis=-1, keepdims=True)
    mass = np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
    missing = exact - np.matmul(mass, values)
    norm = np.sqrt((exact**2).sum(axis=(1, 2, 3)))
    known = norm > 0  # not so for a layer whose softmax is NaN
    off = np.sqrt((missing[known] ** 2).sum(axis=(1, 2, 3)))
    return float((off / norm[known]).mean()) if known.any() else 0.0
