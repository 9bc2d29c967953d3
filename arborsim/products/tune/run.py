"""A policy's settings, tuned for memory, time and quality at once, on recorded searches.

Every trial replays the even episodes of each trace with settings and a budget that Optuna proposes.
What no other trial beats in one figure without losing in another is the *front*.  It is replayed
again on the odd episodes, which no trial has seen: those figures are the ones to report.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arborsim.core.documents import file_digest, plain
from arborsim.core.errors import ArborsimError, UnknownName, UsageError
from arborsim.core.installed import sources
from arborsim.core.outputs import refuse_inputs, write_text
from arborsim.core.settings import parsed, setting_text
from arborsim.core.statistics import efficient
from arborsim.core.tiers import Budget
from arborsim.machine.machine import Machine
from arborsim.play.episode import Cell, cells_of
from arborsim.play.results import ANY, BASELINE, ReplayResult, Row
from arborsim.policies.base import Policy
from arborsim.policies.composition import Composition, composition_toml
from arborsim.policies.registry import build, find, parameter_name, parameters, resolved, values_of
from arborsim.products.calibrate.documents import Calibration, software
from arborsim.products.fidelity.known import KnownFidelity
from arborsim.products.replay.run import SOURCES, Fixed, Replay
from arborsim.products.tune.space import Choice, Range, Space, Values
from arborsim.products.tune.study import Ended, Study
from arborsim.report.words import nats
from arborsim.trace.reader import open_trace

#: What memory is: the mean of the peaks of searches, or bytes times seconds.
MEMORY = {"peak": "mean_peak_hbm_kv_bytes", "byte-seconds": "hbm_byte_seconds"}
#: What quality is: a figure of a row, and whether more of it is better.
QUALITY = {
    "kept": ("attention_kept", True),
    "error": ("output_error", False),
    "fidelity": ("fidelity", False),
}
BUDGET = "budget"  #: how the budget is called among what is varied
_NOTE = (
    "Every row is a setting of the front; its trial and settings follow the budget. Answers are "
    "counted by live runs of the files that --front writes: arborsim live --policy FILE."
)


def _short(value: Any) -> str:
    """A digest that names a question."""
    text = json.dumps(plain(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Figures:
    """The memory, time and quality of settings: means over the traces."""

    memory: float  #: a share of full retention's
    time: float  #: as a multiple of full retention's
    quality: float  #: attention kept or output error, shares; or KL to full retention, nats


@dataclass(frozen=True)
class Trial:
    """Settings that were tried, and what they came to."""

    number: int
    settings: Values
    budget: float  #: share of what full retention holds
    tuned: Figures | None = None  #: on the episodes that were tuned on; None if they cannot run
    front: bool = False
    held_out: Figures | None = None  #: of the front
    reason: str = ""  #: why they cannot run


@dataclass(frozen=True)
class Question:
    """The policy, the objectives and the traces of a study.

    Raises `UsageError` for what is no measure, and if nothing is varied.
    """

    traces: tuple[Path, ...]
    policy: str
    space: Space
    budget: Range | Choice
    machine: Machine
    fixed: Mapping[str, str] = field(default_factory=dict)  #: settings that are given
    memory: str = "peak"
    quality: str = "kept"
    seed: int = 0
    measured: KnownFidelity = KnownFidelity()  #: the only settings that such a quality knows

    def __post_init__(self) -> None:
        for what, name, known in (
            ("memory", self.memory, MEMORY),
            ("quality", self.quality, QUALITY),
        ):
            if name not in known:
                raise UnknownName(f"measure of {what}", name, known)
        if (self.quality == "fidelity") != bool(self.measured.rows):
            raise UsageError(
                "--quality fidelity and --fidelity FILE (of arborsim fidelity) go together"
            )
        if self.measured.rows and not all(isinstance(e, Choice) for e in self.varied.values()):
            shares = sorted({row.fidelity.budget for row in self.measured.rows} - {ANY})
            raise UsageError(
                "--quality fidelity: only what was measured can be tried: name values, as in "
                f"--budget {','.join(shares)}"
            )
        for name in self.fixed:
            key = parameter_name(find(self.policy), name)
            if key in self.space:
                raise UsageError(f"{key} is both set and varied: leave out one")
        policy = build(self.policy, dict(self.fixed))
        budgets = [self.budget] if policy.uses_budget else []
        if all(
            isinstance(each, Choice) and len(each.values) == 1
            for each in (*self.space.values(), *budgets)
        ):
            budget = "--budget names one" if budgets else "it knows no budget"
            settings = ", ".join(parameters(type(policy)))
            vary = f"--vary names no settings, of {settings}" if settings else "it has no settings"
            raise UsageError(f"{policy.name} has nothing to tune: {budget}, and {vary}")

    @property
    def varied(self) -> Space:
        """All that is varied, the budget too."""
        return {**self.space, BUDGET: self.budget}

    def asked(self) -> dict[str, Any]:
        """All that determines the results, but for what is varied."""
        return {
            "policy": self.policy,
            "memory": self.memory,
            "quality": self.quality,
            "seed": self.seed,
            "settings": dict(sorted(self.fixed.items())),
            "traces": [f"{path.name} {file_digest(path)}" for path in self.traces],
            **({"fidelity": _short(self.measured)} if self.measured.rows else {}),
            "machine": _short({**vars(self.machine), "profile": self.machine.profile.digest}),
            "version of arborsim": sources(*SOURCES),
        }

    def study_name(self) -> str:
        """A name that only the same question has."""
        ranges = {name: kind.text for name, kind in self.varied.items()}
        return f"{Path(self.policy).stem}-{_short([self.asked(), ranges])}"

    def policy_of(self, values: Values) -> Policy:
        """The policy with these settings."""
        texts = {name: setting_text(value) for name, value in values.items() if name != BUDGET}
        return build(self.policy, {**self.fixed, **texts})

    def divergence(self, values: Values) -> float:
        """The measured KL of these settings. An `ArborsimError` where there is none."""
        policy, budget = self.policy_of(values), f"{values[BUDGET]:g}"
        found = self.measured.of(policy.name, resolved(policy), budget)
        if found is None or found.budget not in (budget, ANY):
            raise ArborsimError(
                f"no file of --fidelity holds {policy.name} with these settings at budget {budget}"
            )
        return found.kl

    def defaults(self) -> Values:
        """The settings of the policy if nothing is varied, and the middle of the budgets."""
        values = values_of(build(self.policy, dict(self.fixed)))
        middle = (self.budget.values[0] if isinstance(self.budget, Choice)
                  else (self.budget.low + self.budget.high) / 2)  # fmt: skip
        return {**{name: values[name] for name in self.space}, BUDGET: middle}


@dataclass(frozen=True, eq=False)
class Tuned:
    """All trials in the order in which they began."""

    #: What was tuned, by which measures, and names of the settings that were varied
    policy: str
    memory: str
    quality: str
    varied: tuple[str, ...]
    trials: tuple[Trial, ...]
    #: What read from a file lacks: the question, and the replay of the front on held-out episodes
    question: Question | None = None
    held_out: ReplayResult | None = None  #: None also if no trace has a second episode

    @property
    def front(self) -> list[Trial]:
        """From the least memory on."""
        found = [trial for trial in self.trials if trial.front]
        return sorted(found, key=lambda t: (t.tuned.memory if t.tuned else math.nan, t.number))


class _Measuring:
    """Replays settings on some of the episodes."""

    def __init__(self, question: Question, odd: bool) -> None:
        self._question = question
        paths = [p for p in question.traces if open_trace(p).num_episodes > odd]
        policy = question.policy_of(question.defaults())
        self.job = Replay(
            paths, [policy], [], question.machine, first=int(odd), step=2, strict=True,
            asked=frozenset({policy.name}),
        )  # fmt: skip
        self._names = [self.job.name_of(reader) for reader in self.job.open()] if paths else []
        rows = self.replay(cells_of([build(BASELINE)], [])).rows() if paths else ()
        self.full = {row.trace: row for row in rows}

    @property
    def episodes(self) -> int:
        return sum(len(self.job.chosen(open_trace(path))) for path in self.job.traces)

    def replay(self, cells: Sequence[Cell]) -> ReplayResult:
        fixed = Fixed({name: list(cells) for name in self._names}, (), (), _NOTE)
        return replace(self.job, fixed=fixed, strict=False).run()

    def cell(self, values: Values, label: str = "") -> Cell:
        share = float(values[BUDGET])
        return Cell(self._question.policy_of(values), Budget(label or f"{share:g}", share=share))

    def figures(self, values: Values) -> Figures:
        """The figures of one setting. An `ArborsimError` if it cannot run on one of the traces."""
        lost = self._question.divergence(values) if self._question.measured.rows else math.nan
        found = self.replay([self.cell(values)])
        if found.left_out:
            raise ArborsimError(found.left_out[0].detail)
        return self.figures_of(found.rows(), lost)

    def figures_of(self, rows: Sequence[Row], lost: float = 0.0) -> Figures:
        """Means over the traces, each relative to full retention on it.

        `lost` is the measured divergence where that is the quality, nats.
        """
        asked = self._question
        memory, (quality, _) = MEMORY[asked.memory], QUALITY[asked.quality]
        found = [
            (getattr(row, memory) / getattr(self.full[row.trace], memory),
             row.time.total_s / self.full[row.trace].time.total_s,
             lost if asked.measured.rows else getattr(row, quality))
            for row in rows
        ]  # fmt: skip
        means = [math.fsum(column) / len(found) for column in zip(*found, strict=True)]
        return Figures(*means)


def tune(
    question: Question,
    trials: int,
    *,
    storage: str = "",
    study: str = "",
    worker: int = 0,
    advance: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Tuned:
    """Try settings until the study has `trials` of them, and replay the front on held-out episodes.

    Raises
    ------
    UsageError
        The storage or study cannot be used, or no trace has what the quality is measured on.
    ArborsimError
        None of the settings can run.
    """
    measuring = _Measuring(question, odd=False)
    known = measuring.figures_of([*measuring.full.values()])
    if math.isnan(known.quality):
        column = "attention" if question.quality == "kept" else "vectors (--capture qkv)"
        raise UsageError(
            f"--quality {question.quality}: not every trace holds {column}: choose another "
            "measure, or traces that hold it"
        )
    _, higher = QUALITY[question.quality]

    def measure(values: Values) -> tuple[float, float, float]:
        found = measuring.figures(values)
        if math.isnan(found.quality):
            raise UsageError(f"--quality {question.quality} is not known for these settings")
        return found.memory, found.time, 1 - found.quality if higher else found.quality

    name = study or question.study_name()
    going = Study(name, storage, question.varied, 3, question.asked())
    ended = going.run(
        measure, trials, first=question.defaults(), seed=question.seed, worker=worker,
        on_progress=lambda done: advance("trying settings", min(done, trials), trials),
    )  # fmt: skip
    ran = [each for each in ended if not each.reason]
    if not ran:
        raise ArborsimError(f"none of {len(ended)} settings can run: {ended[0].reason}")
    best = {id(ran[at]) for at in efficient([each.figures for each in ran])}
    made = [_trial(number, each, higher, id(each) in best) for number, each in enumerate(ended)]
    return _held_out(question, made, advance)


def _trial(number: int, ended: Ended, higher: bool, front: bool) -> Trial:
    values = dict(ended.values)
    budget = float(values.pop(BUDGET))
    if ended.reason:
        return Trial(number, values, budget, reason=ended.reason)
    memory, time, lost = ended.figures
    return Trial(number, values, budget, Figures(memory, time, 1 - lost if higher else lost), front)


def _held_out(
    question: Question, trials: Sequence[Trial], advance: Callable[[str, int, int], None]
) -> Tuned:
    """With the front replayed on the odd episodes, full retention too."""
    measuring = _Measuring(question, odd=True)
    made = Tuned(find(question.policy).name, question.memory, question.quality,
                 tuple(question.space), tuple(trials), question)  # fmt: skip
    if not measuring.episodes:
        return made
    front = [trial for trial in trials if trial.front]
    advance("held-out episodes", 0, 1)
    cells = {
        trial.number: measuring.cell({**trial.settings, BUDGET: trial.budget}, label(trial))
        for trial in front
    }
    result = measuring.replay([*cells_of([build(BASELINE)], []), *cells.values()])
    rows: dict[str, list[Row]] = {}
    for row in result.rows():
        rows.setdefault(row.budget, []).append(row)
    advance("held-out episodes", 1, 1)
    found = [
        replace(trial, held_out=measuring.figures_of(rows[label(trial)], _lost(trial)))
        if trial.front and label(trial) in rows
        else trial
        for trial in trials
    ]
    # No policy by a name, so no answers and no live run, belong to its rows.
    return replace(made, trials=tuple(found), held_out=replace(result, recordings={}, answers={}))


def _lost(trial: Trial) -> float:
    """The quality as tuned: documents, on which fidelity was measured, are no episodes."""
    return trial.tuned.quality if trial.tuned else math.nan


def label(trial: Trial) -> str:
    """The name of a trial's rows in a replay: its budget, number and settings."""
    last = [name.rpartition(".")[2] for name in trial.settings]
    short = last if len(set(last)) == len(last) else trial.settings
    pairs = zip(short, map(setting_text, trial.settings.values()), strict=True)
    said = ", ".join(f"{name}={value}" for name, value in pairs)
    return f"{trial.budget:g} (trial {trial.number}{said and ': '}{said})"


