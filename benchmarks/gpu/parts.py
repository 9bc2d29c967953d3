"""The parts of a run, in order: checks, calibration, live searches, the longest contexts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from arborsim.machine.lookup import load_profile
from arborsim.machine.profile import HardwareProfile
from arborsim_torch.models import LoadedModel, load_model
from benchmarks.gpu.calibration import calibrate
from benchmarks.gpu.checks import run_checks
from benchmarks.gpu.context import KINDS, Prober, longest_context
from benchmarks.gpu.journal import Facts, Journal
from benchmarks.gpu.live import (
    YARDSTICK,
    Load,
    arms,
    run_arm,
    run_yardstick,
    too_large_for_host,
)

PARTS = ("correctness", "calibration", "live", "context")
#: Shares of the budget; live searches get what the others leave.
SHARES = {"correctness": 0.24, "calibration": 0.16, "context": 0.14}
_SLOW_GROWTH = 1.3  # seconds grow with this power of the length, between linear and quadratic


@dataclass(frozen=True)
class Plan:
    """What is run, and how large it is.

    Attributes
    ----------
    model : str
        With random weights: ``config:`` and a geometry or a file.
    device : str
    toy : bool
        Few and small checks.
    quick : bool
        Of the calibration.
    sizes : tuple of int
        Prompts of the live searches, in this order.
    new_tokens : int
        Generated per path.
    prefill_block : int
        Prompt tokens per forward pass.
    context_step, longest : int
        Contexts are probed in multiples of the one up to the other.
    budget_s, search_s : float
        For everything, and for one search.
    profile : Path
        Where the calibrated profile goes.
    command : str
    """

    model: str
    device: str
    toy: bool
    quick: bool
    sizes: tuple[int, ...]
    new_tokens: int
    prefill_block: int
    context_step: int
    longest: int
    budget_s: float
    search_s: float
    profile: Path
    command: str


class Parts:
    """Runs the parts of a plan."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan, self._journal = plan, journal
        self._loaded: LoadedModel | None = None
        self._took: dict[str, Facts] = {}  # of each policy, its last search

    def run(self, wanted: Collection[str]) -> None:
        """All that are wanted (of `PARTS`)."""
        plan, journal = self._plan, self._journal
        if "correctness" in wanted:
            with journal.within(SHARES["correctness"] * plan.budget_s):
                run_checks(journal, plan.device, plan.toy)
        if "calibration" in wanted:
            self._calibration()
        if "live" in wanted and self._model_for("live"):
            kept_s = SHARES["context"] * plan.budget_s if "context" in wanted else 0.0
            with journal.within(journal.left_s - kept_s):
                self._live()
        if "context" in wanted and self._model_for("context"):
            self._context()

    def _calibration(self) -> None:
        plan = self._plan
        limit_s = SHARES["calibration"] * plan.budget_s * (1 if plan.quick else 2)
        work = partial(calibrate, plan.model, plan.device, plan.quick, plan.profile, plan.command)
        self._journal.attempt("calibration", {"quick": plan.quick}, limit_s, work)

    def _model_for(self, part: str) -> bool:
        """Load the model if it is not there; false if it cannot be."""

        def load() -> Facts:
            self._loaded = load_model(self._plan.model, "", self._plan.device)
            return {"model": self._loaded.name.rpartition("/")[2]}

        if self._loaded is None:
            self._journal.attempt("model", {"for": part}, self._journal.left_s, load)
        return self._loaded is not None

    def _profile(self) -> tuple[HardwareProfile, str]:
        """What predictions are made with, and where it is from."""
        of_run = [r["outcome"] for r in self._journal.records if r["part"] == "calibration"]
        if of_run == ["done"]:
            return load_profile(self._plan.profile), "calibrated in this run"
        return load_profile("h200"), "h200, as shipped"

    def _live(self) -> None:
        plan, loaded = self._plan, self._loaded
        assert loaded is not None
        profile, origin = self._profile()
        self._warm_up(loaded, profile)
        for later, size in product((False, True), plan.sizes):
            load = Load(size, plan.new_tokens, plan.prefill_block)
            facts: Facts = {
                "prompt_tokens": size, "new_tokens": plan.new_tokens, "profile": origin
            }  # fmt: skip
            if not later:
                self._search(YARDSTICK, facts, "", partial(run_yardstick, loaded, load))
            for arm in arms(plan.new_tokens):
                if arm.later != later:
                    continue
                own = {**facts, "recall": arm.recall, "budget_tokens": arm.budget_tokens(load)}
                why = too_large_for_host(arm, load, loaded)
                work = partial(run_arm, loaded, load, arm, profile)
                self._search(arm.label, own, why, work)

    def _warm_up(self, loaded: LoadedModel, profile: HardwareProfile) -> None:
        """A short search of every kind: kernels are compiled when they are first needed."""
        plan = self._plan
        load = Load(2 * plan.prefill_block, 8, plan.prefill_block)

        def search() -> Facts:
            run_yardstick(loaded, load)
            for arm in arms(load.new_tokens):
                run_arm(loaded, load, arm, profile)
            return {}

        self._journal.attempt("warm-up", {"prompt_tokens": load.prompt_tokens}, 60.0, search)

    def _search(self, label: str, facts: Facts, why: str, work: Callable[[], Facts]) -> None:
        """One search, unless a shorter one tells that it cannot be."""
        facts = {"policy": label, **facts}
        before, expected_s = self._took.get(label), 0.0
        if before is not None:
            length = facts["prompt_tokens"] / before["prompt_tokens"]
            expected_s = before["seconds"] * length**_SLOW_GROWTH
            if before["outcome"] in ("does not fit", "out of time") and length > 1:
                why = why or f"{before['prompt_tokens']} tokens: {before['outcome']}"
            elif expected_s > self._plan.search_s:
                why = why or f"{expected_s:.0f} s expected, {self._plan.search_s:.0f} s allowed"
        if why:
            self._journal.write("live", "left out", {**facts, "why": why})
            return
        record = self._journal.attempt("live", facts, self._plan.search_s, work, expected_s)
        if record["outcome"] != "left out":
            self._took[label] = record

    def _context(self) -> None:
        plan, journal = self._plan, self._journal
        assert self._loaded is not None
        for done, kind in enumerate(KINDS):
            with journal.within(journal.left_s / (len(KINDS) - done)):
                prober = Prober(self._loaded, kind, plan.prefill_block)

                def tell(facts: Facts, kind: str = kind) -> None:
                    journal.write("probe", "done", {"kind": kind, **facts})

                work = partial(
                    longest_context, prober, plan.context_step, plan.longest,
                    lambda: journal.left_s, tell,
                )  # fmt: skip
                facts = {"kind": kind, "what": KINDS[kind]}
                journal.attempt("context", facts, journal.left_s, work)
