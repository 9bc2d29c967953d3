"""The process that does the work of a plan, step by step; its watchdog writes it down."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection

import torch

from arborsim.core.errors import ArborsimError
from arborsim.machine.lookup import load_profile
from arborsim.machine.profile import HardwareProfile
from arborsim_torch.hardware.facts import conditions, software
from arborsim_torch.models import LoadedModel, device_name, load_model
from benchmarks.gpu.calibration import calibrate
from benchmarks.gpu.checks import run_checks
from benchmarks.gpu.context import KINDS, Prober, longest_context
from benchmarks.gpu.estimate import shipped_profile
from benchmarks.gpu.journal import DeviceLost, Facts, Journal, failure, plain
from benchmarks.gpu.live import run_arm, too_large_for_host, trace_step
from benchmarks.gpu.plan import CHECKS, Arm, Load, Plan, Step
from benchmarks.gpu.resume import alike, identity
from benchmarks.gpu.yardsticks import measure_yardsticks, run_yardstick

_GROWTH = 1.3  # seconds grow with this power of the length, between linear and quadratic
_SMOKE_LIMIT_S = 30.0
_FIRST_LIMIT_S = 15.0  # more for the first search of an arm in a process: Triton compiles


def work(plan: Plan, connection: Connection, records: list[Facts], end: float) -> None:
    """Do what `records` do not hold yet, and send new ones; the last message is ``ended``."""

    def send(record: Facts) -> None:
        connection.send_bytes(in_json(record).encode())

    try:
        Worker(plan, records, end, send).run()
        send({"ended": ""})
    except DeviceLost as error:
        send({"ended": str(error)})
    except ArborsimError as error:  # the device, or the model on it, cannot be had
        send({"part": "watchdog", "outcome": "refused", "error": str(error)})
        send({"ended": ""})
    except Exception as error:  # before anything was begun: another process would fare no better
        send({"part": "watchdog", "outcome": "failed", **failure(error)})
        send({"ended": ""})


def in_json(record: Facts) -> str:
    """A record as text; one that JSON cannot hold becomes one that says so."""
    try:
        return json.dumps(record, default=plain)
    except (TypeError, ValueError) as error:
        known = {name: record[name] for name in ("part", "of") if name in record}
        return json.dumps({**known, "outcome": "failed", **failure(error)}, default=plain)


class Worker:
    """Runs the steps of a plan."""

    def __init__(
        self, plan: Plan, records: list[Facts], end: float, send: Callable[[Facts], None]
    ) -> None:
        self._plan = plan
        self._loaded = load_model(plan.model, "", plan.device)
        facts = start_facts(plan, self._loaded)
        earlier = alike(records, facts["identity"])
        self._journal = Journal(end, torch.device(plan.device), send, earlier)
        self._journal.write("start", "done", facts)
        self._warm: set[tuple[str, str]] = set()

    def run(self) -> None:
        """All steps, in order."""
        handlers: dict[str, Callable[[Step], None]] = {
            "start": lambda step: None, "yardsticks": self._yardsticks, "smoke": self._smoke,
            "correctness": self._correctness, "calibration": self._calibration,
            "search": self._search, "trace": self._trace, "context": self._context,
        }  # fmt: skip
        for step in self._plan.steps:
            try:
                handlers[step.part](step)
            except DeviceLost:
                raise
            except Exception as error:  # outside of an attempt; the next step is begun all the same
                self._journal.write(step.part, "failed", failure(error), step.facts)
                self._journal.check_device()

    def _yardsticks(self, step: Step) -> None:
        work = partial(measure_yardsticks, self._loaded, self._plan.tiny)
        self._journal.attempt("yardsticks", {}, step.limit_s, work)

    def _smoke(self, step: Step) -> None:
        """One short search of every arm: what is broken on this device shows its traceback."""
        load = self._plan.smoke_load
        with self._journal.within(step.limit_s):
            for label, arm, graphs in self._plan.smoke:
                of = {"arm": label, "prompt_tokens": load.prompt_tokens, "graphs": graphs}
                work = self._searching(load, arm, label, graphs)
                record = self._journal.attempt("smoke", of, _SMOKE_LIMIT_S, work)
                if record["outcome"] == "done":
                    self._warm.add((label, graphs))

    def _correctness(self, step: Step) -> None:
        with self._journal.within(step.limit_s):
            more = step.facts["checks"] == CHECKS[1]
            run_checks(self._journal, self._plan.device, self._plan.tiny, more)

    def _calibration(self, step: Step) -> None:
        plan = self._plan
        work = partial(calibrate, plan.model, plan.device, True, plan.timed_policies,
                       plan.profile, plan.command)  # fmt: skip
        self._journal.attempt("calibration", {}, step.limit_s, work)

    def _profile(self) -> tuple[HardwareProfile, str]:
        """What predictions are made with, and where it is from."""
        done = [r for r in self._journal.records if r["part"] == "calibration"]
        if done and done[-1]["outcome"] == "done" and self._plan.profile.exists():
            return load_profile(self._plan.profile), "calibrated on this device"
        name = shipped_profile(device_name(torch.device(self._plan.device)))
        return load_profile(name), f"{name}, as shipped"

    def _search(self, step: Step) -> None:
        """One search, unless another tells that it cannot be."""
        load, arm, graphs = self._load(step), step.arm, step.facts["graphs"]
        why = self._hopeless(step)
        if not why and arm is not None:
            why = too_large_for_host(arm, load, self._loaded)
        if why:
            self._journal.write("search", "left out", {"why": why}, step.facts)
            return
        work = self._searching(load, arm, step.facts["arm"], graphs)
        self._attempt(step, arm, graphs, work)

    def _searching(
        self, load: Load, arm: Arm | None, label: str, graphs: str
    ) -> Callable[[], Facts]:
        """A search of an arm, or of one of transformers' caches."""
        if arm is None:
            return partial(run_yardstick, self._loaded, load, label)
        profile, origin = self._profile()
        search = partial(run_arm, self._loaded, load, arm, profile, graphs)
        budget = {"budget_tokens": arm.budget_tokens(load), "profile": origin}
        return lambda: {**budget, **search()}

    def _trace(self, step: Step) -> None:
        assert step.arm is not None
        why = self._hopeless(step)
        if why:
            self._journal.write("trace", "left out", {"why": why}, step.facts)
            return
        work = partial(trace_step, self._loaded, self._load(step), step.arm, self._plan.traces)
        self._attempt(step, step.arm, "auto", work)

    def _load(self, step: Step) -> Load:
        return self._plan.load(step.facts["prompt_tokens"])

    def _attempt(self, step: Step, arm: Arm | None, graphs: str, work: Callable[[], Facts]) -> None:
        """Run a search; the first of an arm after a short one, in which kernels are compiled."""
        label = step.facts["arm"], graphs
        limit_s, whole = step.limit_s, work
        if label not in self._warm:
            limit_s += _FIRST_LIMIT_S

            def whole() -> Facts:
                self._warm_up(arm, step.facts["arm"], graphs)
                self._warm.add(label)
                return work()

        self._journal.attempt(step.part, step.facts, limit_s, whole, self._expected_s(step))

    def _warm_up(self, arm: Arm | None, label: str, graphs: str) -> None:
        block = self._plan.prefill_block
        self._searching(Load(2 * block, 16, block), arm, label, graphs)()

    def _alike(self, step: Step) -> list[Facts]:
        """Records of searches of the same arm in the same mode, smoke included."""
        same = step.facts["arm"], step.facts.get("graphs", "auto")
        return [
            r for r in self._journal.records
            if r["part"] in ("smoke", "search") and (r["of"]["arm"], r["of"]["graphs"]) == same
        ]  # fmt: skip

    def _hopeless(self, step: Step) -> str:
        """Why the step is not begun: the same search, or a shorter one, did not come to its end."""
        for record in self._alike(step):
            tokens = record["of"]["prompt_tokens"]
            if record["of"] == step.facts or tokens > step.facts["prompt_tokens"]:
                continue
            if record["outcome"] not in ("done", "left out"):
                return f"with {tokens:,} tokens: {record['outcome']}"
        return ""

    def _expected_s(self, step: Step) -> float:
        """After what the same search took at this or another length, else the plan's."""
        if step.part != "search":
            return step.expected_s
        seconds = step.expected_s
        for record in self._alike(step):
            if record["outcome"] == "done" and record["part"] == "search":
                length = step.facts["prompt_tokens"] / record["of"]["prompt_tokens"]
                seconds = record["search_s"] * max(length, 1.0) ** _GROWTH
        return seconds

    def _context(self, step: Step) -> None:
        plan, journal = self._plan, self._journal
        with journal.within(step.limit_s):
            for done, kind in enumerate(KINDS):
                with journal.within(journal.left_s / (len(KINDS) - done)):
                    prober = Prober(self._loaded, kind, plan.prefill_block)

                    def tell(facts: Facts, kind: str = kind) -> None:
                        journal.write("probe", "done", {"kind": kind, **facts})

                    work = partial(
                        longest_context, prober, plan.context_step, plan.longest,
                        lambda: journal.left_s, tell,
                    )  # fmt: skip
                    of = {"kind": kind, "what": KINDS[kind]}
                    journal.attempt("context", of, journal.left_s, work)


def start_facts(plan: Plan, loaded: LoadedModel) -> Facts:
    """What the numbers are made with; records of the same ``identity`` go together."""
    known = identity(plan)
    more = {name: text for name, text in software(loaded.model).items() if name not in known}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": known,
        "conditions": {**more, **conditions(loaded.model.device)},
        "command": plan.command,
    }
