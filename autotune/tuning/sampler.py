"""The Optuna study of a run: asks for configurations, is told how they did.

Numbers are sampled on a logarithmic scale and snapped to the space's choices, so that their order counts;
everything else is categorical. A failed trial is told as pruned: told as failed, TPE would ignore it and
walk back into the failing half of the space.
"""

from __future__ import annotations

import contextlib
import copy
import sqlite3
import warnings
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.errors import RunDirectoryError
from autotune.printable import first_line
from autotune.record import Outcome, Phase, TrialRecord
from autotune.space.configuration import Configuration
from autotune.space.knobs import KnobValue
from autotune.space.probes import near
from autotune.space.search_space import ResolvedSpace

optuna.logging.set_verbosity(optuna.logging.ERROR)

RANDOM_TRIALS = 10  # trials, probes included, before TPE's model is used: Optuna's own default


def distributions(space: ResolvedSpace) -> dict[str, BaseDistribution]:
    """What Optuna samples each varied knob from."""
    return {
        name: IntDistribution(min(choices), max(choices), log=True)
        if _ordered(choices)
        else CategoricalDistribution(choices)
        for name, choices in space.choices.items()
    }


def _ordered(choices: tuple[KnobValue, ...]) -> TypeGuard[tuple[int, ...]]:
    return len(choices) >= 3 and all(type(each) is int and each > 0 for each in choices)


class _GridTPE(TPESampler):
    """TPE whose integers are snapped to the choices of a space."""

    def __init__(self, space: ResolvedSpace, seed: int, *, several: bool) -> None:
        # What runs on other seats is taken for bad, so that it is not proposed again.
        super().__init__(n_startup_trials=RANDOM_TRIALS, multivariate=True, seed=seed, constant_liar=several)
        self._space = space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        sampled = super().sample_relative(study, trial, search_space)
        return {name: self._snap(name, value) for name, value in sampled.items()}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        sampled = super().sample_independent(study, trial, param_name, param_distribution)
        return self._snap(param_name, sampled)

    def _snap(self, name: str, value: Any) -> Any:
        choices = self._space.choices[name]
        return near(value)(choices, value) if _ordered(choices) else value


def _new_storage(file: Path) -> optuna.storages.RDBStorage:
    """An empty study file. Writes are left to the kernel: they outlive this process, and cost a tenth of the time."""
    for each in (file, file.with_name(f"{file.name}-journal")):
        each.unlink(missing_ok=True)
    # A path can hold what cuts a URL (?, #, %) or fills a template ({}), so SQLite opens it, not SQLAlchemy.
    connect = partial(sqlite3.connect, file.absolute(), check_same_thread=False)
    storage = optuna.storages.RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect})
    sqlalchemy.event.listen(
        storage.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF")
    )
    storage.engine.dispose()  # the connections made so far wait for the disk
    return storage


@contextlib.contextmanager
def _writing(file: Path | None) -> Iterator[None]:
    """What the database says about a full disk, a missing directory or a lock, as an error of ours."""
    # Raises RunDirectoryError.
    try:
        yield
    except (OSError, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = first_line(str(getattr(cause, "orig", None) or cause))
        raise RunDirectoryError(
            f"cannot write {file}: {reason}",
            hint="What was finished before stays readable. Free some space, or give --out another directory.",
        ) from error


class Sampler:
    """The Optuna study of one invocation. What it is told is kept in the run's `study.db`."""

    def __init__(self, space: ResolvedSpace, *, file: Path | None, name: str, seed: int, several: bool = False) -> None:
        self._space = space
        self._file = file
        self._distributions = distributions(space)
        with _writing(file), warnings.catch_warnings():
            # Multivariate TPE and naming the metric are marked experimental; the dashboard shows the name.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = _GridTPE(space, seed, several=several)
            # In memory: what is asked and not run stays out of the file, and asking takes a tenth of the time.
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
            self._kept: optuna.Study | None = None
            if file is not None:
                self._kept = optuna.create_study(storage=_new_storage(file), study_name=name, direction="maximize")
                self._kept.set_metric_names(["speedup"])

    def catch_up(self, records: Iterable[TrialRecord]) -> None:
        """Tell a new study what was measured before: the baseline, and the search of earlier invocations."""
        for record in records:
            configuration = Configuration(record.asked or record.configuration)
            if record.phase in (Phase.BASELINE, Phase.SEARCH) and configuration in self._space:
                self.tell(self.ask_for(configuration), record)

    def ask(self) -> tuple[Trial, Configuration]:
        """The next configuration to look at, and the Optuna trial to be told about it."""
        trial = self._study.ask(self._distributions)
        return trial, self._space.configuration(trial.params)

    def ask_for(self, configuration: Configuration) -> Trial:
        """An Optuna trial of a given configuration, which must lie in the space."""
        self._study.enqueue_trial({name: configuration[name] for name in self._distributions})
        return self._study.ask(self._distributions)

    def pass_over(self, trial: Trial) -> None:
        """Its configuration is not run: it is known, or the time does not hold it."""
        self._study.tell(trial, state=TrialState.PRUNED)

    def tell(self, trial: Trial, record: TrialRecord) -> None:
        """How the trial did: its speed-up when it was measured, pruned when it failed."""
        attributes: Mapping[str, object] = {
            "trial": record.trial,
            "phase": str(record.phase),
            "outcome": str(record.outcome),
            "reason": record.reason[:500],
            "throughput": None if record.throughput is None else record.throughput.value,
        }
        value = None if record.speedup is None else record.speedup.value
        if record.trial == 0 and record.outcome is Outcome.OK:
            value = 1.0
        for name, attribute in attributes.items():
            if attribute not in (None, ""):
                trial.set_user_attr(name, attribute)
        if record.outcome is Outcome.OK and value is not None:
            self._study.tell(trial, value)
        elif record.outcome is Outcome.INTERRUPTED:  # it tells nothing of its configuration
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            if record.outcome is Outcome.PRUNED and value is not None:
                trial.report(value, step=len(record.pairs))
            self._study.tell(trial, state=TrialState.PRUNED)
        if self._kept is not None:
            told = copy.copy(self._study.get_trials(deepcopy=False)[trial.number])
            # Optuna's times are local ones without a zone.
            told.datetime_start = datetime.fromisoformat(record.started_at).astimezone().replace(tzinfo=None)
            told.datetime_complete = told.datetime_start + timedelta(seconds=record.seconds)
            with _writing(self._file):
                self._kept.add_trial(told)
