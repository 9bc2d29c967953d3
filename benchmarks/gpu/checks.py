"""All checks of correctness, those that only a GPU can fail first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from arborsim.core.tiers import RECALLS
from benchmarks.gpu import decisions, kernels, masking
from benchmarks.gpu.journal import Facts, Journal
from tests.live.pieces_cases import Case

GROUPINGS = ("shared", "layer", "head")
_FEW_POLICIES = ("full", "streaming-llm", "h2o", "epikv", "hierarchy", "arkv", "arborkv")
_MIB = 1 << 20
_LIMIT_S = 30.0  # of one check: Triton compiles a kernel per kind of case

Check = tuple[str, Facts, Callable[[], Facts]]


def run_checks(journal: Journal, device: str, tiny: bool, more: bool) -> None:
    """Run those that tell most, or `more`, until the time is over; each leaves a record with
    ``ok``."""
    for name, facts, work in (_more if more else _first)(device, tiny):
        journal.attempt("correctness", {"check": name, **facts}, _LIMIT_S, work)


def _first(device: str, tiny: bool) -> Iterator[Check]:
    blocks = (1000, _MIB) if tiny else (1, 4097, _MIB, 64 * _MIB, 256 * _MIB)
    yield "copies are right", {}, partial(kernels.compare_copies, device, blocks)
    for pieces in kernels.SMALL_PIECES[:2] if tiny else kernels.LONG_PIECES:
        yield _pieces(pieces, device)
    for seqs in (1, 4):
        tokens = 256 if tiny else 16384
        work = partial(kernels.compare_prefix, tokens, seqs, device)
        yield "attention over a shared prefix", {"tokens": tokens, "sequences": seqs}, work
    for dtype in kernels.TOLERANCE:
        for history in (0, 96):
            facts: Facts = {"dtype": str(dtype).removeprefix("torch."), "history": history}
            work = partial(kernels.compare_prefill, dtype, history, device)
            yield "a block of a prompt", facts, work
    groupings, steps = (GROUPINGS[::2], 12) if tiny else (GROUPINGS, 30)
    for grouping in groupings:
        facts = {"grouping": grouping}
        yield "tokens come back", facts, partial(kernels.compare_moved_tokens, device, grouping)
        work = partial(masking.rehydrating_is_keeping, device, grouping)
        yield "rehydrating is keeping", facts, work
        modes = [(recall, False) for recall in RECALLS] + [("stage", True)]
        for recall, ordered in (("stage", True), ("stream", False)) if tiny else modes:
            facts = {"grouping": grouping, "recall": recall, "ordered": ordered}
            work = partial(masking.evicting_is_masking, device, grouping, ordered, recall, steps)
            yield "evicting is masking", facts, work
    yield _decision("game24", device, _FEW_POLICIES, 0)


def _more(device: str, tiny: bool) -> Iterator[Check]:
    for name in () if tiny else decisions.TASKS:
        yield _decision(name, device, decisions.all_policies(), 1)
    for pieces in kernels.SMALL_PIECES[-2:] if tiny else kernels.SMALL_PIECES:
        yield _pieces(pieces, device)


def _decision(name: str, device: str, policies: Sequence[str], problem: int) -> Check:
    work = partial(decisions.compare_decisions, decisions.TASKS[name], device, policies, problem)
    return "decisions are the CPU's", {"search": name, "problem": problem}, work


def _pieces(case: Case, device: str) -> Check:
    work = partial(kernels.compare_pieces, case, device)
    return "attention over pieces", {"case": case.name}, work
