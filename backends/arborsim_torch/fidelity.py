"""Read documents under policies, and compare every next token's distribution with full retention's.

Full retention reads a document in blocks (`Reference`).  A policy reads it token by token: its
search is the one of `live`, whose draws are the document's tokens (`Following`).  Where evicted
tokens are masked instead, both come from `arborsim_torch.masked.forced`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.play.episode import Cell
from arborsim.play.fidelity import FidelityObserver, FidelityRequest, FidelityResult, Judged
from arborsim.policies.methods.baselines import Full
from arborsim.searches import make_search
from arborsim_torch.decoder import TreeDecoder, prefill_block, run_together
from arborsim_torch.documents import Document, DocumentSource, documents_of
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.run import batched, facts
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.masked.forced import forced
from arborsim_torch.models import LoadedModel, geometry
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.recording_plan import attention_top, words_of
from arborsim_torch.sampling import Choice, Sampler, scored
from arborsim_torch.tree_blocks import block_tokens


class Following(Sampler):
    """Draws the tokens of a document, whatever the model would have drawn."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(0.0, (0,))
        self._tokens = tokens
        self.fed = 0  #: tokens after the prompt that the model has read

    def choose(self, logits: Tensor) -> Choice:
        """The next token; after the last one, any."""
        token = self._tokens[self.fed] if self.fed < len(self._tokens) else 0
        known = scored(logits, np.zeros(1, dtype=np.int64), np.array([token]))
        logprob, entropy = (each.tolist() for each in known)
        return Choice([token], logprob, entropy)


@dataclass(frozen=True)
class _Setup(SearchSetup):
    """The setup of one search, which follows a document."""

    following: Following = field(kw_only=True)

    def recorder(self, *given: Any, **more: Any) -> EpisodeRecorder:
        made = super().recorder(*given, **more)
        made.sampler = self.following
        return made


@dataclass
class Comparing:
    """The figures so far of a document under a policy."""

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    full_nll: list[float] = field(default_factory=list)

    def take(self, full: Tensor, own: Tensor, target: Tensor) -> None:
        """Positions with both logits ``[n, vocabulary]`` and the tokens that follow, ``[n]``."""
        ours, theirs = (torch.log_softmax(each.float(), -1) for each in (own, full))
        # A token that full retention rules out adds nothing.
        terms = torch.where(theirs.isfinite(), theirs.exp() * (theirs - ours), 0.0)
        self.kl += terms.sum(-1).clamp_(min=0.0).tolist()
        self.agrees += (full.argmax(-1) == own.argmax(-1)).tolist()
        self.nll += (-ours.gather(1, target[:, None])[:, 0]).tolist()
        self.full_nll += (-theirs.gather(1, target[:, None])[:, 0]).tolist()

    def figures(self) -> dict[str, Any]:
        """Fields of a `FidelityResult`."""
        return Judged(self.kl, self.agrees, self.nll, self.full_nll).figures()


