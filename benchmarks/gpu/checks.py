"""All checks of correctness, those that only a GPU can fail first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.gpu import decisions, kernels, masking
from benchmarks.gpu.journal import Facts, Journal

GROUPINGS = ("shared", "layer", "head")
RECALLS = ("stage", "stream", "near", "ondemand")
_FEW_POLICIES = ("full", "streaming-llm", "h2o", "epikv", "hierarchy", "arkv", "arborkv")
_MIB = 1 << 20
_LIMIT_S = 60.0  # of one check: Triton compiles a kernel per kind of case

Check = tuple[str, Facts, Callable[[], Facts]]


def run_checks(journal: Journal, device: str, toy: bool) -> None:
    """Run them in order until the time is over; each leaves a record with ``ok``."""
    for name, facts, work in _checks(device, toy):
        journal.attempt("correctness", {"check": name, **facts}, _LIMIT_S, work)


def _checks(device: str, toy: bool) -> Iterator[Check]:
    blocks = (1000, _MIB) if toy else (1, 4097, _MIB, 64 * _MIB, 256 * _MIB)
    yield "copies are right", {}, partial(kernels.compare_copies, device, blocks)
    long, small = (kernels.SMALL[:2], kernels.SMALL[-2:]) if toy else (kernels.LONG, kernels.SMALL)
    for case in long:
        yield _kernel(case, device)
    groupings, steps = (GROUPINGS[::2], 12) if toy else (GROUPINGS, 40)
    for grouping in groupings:
        facts: Facts = {"grouping": grouping}
        yield "tokens come back", facts, partial(kernels.compare_moved_tokens, device, grouping)
        work = partial(masking.rehydrating_is_keeping, device, grouping)
        yield "rehydrating is keeping", facts, work
        for recall in RECALLS[:2] if toy else RECALLS:
            for ordered in (True,) if toy else (False, True):
                facts = {"grouping": grouping, "recall": recall, "ordered": ordered}
                work = partial(
                    masking.evicting_is_masking, device, grouping, ordered, recall, steps
                )
                yield "evicting is masking", facts, work
    names = _FEW_POLICIES if toy else decisions.all_policies()
    for problem in (0,) if toy else (0, 1):
        for name, task in decisions.TASKS.items():
            if toy and name == "chain":
                continue
            facts = {"model": name, "problem": problem}
            work = partial(decisions.compare_decisions, task, device, names, problem)
            yield "decisions are the CPU's", facts, work
    for case in small:
        yield _kernel(case, device)


def _kernel(case: kernels.Case, device: str) -> Check:
    work = partial(kernels.compare_kernel, case, device)
    return "scattered attention", {"case": case.name}, work