def write_front(tuned: Tuned, folder: Path, command: str) -> list[Path]:
    """Write a file for each setting of the front. Returns the files, least memory first.

    A composition becomes one that ``--policy`` takes. The settings of another policy become a
    calibration.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--front {folder}: cannot be made ({error.strerror})") from error
    asked, files = tuned.question, []
    assert asked is not None
    for trial in tuned.front:
        policy = asked.policy_of({**trial.settings, BUDGET: trial.budget})
        name = f"{policy.name}-{trial.number}"
        figures = trial.held_out or trial.tuned
        assert figures is not None
        episodes = "held-out" if trial.held_out else "tuned"
        found = (
            f"{figures.memory:.1%} of full retention's memory ({asked.memory}), "
            f"{figures.time:.2f} of its time, "
            f"{_quality(asked.quality, figures.quality)}, on {episodes} episodes"
        )
        path = folder / f"{name}.toml"
        refuse_inputs({"--front": path}, {Path(asked.policy), *asked.traces})
        if isinstance(policy, Composition):
            text = composition_toml(policy, name, f"{type(policy).name}, tuned")
            use = f"--policy {path.name}"
        else:
            text = _calibration(asked, trial, found, command).to_toml()
            use = f"--policy {policy.name} --calibration {path.name}"
        head = (
            f"# {found}\n# Made by: {' '.join(command.split())}\n"
            f"# Use: arborsim replay TRACE {use} --budget {trial.budget:g}\n"
        )
        write_text(path, f"{head}{text}")
        files.append(path)
    return files


def _quality(quality: str, value: float) -> str:
    """For people, in percent or nats. What is not all is not called 100%."""
    if quality == "fidelity":
        return f"KL to full retention {nats(value)} (on documents)"
    share = ">99.9%" if 0.9995 <= value < 1 else f"{value:.1%}"
    return f"{'attention kept' if quality == 'kept' else 'output error'} {share}"


def _calibration(asked: Question, trial: Trial, finding: str, command: str) -> Calibration:
    readers = [open_trace(path) for path in asked.traces]
    given = {
        name: parsed(asked.policy, name, parameters(find(asked.policy))[name].kind, text)
        for name, text in asked.fixed.items()
    }
    return Calibration(
        "tune", readers[0].info.model, readers[0].info.geometry.layers,
        sum(reader.num_episodes for reader in readers),
        sum(reader.num_rows(i) for reader in readers for i in range(reader.num_episodes)),
        asked.seed, command, {find(asked.policy).name: {**given, **trial.settings}}, finding,
        software("numpy", "optuna"), {"budget": trial.budget, "trial": trial.number},
    )  # fmt: skip