class FidelityRun:
    """A request on a loaded model. `watch` says what it wants, and gets the results."""

    def __init__(
        self, request: FidelityRequest, loaded: LoadedModel, watch: FidelityObserver
    ) -> None:
        self.request, self.loaded, self.watch = request, loaded, watch
        self._documents, self._base = documents_of(request, loaded)
        self._words = words_of(loaded, request.chat, self._base)

    @torch.inference_mode()
    def run(self) -> None:
        """All that the watch still wants."""
        known = facts(self.loaded, self.request)
        numbers = range(self.request.first, self.request.first + len(self._documents))
        self.watch.began(replace(known, task=self._documents[0].kind), len(numbers))
        for number, document in zip(numbers, self._documents, strict=True):
            if any(self.watch.wants(number, cell) for cell in self.request.cells):
                self._read(number, self._followed(document))

    def _followed(self, document: Document) -> Document:
        """The document with what full retention generates, unless its tokens were given."""
        if document.tokens:
            return document
        decoder = TreeDecoder(self.loaded.model, None, self._block)
        most = self.request.max_tokens or self._base.max_tokens
        logits = decoder.prefill(document.prompt)[None]
        decoder.open(1, 0)
        decoder.activate([1])
        tokens = [int(logits.argmax(-1))]
        while len(tokens) < most and not self._base.is_finished(document.problem, tokens):
            tokens.append(int(decoder.step(tokens[-1:]).argmax(-1)))
        return replace(document, tokens=tuple(tokens))

    def _read(self, number: int, document: Document) -> None:
        """All cells in groups that are read together.

        A group of which a result is missing is read whole: what runs together, rounds together.
        """
        cells = self.request.cells
        if self.request.masked:
            self._masked(number, document, cells)
            return
        full = [cell for cell in cells if isinstance(cell.policy, Full)]
        others = [cell for cell in cells if cell not in full]
        for cell in full:
            self._reference(number, document, cell)
        for group in batched(range(len(others)), self.request.batch):
            together = [others[at] for at in group]
            if any(self.watch.wants(number, cell) for cell in together):
                self._live(number, document, together)

    def _reference(self, number: int, document: Document, cell: Cell) -> None:
        """Full retention, which is compared with itself."""
        comparing, reference = Comparing(), Reference(self.loaded.model, document)
        for fed in range(1, len(document.tokens)):
            logits = reference.after(fed)
            comparing.take(logits, logits, self._target(document, fed))
        held = geometry(self.loaded).kv_bytes_per_token * document.length
        self._finish(number, document, cell, comparing, held)

    def _live(self, number: int, document: Document, cells: Sequence[Cell]) -> None:
        """Some cells in lockstep: each token is one forward pass of all."""
        source = DocumentSource(self._base, document, self._words)
        running = []
        for cell in cells:
            follow = Following(document.tokens)
            search = self._search(source, document, cell, follow)
            running.append(_Reading(cell, follow, search, search.steps()))
        still = [each for each in running if each.begin()]
        reference = Reference(self.loaded.model, document)
        for fed in range(1, len(document.tokens) + 1):
            logits = run_together([each.search.prepare(each.next) for each in still])
            if fed < len(document.tokens):  # the last token is read, and followed by none
                full = reference.after(fed)
                for each, own in zip(still, logits, strict=True):
                    each.comparing.take(full, own[0], self._target(document, fed))
                    each.follow.fed = fed
            self.watch.running(number, document.name, len(still))
            still = [each for each, own in zip(still, logits, strict=True) if each.go(own[:, 0])]
            if not still:
                break
        for each in running:
            held = 0 if each.why else each.search.measurements().peak_hbm_kv_bytes
            each.close()
            self._finish(number, document, each.cell, each.comparing, held, each.why)

    def _search(
        self, source: DocumentSource, document: Document, cell: Cell, follow: Following
    ) -> PolicySearch:
        request, tokens = self.request, len(document.tokens)
        setup = _Setup(
            model=self.loaded.model,
            source=source,
            make_search=lambda: make_search("linear"),
            temperature=0.0,
            seed=request.seed,
            max_tokens=tokens,
            prefill_block=self._block,
            attention_top=request.attention_top or attention_top(document.length),
            graphs=request.graphs,
            following=follow,
        )
        budget = cell.budget.in_tokens(document.length)
        machine = CacheOptions(request.recall, request.overlap, request.page_tokens)
        return PolicySearch(setup, source.problem(0), cell.policy, budget, machine)

    @property
    def _block(self) -> int:
        return prefill_block(self.loaded.model.device)

    def _target(self, document: Document, fed: int) -> Tensor:
        return torch.tensor([document.tokens[fed]], device=self.loaded.model.device)

    def _finish(
        self,
        number: int,
        document: Document,
        cell: Cell,
        comparing: Comparing,
        held: int,
        why: str = "",
    ) -> None:
        budget = cell.budget.in_tokens(document.length)
        if isinstance(cell.policy, Full):
            budget = document.length
        known: dict[str, Any] = {"infeasible": why} if why else comparing.figures()
        of_cell = (cell.policy.name, cell.budget.text, budget, document.length)
        self.watch.finished(
            FidelityResult(number, document.name, *of_cell, peak_kv_bytes=held, **known)
        )

    def _masked(self, number: int, document: Document, cells: Sequence[Cell]) -> None:
        """Some cells at a time, full retention along with each."""
        (full,) = (cell for cell in cells if isinstance(cell.policy, Full))
        others = [cell for cell in cells if cell is not full]
        for group in batched(range(len(others)), _TOGETHER) if others else ([],):
            together = [full, *(others[at] for at in group)]
            if not any(self.watch.wants(number, cell) for cell in together):
                continue
            taking = _Taking(document, [Comparing() for _ in together])
            ids, prompt = [*document.prompt, *document.tokens], len(document.prompt)
            runs = forced(self.loaded.model, ids, prompt, together, taking)
            for cell, comparing, run in zip(together, taking.comparing, runs, strict=True):
                if self.watch.wants(number, cell):
                    self._finish(number, document, cell, comparing, 0, run.infeasible)


