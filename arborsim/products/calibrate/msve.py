"""ArborKV's theta: what a thought block is worth, found by hiding blocks (arXiv:2605.22106, 5.1).

On searches recorded with their whole cache, every closed block on the path to a right answer is
hidden from all that follows, which is then generated anew.  Its target is 1 if the answer is lost.
A logistic fit of the targets on the features of MSVE (Eq. 1) gives theta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import Boundary, Decode, Prefill, Transition
from arborsim.core.observations import Signal
from arborsim.core.statistics import auc, bootstrap, fit_logistic, leave_one_out_scores, rows_of
from arborsim.core.tree import ThoughtTree
from arborsim.policies.tree import attention_share, certainty
from arborsim.products.calibrate.backend import (
    CalibratingBackend,
    Masking,
    MaskingRequest,
    ModelChoice,
    OnProgress,
)
from arborsim.products.calibrate.documents import (
    MAIN,
    MUTED,
    Calibration,
    figure,
    interval,
    recordings,
    rounded,
    software,
)
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import ScoreBook
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FEATURES = ("value", "certainty", "attention")
LEAST_SHARE = 0.05  #: of blocks that matter, and of blocks that do not
RESAMPLES = 200  #: each is a fit
_TASK_OPTION = "task."  # how a recording marks options of its task among those of the search


@dataclass(frozen=True)
class HiddenBlock:
    """A closed block on the path to a right answer."""

    trace: int  # number of its search
    #: v, u and a of MSVE, as the policy reads them when the search ends
    features: tuple[float, ...]
    masking: Masking
    #: Whether greedy decoding from the block's end on answers right: with all keys and values
    #: readable, and without the block's
    whole: bool = False
    masked: bool = False


@dataclass(frozen=True)
class Searches:
    """The blocks of all traces, with the answers of the model."""

    readers: Sequence[TraceReader]
    blocks: Sequence[HiddenBlock]
    right: int  # searches that found the right answer


def mask_searches(
    paths: Sequence[Path], backend: CalibratingBackend, choice: ModelChoice, on_progress: OnProgress
) -> Searches:
    """Hide every block on the right path of every search in the traces, one at a time.

    The searches were recorded with their whole cache, and with attention. `choice` is the model
    they were recorded on, whose task's options come from the traces.

    Raises `UsageError` if the traces come from different models or no search found a right answer,
    `TraceError` if a trace cannot be read or lacks attention.
    """
    readers = [TraceReader(path) for path in paths]
    for reader in readers:
        reader.require((Signal.ATTENTION,), "calibrating MSVE")
        if reader.info.model != readers[0].info.model:
            raise UsageError(
                f"{reader.path} was recorded on {reader.info.model}, {readers[0].path} on "
                f"{readers[0].info.model}: calibrate one model at a time"
            )
    blocks: list[HiddenBlock] = []
    right = 0
    for reader in readers:
        parameters = reader.info.search_parameters
        first = int(parameters.get("first", 0))
        own: list[HiddenBlock] = []
        for episode in reader.episodes((Signal.ATTENTION,), who="calibrating MSVE"):
            found_here = blocks_of(episode, right, first + episode.index)
            own += found_here
            right += bool(found_here)
        if not own:
            continue
        options = {
            name.removeprefix(_TASK_OPTION): value
            for name, value in parameters.items()
            if name.startswith(_TASK_OPTION)
        }
        request = MaskingRequest(
            replace(choice, task_options=options),
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
    return Searches(readers, blocks, right)


def blocks_of(episode: Episode, number: int, problem: int) -> list[HiddenBlock]:
    """Blocks on the path to the answer but for the last. None if the answer was wrong.

    `number` is that of the trace among all that are used, `problem` that in its split.
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
        masking = Masking(problem, prompt, generated, tree.num_node_tokens(node))
        found.append(HiddenBlock(number, tuple(features[node].tolist()), masking))
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


