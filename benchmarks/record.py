"""What recording costs: the same searches with and without capture, same seed, same tokens.

    python benchmarks/record.py [--model chain] [--tokens 600] [--repeats 3]
    python benchmarks/record.py --chains 4096,16384

The first prints, for one chain and for a tree of four parallel leaves, decode speed unrecorded, at
``signals`` level and at ``qkv`` level, and the ratios.  Decoding only: a search is written to the
file after it ends.  The second decodes one chain of each length at ``signals`` level (256 positions
per attention row) and records its tokens once more, given (``record --teacher-forced``); seconds
are those of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from arborsim.play.given import PROMPT, TreeBuilder
from arborsim.searches import make_search
from arborsim.trace.schema import Capture as Level
from arborsim_torch.capture import Capture, middle_layers
from arborsim_torch.episodes import capture_at_level
from arborsim_torch.given import record_tree
from arborsim_torch.models import LoadedModel, load_model
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.sampling import Sampler
from arborsim_torch.sources import TaskSource


@dataclass(frozen=True)
class Endless:
    """A source whose searches never finish early, so that every run decodes as many tokens."""

    inner: TaskSource
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


def chains(loaded: LoadedModel, source: Any, lengths: list[int]) -> None:
    """Decode a chain of each length, then record the same tokens in blocks."""
    print(f"{'tokens':>7s} {'decoded':>16s} {'given':>16s}  ratio")
    for length in lengths:
        problem = source.problem(0)
        options: dict[str, Any] = {"model": loaded.model, "search": make_search("linear"),
                                   "seed": 0, "max_tokens": length,
                                   "clock": time.process_time}  # fmt: skip
        decoded = EpisodeRecorder(
            source=source, capture=Capture(top=256), sampler=Sampler(1.0, (0,)), **options
        ).run(problem)
        tokens = decoded.columns["token"][decoded.columns["token"] >= 0][len(problem.prompt) :]
        builder = TreeBuilder(loaded.model.config.vocab_size, loaded.max_positions)
        builder.prompt(problem.prompt)
        builder.add(PROMPT, tokens)
        began = time.process_time()
        record_tree(loaded.model, builder.tree(), Capture(top=256), source)
        given_s = time.process_time() - began
        seconds = decoded.prefill_s + decoded.decode_s, given_s
        speeds = [f"{each:6.1f} s, {length / each:5.0f}/s" for each in seconds]
        ratio = seconds[0] / seconds[1]
        print(f"{length:7d} {speeds[0]:>16s} {speeds[1]:>16s}  {ratio:.1f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="chain")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=600, help="generated tokens per path")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chains", default="", help="lengths of chains, e.g. 4096,16384")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model, device=options.device)
    assert loaded.task is not None, "the benchmark needs a reference model"
    source = Endless(TaskSource(loaded.task))
    prompt = len(source.problem(0).prompt)
    print(f"{loaded.name}, {options.device}, {options.threads} threads, prompt {prompt} tokens")
    if options.chains:
        chains(loaded, source, [int(length) for length in options.chains.split(",")])
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