_TOGETHER = 7  # cells that are masked together, besides full retention


@dataclass
class _Taking:
    """Takes the logits of masked cells, of which number 0, full retention, comes first."""

    document: Document
    comparing: list[Comparing]
    first: int = 0  #: position of the first of full retention's newest
    full: Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(self, cell: int, first: int, logits: Tensor) -> None:
        if cell == 0:
            self.first, self.full = first, logits
        begin = first - len(self.document.prompt) + 1
        target = self.document.tokens[begin : begin + len(logits)]  # the last token has none
        own, at = logits[: len(target)], first - self.first
        known = torch.tensor(target, dtype=torch.int64, device=logits.device)
        if target:
            self.comparing[cell].take(self.full[at : at + len(target)], own, known)


class Reference:
    """Full retention's logits along a document, computed a block at a time."""

    def __init__(self, model: Any, document: Document) -> None:
        block = block_tokens(model.config.num_attention_heads, document.length)
        self._decoder, self._document = TreeDecoder(model, None, block), document
        self._decoder.prefill(document.prompt)
        self._decoder.open(1, 0)
        self._decoder.activate([1])
        self._first, self._block = 1, torch.empty(0)

    def after(self, fed: int) -> Tensor:
        """Logits ``[1, vocabulary]`` after a number of tokens, one more each time."""
        if fed == self._first + len(self._block):
            size = self._decoder.prefill_block
            ids = np.array([self._document.tokens[fed - 1 : fed - 1 + size]])
            self._first, self._block = fed, self._decoder.read(ids)
        return self._block[fed - self._first][None]


def too_large(request: FidelityRequest) -> UsageError:
    """The remedy where memory runs out."""
    return UsageError(
        f"out of memory on {request.device}: {request.model} in {request.dtype}, "
        f"{request.batch} policies at a time: try a smaller --batch, --tokens or --dtype"
    )


@dataclass
class _Reading:
    """A policy that reads a document."""

    cell: Cell
    follow: Following
    search: PolicySearch
    steps: Any
    comparing: Comparing = field(default_factory=Comparing)
    next: list[int] = field(default_factory=list)
    why: str = ""  #: the budget cannot hold the document

    def begin(self) -> bool:
        """Read the prompt; whether the budget can hold it."""
        return self._advance(lambda: next(self.steps))

    def go(self, logits: Tensor) -> bool:
        """Hand in what followed the newest token; whether there is more to read."""
        return self._advance(lambda: self.steps.send(logits))

    def close(self) -> None:
        """Free the cache."""
        self.steps.close()

    def _advance(self, step: Callable[[], list[int]]) -> bool:
        try:
            self.next = step()
        except StopIteration:
            return False
        except BudgetInfeasible as error:
            self.why = str(error)
        return not self.why