@dataclass(frozen=True)
class Msve:
    """The outcome."""

    theta: tuple[float, ...]  # of v, u and a
    #: 95% interval of each, by bootstrap over traces
    low: tuple[float, ...]
    high: tuple[float, ...]
    auc: float  # how well a fit that has not seen their trace separates the blocks
    auc_alone: tuple[float, ...]  # how well each feature does so by itself
    #: That could be judged: without hiding anything, the answer came out right
    blocks: int
    traces: int
    lost: float  # share of those blocks without which the answer was lost
    unjudged: int  # blocks after which even the whole cache does not lead to the right answer


def fit_msve(blocks: Sequence[HiddenBlock], ridge: float, seed: int) -> Msve:
    """Fit theta to what hiding the blocks did.

    Raises `UsageError` if nearly all blocks matter, or nearly none.
    """
    judged = [block for block in blocks if block.whole]
    lost = np.array([not block.masked for block in judged], dtype=bool)
    names, trace = np.unique([block.trace for block in judged], return_inverse=True)
    share = float(lost.mean()) if len(lost) else 0.0
    if len(names) < 2 or not LEAST_SHARE <= share <= 1 - LEAST_SHARE:
        raise UsageError(
            f"{share:.1%} of {len(lost)} blocks of {len(names)} traces are needed for the answer: "
            "theta cannot be fitted to such targets"
        )
    x = np.array([block.features for block in judged])

    def resampled(chosen: np.ndarray) -> np.ndarray:
        rows = rows_of(trace, chosen)
        return fit_logistic(x[rows], lost[rows], ridge)

    low, high = bootstrap(resampled, len(names), seed, RESAMPLES)
    return Msve(
        tuple(fit_logistic(x, lost, ridge).tolist()),
        tuple(low.tolist()),
        tuple(high.tolist()),
        auc(leave_one_out_scores(x, lost, trace, ridge), lost),
        tuple(auc(feature, lost) for feature in x.T),
        len(lost),
        len(names),
        share,
        len(blocks) - len(judged),
    )


def msve_calibration(
    msve: Msve, searches: Searches, ridge: float, seed: int, command: str
) -> Calibration:
    """Theta of ArborKV's MSVE."""
    theta = {f"theta_{name}": value for name, value in zip(FEATURES, msve.theta, strict=True)}
    info = searches.readers[0].info
    return Calibration(
        kind="msve",
        model=info.model,
        layers=info.geometry.layers,
        traces=msve.traces,
        tokens=sum(block.masking.block_tokens for block in searches.blocks if block.whole),
        seed=seed,
        command=command,
        policies={"arborkv": rounded(theta)},
        finding=(
            f"without a block of its path, the answer is lost in {msve.lost:.0%} of {msve.blocks} "
            f"cases; held-out AUC of MSVE {msve.auc:.3f}"
        ),
        protocol={
            "target": "answer lost by greedy decoding after the block, without its keys and values",
            "features": "as read when the search ends",
            "ridge": ridge,
            "interval": "95%, bootstrap over traces",
            "recordings": recordings(searches.readers),
        },
        versions=software("numpy", "scipy", "torch", "transformers"),
        evidence={name: rounded(value) for name, value in vars(msve).items() if name != "theta"},
    )


def msve_figure(msve: Msve, title: str) -> Figure:
    """Theta with its intervals, each coefficient in units of its own interval's scale."""
    from plotly.graph_objects import Scatter

    rows = np.array([msve.low, msve.theta, msve.high])
    rows /= np.maximum(np.abs(rows[[0, 2]]).max(axis=0), 1e-12)
    names = [f"{name} ({value:.3g})" for name, value in zip(FEATURES, msve.theta, strict=True)]
    points = Scatter(x=rows[1], y=names, error_x=interval(*rows), mode="markers")
    points.marker = {"color": MAIN, "size": 12}
    x = {"title": "theta, as a share of the far end of its 95% interval"}
    return figure(title, [points], x).add_vline(0, line_color=MUTED)
