"""What recording costs: the same searches with and without capture, same seed, same tokens.

    python benchmarks/record.py [--model chain] [--tokens 600] [--repeats 3]
    python benchmarks/record.py --chains 4096,16384
    python benchmarks/record.py --trees tot-bfs,best-of-n [--tokens 288]

The first prints, for one chain and for a tree of four parallel leaves, decode speed unrecorded, at
``signals`` level and at ``qkv`` level, and the ratios.  Decoding only: a search is written to the
file after it ends.  The second decodes one chain of each length at ``signals`` level (256 positions
per attention row) and records its tokens once more, given (``record --teacher-forced``); seconds
are those of the processor.  The third does so for trees.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arborsim.play.given import GivenTree, TreeBuilder
from arborsim.searches import make_search
from arborsim.trace.schema import Capture as Level
from arborsim.trace.schema import End, Kind
from arborsim_torch.capture import Capture, middle_layers
from arborsim_torch.episodes import capture_at_level
from arborsim_torch.given import record_tree
from arborsim_torch.models import LoadedModel, load_model
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.sampling import Sampler
from arborsim_torch.sources import PromptSource, TaskSource

_PROMPT = "The castle stood on a hill above the river, and all who passed it asked who lived there."


@dataclass(frozen=True)
class Endless:
    """A source whose searches never finish early, so that every run decodes as many tokens."""

    inner: TaskSource | PromptSource
    block_tokens: int = 36

    @property
    def name(self) -> str:
        return self.inner.name

    def is_thought_end(self, problem: Any, generated: Any, block_tokens: int) -> bool:
        return block_tokens >= self.block_tokens

    def is_finished(self, problem: Any, generated: Any) -> bool:
        return False

    def reward(self, thought: Any, rng: Any) -> float:
        return 0.5

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def run(
    model: Any, source: Any, search: str, level: Level | None, tokens: int
) -> tuple[EpisodeResult, list[int]]:
    """One search; returns its result and its tokens."""
    options = {"steps": 8 * tokens // 36} if search == "dpts" else {}
    vectors = middle_layers(model.config.num_hidden_layers) if level is Level.QKV else ()
    recorder = EpisodeRecorder(
        model=model,
        source=source,
        search=make_search(search, **options),
        capture=None if level is None else capture_at_level(level, 0, vectors),
        sampler=Sampler(1.0, (0,)),
        seed=0,
        max_tokens=tokens,
    )
    result = recorder.run(source.problem(0))
    return result, [int(t) for t in result.columns["token"]]


def tree_of(columns: Mapping[str, Any], vocabulary: int) -> GivenTree:
    """A recorded search as another engine would hand it over: thoughts in order of opening."""
    kind, node, token = (np.asarray(columns[name]) for name in ("kind", "node", "token"))
    builder = TreeBuilder(vocabulary, 1 << 31)
    builder.prompt(token[kind == Kind.PREFILL])
    own = kind == Kind.TOKEN
    said = {n: token[own & (node == n)] for n in np.unique(node).tolist()}
    step = n = 0
    for row, what in enumerate(kind):
        n = int(node[row])
        if what == Kind.TRANSITION and n == len(builder.nodes):
            step += kind[row - 1] != Kind.TRANSITION
            builder.add(int(columns["parent"][row]), said[n], step=step)
        if what == Kind.BOUNDARY:
            thought, verdict = builder.nodes[n], int(columns["correct"][row])
            thought.reward, thought.answer = columns["reward"][row], columns["answer"][row]
            thought.finished = columns["end"][row] == End.FINISHED
            thought.correct = None if verdict < 0 else bool(verdict)
        if what == Kind.PRUNE:
            builder.prune(n, after=step)
    verdict = int(columns["correct"][-1])
    builder.answer(n, None if verdict < 0 else bool(verdict))
    return builder.tree()


def given(loaded: LoadedModel, source: Any, search: str, lengths: Sequence[int]) -> None:
    """Decode a search with paths of each length, then record the same tokens in blocks."""
    print(f"{'search':10s} {'tokens':>7s} {'decoded':>16s} {'given':>16s}  ratio")
    for length in lengths:
        recorder = EpisodeRecorder(
            model=loaded.model, source=source, search=make_search(search), seed=0,
            capture=Capture(top=256 if length > 4096 else 0), sampler=Sampler(1.0, (0,)),
            max_tokens=length, clock=time.process_time,
        )  # fmt: skip
        decoded = recorder.run(source.problem(0))
        tree = tree_of(decoded.columns, loaded.model.config.vocab_size)
        began = time.process_time()
        record_tree(loaded.model, tree, Capture(top=256 if length > 4096 else 0), source)
        seconds = decoded.prefill_s + decoded.decode_s, time.process_time() - began
        tokens = tree.num_tokens
        speeds = [f"{each:6.1f} s, {tokens / each:5.0f}/s" for each in seconds]
        ratio = seconds[0] / seconds[1]
        print(
            f"{search:10s} {tokens:7d} {speeds[0]:>16s} {speeds[1]:>16s}  {ratio:.1f}x", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="chain")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=600, help="generated tokens per path")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chains", default="", help="lengths of chains, e.g. 4096,16384")
    parser.add_argument("--trees", default="", help="searches, e.g. tot-bfs,best-of-n")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model, device=options.device)
    source = Endless(
        PromptSource([_PROMPT], loaded.tokenizer, [], options.tokens, 36)
        if loaded.task is None
        else TaskSource(loaded.task)
    )
    prompt = len(source.problem(0).prompt)
    print(f"{loaded.name}, {options.device}, {options.threads} threads, prompt {prompt} tokens")
    if options.chains:
        given(loaded, source, "linear", [int(length) for length in options.chains.split(",")])
        return
    if options.trees:
        for search in options.trees.split(","):
            given(loaded, source, search, [options.tokens])
        return
    print(f"{'search':8s} {'capture':8s} {'tokens':>7s} {'tokens/s':>9s} {'cost':>6s}  same tokens")
    levels = {"none": None, "signals": Level.SIGNALS, "qkv": Level.QKV}
    for search in ("linear", "dpts"):
        base = 0.0
        tokens_of: dict[str, list[int]] = {}
        # Interleaved, so that a busy moment of the machine does not hit one level alone.
        seconds: dict[str, list[float]] = {name: [] for name in levels}
        for _ in range(options.repeats):
            for name, level in levels.items():
                result, tokens = run(loaded.model, source, search, level, options.tokens)
                seconds[name].append(result.decode_s / result.tokens)
                tokens_of[name] = tokens
        for name in levels:
            per_token = statistics.median(seconds[name])
            same = "yes" if tokens_of[name] == tokens_of["none"] else "no"
            base = base or per_token
            print(
                f"{search:8s} {name:8s} {result.tokens:7d} {1 / per_token:9.0f} "
                f"{per_token / base:5.2f}x  {same}"
            )


if __name__ == "__main__":
    main()
