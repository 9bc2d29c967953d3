"""Differential prefetch: of the tokens that attention needs, fetch only those not staged yet.

As in the memory-hierarchy paper (section 3.4): tiers change only at decisions, so from one to the
next most tokens in DDR stay the same; those that were fetched stay in a *staging buffer* on the
device, and only the difference crosses the link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FREE = -1


@dataclass(frozen=True)
class Restaging:
    """What turns a staging buffer into the one that is needed next.

    Attributes
    ----------
    held : int64 ``[slots]``
        Token in each slot afterwards, `FREE` where there is none.
    slots : int64 ``[n]``
        Where each needed token is afterwards, in the order asked for.
    fetch, into : int64 ``[m]``
        Tokens to copy from DDR, ascending, and the slots they go to.
    released : int64 ``[k]``
        Tokens that were staged and are not needed any more, ascending.
    """

    held: np.ndarray
    slots: np.ndarray
    fetch: np.ndarray
    into: np.ndarray
    released: np.ndarray


def restage(held: np.ndarray, needed: np.ndarray) -> Restaging:
    """Keep what is staged and needed, release what is not, fetch the rest.

    Nothing that stays is moved.  Fetched tokens take free slots, lowest first, before the buffer
    grows at its end.

    Parameters
    ----------
    held : int ``[slots]``
        Token in each slot of one cache group's staging buffer, `FREE` where there is none.  A
        token whose copy in DDR has changed since (quantised there) must be given as `FREE`.
    needed : int ``[n]``
        Tokens in DDR that the next iterations attend to.

    Raises
    ------
    ValueError
        If a token is negative, staged twice or asked for twice.
    """
    held, needed = held.astype(np.int64), needed.astype(np.int64)
    staged = held[held != FREE]
    _check("staged", staged)
    _check("needed", needed)
    fetch = np.setdiff1d(needed, staged)
    released = np.setdiff1d(staged, needed)
    after = np.where(np.isin(held, released), FREE, held)
    after = np.concatenate([after, np.full(max(0, len(needed) - len(after)), FREE)])
    into = np.flatnonzero(after == FREE)[: len(fetch)]
    after[into] = fetch
    return Restaging(after, _find(after, needed), fetch, into, released)


def _find(held: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Slots of tokens that are all held."""
    order = np.argsort(held)
    return np.asarray(order[np.searchsorted(held, tokens, sorter=order)])


def _check(what: str, tokens: np.ndarray) -> None:
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"{what} token {tokens.min()}: tokens count from 0")
    if len(np.unique(tokens)) != len(tokens):
        raise ValueError(f"a token is {what} twice")
