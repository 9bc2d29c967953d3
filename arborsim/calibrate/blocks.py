"""Blocks of recorded searches, with what ArborKV's MSVE reads of them and what hiding them does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.calibrate.backend import (
    CalibratingBackend,
    Masking,
    MaskingRequest,
    ModelChoice,
    OnProgress,
)
from arborsim.core.errors import UsageError
from arborsim.core.events import Boundary, Decode, Prefill, Transition
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.policies.arbor_blocks import attention_share, certainty
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import ScoreBook
from arborsim.trace.episode import Episode
from arborsim.trace.play import play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind

_TASK_OPTION = "task."  # how a recording marks options of its task among those of the search


@dataclass(frozen=True)
class Block:
    """A closed block on the path to a right answer.

    Attributes
    ----------
    trace : int
        Number of its search.
    features : tuple of float
        v, u and a of MSVE, as the policy reads them when the search ends.
    masking : Masking
    whole, masked : bool
        Whether greedy decoding from the block's end on answers right: with all keys and values
        readable, and without the block's.
    """

    trace: int
    features: tuple[float, float, float]
    masking: Masking
    whole: bool = False
    masked: bool = False


@dataclass(frozen=True)
class Searches:
    """What was asked of the model about all traces.

    Attributes
    ----------
    model : str
    layers : int
    blocks : tuple of Block
    right, all : int
        Searches that found the right answer, and all that were read.
    recordings : mapping of str to mapping
        By file name: the search, its parameters and how many searches there are.
    """

    model: str
    layers: int
    blocks: tuple[Block, ...]
    right: int
    all: int
    recordings: Mapping[str, Mapping[str, Any]]


def mask_searches(
    paths: Sequence[Path], backend: CalibratingBackend, choice: ModelChoice, on_progress: OnProgress
) -> Searches:
    """Hide every block on the right path of every search in the traces, one at a time.

    Parameters
    ----------
    paths : sequence of Path
        Searches recorded with their whole cache, and with attention.
    choice : ModelChoice
        The model they were recorded on; the options of its task come from the traces.

    Raises
    ------
    UsageError
        The traces come from different models, or no search found a right answer.
    TraceError
        A trace cannot be read, or lacks attention.
    """
    readers = [TraceReader(path) for path in paths]
    for reader in readers:
        reader.require((Signal.ATTENTION,), "calibrating MSVE")
    infos = [reader.info for reader in readers]
    for reader in readers[1:]:
        if reader.info.model != infos[0].model:
            raise UsageError(
                f"{reader.path} was recorded on {reader.info.model}, {readers[0].path} on "
                f"{infos[0].model}: calibrate one model at a time"
            )
    blocks: list[Block] = []
    right = 0
    for reader in readers:
        parameters = reader.info.search_parameters
        own = list(_blocks_of_trace(reader, right))
        right = 1 + max((block.trace for block in own), default=right - 1)
        if not own:
            continue
        request = MaskingRequest(
            replace(choice, task_options=_task_options(parameters)),
            str(parameters.get("split", "test")),
            reader.info.model,
            [block.masking for block in own],
        )
        found = backend.mask(request, on_progress)
        blocks += [
            replace(block, whole=bool(whole), masked=bool(masked))
            for block, whole, masked in zip(own, found.whole, found.masked, strict=True)
        ]
    if not blocks:
        raise UsageError(
            f"{', '.join(map(str, paths))}: no search found a right answer by more than one block, "
            "so there is no block to hide"
        )
    return Searches(
        infos[0].model,
        infos[0].geometry.layers,
        tuple(blocks),
        right,
        sum(reader.num_episodes for reader in readers),
        {reader.path.name: recording(reader) for reader in readers},
    )


def recording(reader: TraceReader) -> dict[str, Any]:
    info = reader.info
    about = {"search": info.search, "searches": reader.num_episodes, "seed": info.seed}
    return about | info.search_parameters


def _task_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(_TASK_OPTION): value
        for name, value in parameters.items()
        if name.startswith(_TASK_OPTION)
    }


def _blocks_of_trace(reader: TraceReader, number: int) -> Iterator[Block]:
    first = int(reader.info.search_parameters.get("first", 0))
    for episode in reader.episodes((Signal.ATTENTION,), who="calibrating MSVE"):
        own = blocks_of(episode, number, first + episode.index)
        yield from own
        number += bool(own)


def blocks_of(episode: Episode, number: int, problem: int) -> list[Block]:
    """Blocks on the path to the answer but for the last; none if the answer was wrong.

    Parameters
    ----------
    episode : Episode
        With attention.
    number, problem : int
        Of the trace among all that are used, and of the problem in its split.
    """
    answer = int(np.flatnonzero(episode.kind == Kind.ANSWER)[0])
    if episode.correct[answer] != 1:
        return []
    tree, features = features_of(episode)
    path = tree.ancestors(int(episode.node[answer]))
    prompt = tuple(episode.token[tree.tokens(0)].tolist())
    found = []
    for node in path[1:-1]:
        whole = episode.token[tree.path(node)].tolist()
        generated = tuple(whole[len(prompt) :])
        v, u, a = features[node].tolist()
        masking = Masking(problem, prompt, generated, tree.num_node_tokens(node))
        found.append(Block(number, (v, u, a), masking))
    return found


def features_of(episode: Episode) -> tuple[ThoughtTree, np.ndarray]:
    """The tree when the search has ended, and v, u, a of every node, float64 ``[nodes, 3]``."""
    tree = ThoughtTree()
    geometry = episode.info.geometry
    book = ScoreBook({"attention": CumulativeAttention(from_later_blocks=True)}, geometry.layers)
    for event in play(episode):
        match event:
            case Prefill(run) | Decode(run):
                if isinstance(event, Prefill):
                    tree.open(0, -1)
                tree.append(run.leaves, run.steps)
                book.begin(run, tree, generated=isinstance(event, Decode))
                for _ in book.steps(run.steps):
                    pass
            case Transition(_, opened):
                for node, parent in opened:
                    tree.open(node, parent)
            case Boundary(node, reward, entropy):
                block = tree.nodes[node]
                block.closed, block.reward, block.entropy = True, reward, entropy
    closed = np.array([node.closed for node in tree.nodes])
    value = np.nan_to_num(np.array([node.reward for node in tree.nodes]))
    sure = certainty(np.array([node.entropy for node in tree.nodes]), geometry.vocab)
    share = attention_share(book.values()["attention"][0], tree.node_of_token.values, closed)
    return tree, np.stack([value, sure, share], axis=1)
