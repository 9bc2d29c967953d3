"""Run a search live and write down what happened.

`EpisodeRecorder.run` is the whole story: the search says which states to expand; their children
become leaves of the decoder.  Every iteration all leaves take one token.  A leaf whose thought ends
gets its reward and goes back to the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.errors import UsageError
from arborsim.searches import ROOT, Expansion, Search, ask, handed_in
from arborsim.trace.schema import End, Kind
from arborsim_torch import recording
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.capture import Capture
from arborsim_torch.completion import Completion
from arborsim_torch.decoder import PREFILL_BLOCK, Pass, TreeDecoder
from arborsim_torch.prefixes import PrefixDecoder
from arborsim_torch.reference.tasks import Problem, Readers
from arborsim_torch.rewards.base import Embedder, Reward
from arborsim_torch.rewards.exact import SourceReward
from arborsim_torch.sampling import Draws, Sampler, entropies
from arborsim_torch.sources import Source

_REWARD_STREAM = 1  # keeps the noise of rewards apart from the draws of tokens


@dataclass
class EpisodeRecorder:
    """Records one search over one problem."""

    model: Any  #: A causal language model that `TreeDecoder` takes
    source: Source
    search: Search  #: A new object
    capture: Capture | None  #: None records the tree alone
    sampler: Sampler
    seed: int
    max_tokens: int  #: generated tokens per path
    #: give up thoughts that repeat a sibling token by token, unless `Search.keeps_duplicates`
    dedupe: bool = True
    on_tokens: Callable[[int], None] | None = None  #: told how many tokens each iteration generated
    listener: recording.Listener | None = None
    #: A new one; by default one that keeps everything until the search drops it
    cache: TieredCache | None = None
    prefill_block: int = PREFILL_BLOCK  #: prompt tokens per forward pass
    #: seconds since some moment: what all times are measured with
    clock: Callable[[], float] = time.perf_counter
    reward: Reward | None = None  #: scores thoughts, by default `source` does
    #: embeds the text of thoughts, by default `capture` takes mean last hidden states
    embedder: Embedder | None = None
    #: free the keys and values of thoughts that nothing can follow as soon as they are complete
    release: bool = False
    #: compute what several thoughts begin with only once, without a listener or token signals
    share_prefixes: bool = False
    graphs: bool = True  #: see `TreeDecoder`
    nodes: list[recording.LiveNode] = field(default_factory=list, init=False)

    def run(self, problem: Problem) -> recording.EpisodeResult:
        """Search `problem`; the columns are one episode of a trace."""
        steps = self.steps(problem)
        try:
            tokens = next(steps)
            while True:
                tokens = steps.send(self.decoder.step(tokens))
        except StopIteration as end:
            result: recording.EpisodeResult = end.value
            return result

    def prepare(self, tokens: list[int]) -> Pass:
        """An iteration's pass, to be computed together with those of other searches."""
        assert isinstance(self.decoder, TreeDecoder), "thoughts that share prefixes run alone"
        return self.decoder.prepare(tokens)

    def steps(self, problem: Problem) -> recording.Iterations[recording.EpisodeResult]:
        """The search as a coroutine: it yields the tokens of an iteration and wants the logits.

        So that the iterations of several searches can be computed together (`run_batched`).
        """
        self.problem = problem
        readers = self._readers_of_prompt()
        self._readers = None if readers is None else list(readers)
        self.rows = recording.EventRows()
        self.decoder = self._make_decoder()
        noise = np.random.default_rng([self.seed, problem.index, _REWARD_STREAM])
        reward, models = self.reward or SourceReward(self.source), (self.embedder, self.capture)
        judged = (self.source, problem, self.nodes, reward, noise, *models)
        self._completion = Completion(*judged, self.max_tokens)
        if self.embedder is not None and self.capture is not None:
            self.capture.embeddings = False
        self._began = self.clock()
        self._frontier = recording.Frontier(self.nodes, self.rows.depth)
        self._draws = Draws(self.sampler, self.source, problem, self.nodes)
        self._generated, self._forward_s = 0, 0.0
        self._prefill()
        prefill_s = self._clock()
        if self.listener is not None:
            self.listener.prompt(self.problem.prompt, readers)
        yield from self._search()
        decode_s = self._clock() - prefill_s
        correct = self._answer()
        signals = self.capture if self.capture is not None and self.capture.keeps else None
        embedded = self.embedder is not None or (signals is not None and signals.embeddings)
        columns = self.rows.columns(with_embeddings=signals is not None and embedded)
        if signals is not None:
            columns.update(signals.columns())
            if self._readers is not None:
                columns["readers"] = self._readers
        counts = (self._generated, len(self.nodes) - 1, len(problem.prompt), self.rows.iteration)
        seconds = (prefill_s, decode_s, self._forward_s)
        return recording.EpisodeResult(columns, correct, *counts, *seconds, self._steps)

    def _readers_of_prompt(self) -> list[Readers] | None:
        """None if it is not asked for, or the source does not know."""
        heard = self.listener is not None and self.listener.wants_readers
        if not heard and (self.capture is None or not self.capture.keeps_signals):
            return None
        found = self.source.readers(self.problem, (), 0)
        if heard and found is None:
            raise UsageError(
                f"policy needed keeps what the task will read, which {self.source.name} cannot "
                "say: take a reference model with its own problems"
            )
        return found

    def _make_decoder(self) -> TreeDecoder | PrefixDecoder:
        if self.share_prefixes:
            if self.listener is not None:
                raise ValueError("a listener follows a tree of thoughts: do not share prefixes")
            return PrefixDecoder(self.model, self.capture, self.prefill_block, self.cache)
        decoder = TreeDecoder(self.model, self.capture, self.prefill_block, self.cache, self.graphs)
        if self.listener is not None:
            self.listener.began(decoder)
        return decoder

    def _clock(self) -> float:
        return self.clock() - self._began

    def _prefill(self) -> None:
        found: list[Tensor] = []
        if self.capture is not None:
            self.capture.expect(len(self.problem.prompt))
        see = None if self.capture is None else (lambda logits: found.append(entropies(logits)))
        logits = self.decoder.prefill(self.problem.prompt, see)
        self._drain()
        if logits.is_cuda:  # the prefill may still be running, and the clock goes on
            torch.cuda.synchronize(logits.device)
        entropy = torch.cat(found).tolist() if found else [math.nan] * len(self.problem.prompt)
        self.rows.time_s = self._clock()
        self.rows.open(-1)
        for position, token in enumerate(self.problem.prompt):
            known = {"position": position, "token": token, "entropy": entropy[position]}
            self.rows.add(Kind.PREFILL, ROOT, **known)
        self.nodes.append(recording.LiveNode(parent=-1, generated=[], logits=logits))
        self._frontier.enter(ROOT)

    def _search(self) -> recording.Iterations[None]:
        active: list[int] = []
        while True:
            if not active or not self.search.synchronous:
                wish = ask(self.search, self._frontier.leaves, self.search.slots - len(active))
                self._give_up(wish)
                if wish.done:
                    return
                active = self._turn(active, wish)
            if not active:
                return
            ended: list[tuple[int, float]] = []
            while not ended:
                ended = yield from self._iterate(active)
            self._drain()
            self._completion.judge([node for node, _ in ended])
            self.rows.time_s = self._clock()
            for node, entropy in ended:
                self._close(node, entropy)
            gone = {node for node, _ in ended}
            active = [node for node in active if node not in gone]
            if active:
                self.decoder.activate(active)

    def _give_up(self, wish: Expansion) -> None:
        self.rows.time_s = self._clock()
        for n in wish.dropped:
            self.rows.add(Kind.PRUNE, n)
            self._frontier.leave(n)
            self._completion.give_up(n)
            if self.listener is None:
                self._free(n)
            else:  # what becomes of the tokens is up to a policy
                self.listener.pruned(n)
            self.nodes[n].logits = None
            if self.capture is not None:
                self.capture.forget(n)

    def _free(self, n: int) -> None:
        if self.nodes[n].held:
            self.nodes[n].held = False
            self.decoder.drop(n)

    def _turn(self, active: list[int], wish: Expansion) -> list[int]:
        """Open the children that the search wants; return all leaves in batch order."""
        parents = [n for n, count in wish.children.items() for _ in range(count)]
        if not parents:
            return active
        new = []
        for parent in parents:
            n = self.rows.open(parent)
            self.decoder.open(n, parent)
            self.nodes[parent].visits += 1
            self.nodes.append(recording.LiveNode(parent, list(self.nodes[parent].generated)))
            new.append(n)
        for n in wish.children:
            self._frontier.visited(n)
        self._draws.branch(new, parents)
        self._drain()
        leaves = [*active, *new]
        self.decoder.activate(leaves)
        self.rows.time_s = self._clock()
        turned = tuple(sorted(leaves))  # new nodes must appear in the order of their numbers
        for n in turned:
            self.rows.add(Kind.TRANSITION, n)
        if self.listener is not None:
            self.listener.turned(turned, tuple(self.nodes[n].parent for n in turned))
        return leaves

    def _iterate(self, active: list[int]) -> recording.Iterations[list[tuple[int, float]]]:
        """Feed every leaf its token and draw the next; returns the leaves whose thought ended."""
        fed = self._draws.feed(active)
        begun = self.clock()
        logits = yield [token for token, _ in fed]
        choice = self._draws.draw(active, logits)
        self._forward_s += self.clock() - begun
        self.rows.iteration += 1
        self.rows.time_s = self._clock()
        last = len(self.problem.prompt) - 1
        ended = []
        for row, (n, (token, logprob)) in enumerate(zip(active, fed, strict=True)):
            node = self.nodes[n]
            known = {"token": token, "logprob": logprob, "entropy": choice.entropy[row]}
            self.rows.add(Kind.TOKEN, n, position=last + len(node.generated), **known)
            full = len(node.generated) >= self.max_tokens
            if full or self.source.is_thought_end(self.problem, node.generated, node.tokens):
                node.logits = logits[row].clone()
                self._draws.discard(n)
                ended.append((n, choice.entropy[row]))
        self._generated += len(active)
        readers = None
        if self._readers is not None:
            readers = [self._readers_of_newest(n) for n in active]
            self._readers += readers
        if self.listener is not None:
            self.listener.iteration(active, [token for token, _ in fed], readers)
        if self.on_tokens is not None:
            self.on_tokens(len(active))
        return ended

    def _readers_of_newest(self, n: int) -> Readers:
        generated = self.nodes[n].generated
        newest = len(self.problem.prompt) + len(generated) - 1
        found = self.source.readers(self.problem, generated, newest)
        assert found is not None, "a source that knew who reads the prompt"
        return found[0]

    def _close(self, n: int, entropy: float) -> None:
        """The thought of `n` is complete: hand it to the search, as it is stored."""
        node = self.nodes[n]
        end = self._completion.finish(n)
        node.text = self._completion.text(node)
        node.entropy = float(np.float32(entropy))  # a bank hands out no more digits than that
        known = {name: getattr(node, name) for name in ("reward", "text", "embedding", "answer")}
        correct = recording.verdict_number(node.correct)
        self.rows.add(Kind.BOUNDARY, n, entropy=entropy, correct=correct, end=int(end), **known)
        if self.listener is not None:
            self.listener.closed(n, node.reward, entropy)
        if self.release and end is not End.NONE:
            self._free(n)
            node.logits = None
        repeats = self._completion.repeats(n)
        if self.dedupe and not self.search.keeps_duplicates and repeats:
            node.finished, node.dead = False, True
        self._frontier.enter(n)

    def _drain(self) -> None:
        if self.capture is not None:
            self.capture.drain(self.decoder)

    def _answer(self) -> bool | None:
        """Hand in one of the search's candidates; whether it is right."""
        candidates = handed_in(self.search, self._frontier.leaves, len(self.nodes))
        chosen, correct = self._completion.choose(candidates)
        self._steps = self.source.steps(self.problem, self.nodes[chosen].generated)
        self.rows.time_s = self._clock()
        text = self.source.text(self.nodes[chosen].generated)
        self.rows.add(Kind.ANSWER, chosen, text=text, correct=recording.verdict_number(correct))
        if self.listener is not None:
            self.listener.answered(correct)
        return correct
