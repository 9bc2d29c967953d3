"""Trials of settings, proposed by Optuna and kept in a database that several machines can share.

With one worker a study depends on its seed alone, wherever it was interrupted: every trial is
proposed by a sampler with a seed of its own, from the trials that have ended.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from arborsim.core.errors import ArborsimError, TraceError, UsageError
from arborsim.products.tune.space import Space, Values

_ASKED, _VALUES, _REASON = "asked", "values", "reason"


@dataclass(frozen=True)
class Ended:
    """A trial that has ended: what it found, or in `reason` why its settings cannot run."""

    values: Values
    figures: tuple[float, ...] = ()  # all the better the smaller
    reason: str = ""


def optuna_for(what: str) -> ModuleType:
    """Optuna, which says nothing by itself. A `UsageError` if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UsageError(
            f"{what} needs optuna, which is not installed: pip install 'arborsim[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def shown(url: str) -> str:
    """A URL without its password."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", url)


class Study:
    """A study with several objectives, which other processes may work on at the same time.

    Parameters
    ----------
    name : str
        Of the study in the storage. It is made, or gone on with.
    storage : str
        URL of a database as SQLAlchemy takes it, or "" to keep the study in memory.
    space : mapping
        What is varied.
    objectives : int
        Numbers that a trial finds. All are minimised.
    asked : mapping
        What else determines the results.  A study of that name that was asked for something else is
        refused.

    Raises
    ------
    UsageError
        Optuna is not installed, the storage cannot be used, or the study is another one.
    """

    def __init__(
        self, name: str, storage: str, space: Space, objectives: int, asked: Mapping[str, Any]
    ) -> None:
        self._optuna, self._space = optuna_for("tune"), space
        self.name = name
        wanted = {key: str(value) for key, value in sorted(asked.items())}
        wanted |= {f"range of {each}": kind.text for each, kind in space.items()}
        self._storage = storage
        with self._keeping():
            self._study = self._optuna.create_study(
                study_name=name, directions=["minimize"] * objectives, load_if_exists=True,
                storage=self._database(storage) if storage else None,
            )  # fmt: skip
            if _ASKED not in self._study.user_attrs:
                self._study.set_user_attr(_ASKED, json.dumps(wanted))
            before = json.loads(self._study.user_attrs[_ASKED])
        if before != wanted:
            keys = sorted(key for key in {*before, *wanted} if before.get(key) != wanted.get(key))
            raise UsageError(
                f"study {name} in {shown(storage)} was asked for another {keys[0]} "
                f"({before.get(keys[0], 'none')}, not {wanted.get(keys[0], 'none')}): choose "
                "another --study, or ask the same"
            )

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Say in one line what the database refuses."""
        try:
            yield
        except ArborsimError:
            raise
        except Exception as error:  # of SQLAlchemy, its drivers and Optuna: of no common class
            told = (getattr(each, "orig", None) for each in (error, error.__cause__))
            cause = next(filter(None, told), error)  # what the driver says, without statements
            said = shown(" ".join(str(cause).split()))[:160] or type(cause).__name__
            todo = (
                "make room, or name another"
                if "full" in said
                else ("give the URL of a database, such as sqlite:///study.sqlite")
            )
            raise UsageError(
                f"--storage {shown(self._storage)}: the study cannot be kept there ({said}): {todo}"
            ) from None

    def _database(self, url: str) -> Any:
        # Several processes write to one file: they wait for each other.
        options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
        return self._optuna.storages.RDBStorage(url, engine_kwargs=options)

    def ended(self) -> list[Ended]:
        """Trials that have ended, in the order in which they began.

        Those that a process was killed in are left out: what they tried is tried again.
        """
        done = self._optuna.trial.TrialState
        found = []
        with self._keeping():
            trials = self._study.get_trials(deepcopy=False, states=(done.COMPLETE, done.FAIL))
        for trial in trials:
            about = trial.user_attrs
            if trial.state is done.COMPLETE:
                found.append(Ended(about[_VALUES], tuple(trial.values)))
            elif _REASON in about:
                found.append(Ended(about[_VALUES], reason=about[_REASON]))
        return found

    def run(
        self,
        measure: Callable[[Values], Sequence[float]],
        trials: int,
        *,
        first: Values,
        seed: int,
        worker: int = 0,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> list[Ended]:
        """Try settings until `trials` have ended, those of earlier runs and other workers included.

        Parameters
        ----------
        measure : callable
            What values of the space find. An `ArborsimError` says why they cannot run.
        first : dict
            What is tried first. What lies outside of the space is moved to its edge.
        seed, worker : int
            Of what is proposed.  Workers with the same number would try the same.
        """
        tpe = self._optuna.samplers.TPESampler
        while (done := len(self.ended())) < trials:
            on_progress(done)
            words = np.random.SeedSequence([seed, worker, done]).generate_state(1)
            sampler = tpe(seed=int(words[0]))
            if done == 0:
                start = {name: kind.nearest(first[name]) for name, kind in self._space.items()}
                with warnings.catch_warnings():  # it is marked as experimental
                    warnings.simplefilter("ignore")
                    sampler = self._optuna.samplers.PartialFixedSampler(start, sampler)
            self._study.sampler = sampler
            with self._keeping():
                trial = self._study.ask()
                values = {name: kind.propose(trial, name) for name, kind in self._space.items()}
                trial.set_user_attr(_VALUES, values)
            try:
                figures = [float(each) for each in measure(values)]
            except TraceError:
                raise  # whatever the settings
            except ArborsimError as error:
                with self._keeping():
                    trial.set_user_attr(_REASON, " ".join(str(error).split()))
                    self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                continue
            if not all(map(math.isfinite, figures)):
                raise UsageError(f"a trial found {figures}, not numbers: {values}")
            with self._keeping():
                self._study.tell(trial, figures)
        on_progress(done)
        return self.ended()
