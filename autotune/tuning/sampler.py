"""The Optuna study of a run, which samples configurations and keeps their results.

Optuna samples numbers on a logarithmic scale, snapped to the space's choices, so that their order counts; everything
else is categorical. A failed trial is reported as pruned: TPE ignores trials reported as failed, and would return to
the failing half of the space.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
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

from autotune.data.errors import RunDirectoryError
from autotune.data.models import KnobValue
from autotune.data.printable import first_line
from autotune.data.record import Outcome, Phase, TrialRecord
from autotune.space.changes import near
from autotune.space.configuration import Configuration
from autotune.space.space_file import ResolvedSpace
from autotune.stats.same_loss import log_examples

optuna.logging.set_verbosity(optuna.logging.ERROR)

WRITE_SECONDS = 0.05  # the most that Optuna takes to write a trial to a file
STARTUP_TRIALS = 10  # trials, all kinds included, before TPE's model is used: Optuna's own default


def distributions(space: ResolvedSpace) -> dict[str, BaseDistribution]:
    """Return the distribution from which Optuna samples each varied knob."""
    return {
        name: IntDistribution(min(choices), max(choices), log=True)
        if _ordered(choices)
        else CategoricalDistribution(choices)
        for name, choices in space.choices.items()
    }


def _ordered(choices: tuple[KnobValue, ...]) -> TypeGuard[tuple[int, ...]]:
    return len(choices) >= 3 and all(type(choice) is int and choice > 0 for choice in choices)


class _GridTPE(TPESampler):
    """TPE whose integers are snapped to the choices of a space."""

    def __init__(self, space: ResolvedSpace, seed: int, *, several: bool) -> None:
        # Trials on other seats count as bad until they end, so that they are not proposed again.
        super().__init__(n_startup_trials=STARTUP_TRIALS, multivariate=True, seed=seed, constant_liar=several)
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


def _connect(file: Path) -> optuna.storages.RDBStorage:
    """Open a study file. The kernel writes it out later: that outlives this process, and takes a tenth of the time."""
    # A path may hold characters that end a URL (?, #, %) or fill a template ({}): SQLite opens it, not SQLAlchemy.
    connect = partial(sqlite3.connect, file.absolute(), check_same_thread=False)
    storage = optuna.storages.RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect})
    sqlalchemy.event.listen(
        storage.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF")
    )
    storage.engine.dispose()  # the connections made so far wait for the disk
    return storage


def _new_study(file: Path, name: str) -> optuna.Study:
    """Make an empty study file, instead of any that is there."""
    file.unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of naming the metric
        study = optuna.create_study(storage=_connect(file), study_name=name, direction="maximize")
        study.set_metric_names(["speedup"])
    return study


@contextlib.contextmanager
def _writing(file: Path | None) -> Iterator[None]:
    """Turn the database's error about a full disk, a missing directory or a lock into ours."""
    # Raises RunDirectoryError.
    try:
        yield
    except (OSError, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = first_line(str(getattr(cause, "orig", None) or cause))
        raise RunDirectoryError(
            f"cannot write {file}: {reason}",
            hint="Finished trials stay readable. Free some space, or give --out another directory.",
        ) from error


class Sampler:
    """The Optuna study of one invocation. The run's `study.db` keeps all of it."""

    def __init__(
        self,
        space: ResolvedSpace,
        *,
        file: Path | None,
        name: str,
        seed: int,
        several: bool = False,
        over_critical: float = 0.0,
    ) -> None:
        self._space = space
        self._over_critical = over_critical  # see `Observations`: with it, values are speed-ups to the same loss
        self._file = file
        self._distributions = distributions(space)
        self._name = name
        with warnings.catch_warnings():
            # Multivariate TPE is marked experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = _GridTPE(space, seed, several=several)
            # In memory: samples that are not run stay out of the file, and asking takes a tenth of the time.
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._saved_study: optuna.Study | None = None
        if file is not None:
            with _writing(file):
                if file.exists():
                    with contextlib.suppress(Exception):  # it is damaged, of another version, or another study
                        self._saved_study = optuna.load_study(study_name=name, storage=_connect(file))
                self._saved_study = self._saved_study or _new_study(file, name)

    def catch_up(self, records: Iterable[TrialRecord], *, seconds: float = math.inf) -> None:
        """Tell a new study what was measured before, and for so many seconds add to its file what it lacks of that."""
        found = list(self._optuna_trials(records))
        self._study.add_trials(found)
        if self._file is None or self._saved_study is None:
            return
        with _writing(self._file):
            known = {trial.user_attrs.get("trial") for trial in _ended(self._saved_study)}
            if not known <= {trial.user_attrs["trial"] for trial in found}:  # it is not of these records
                self._saved_study, known = _new_study(self._file, self._name), set()
            # Optuna takes some 20 ms a trial: those in the file are not written again; the next invocation continues.
            ends = time.monotonic() + seconds
            for trial in found:
                if trial.user_attrs["trial"] not in known and time.monotonic() < ends:
                    self._saved_study.add_trial(trial)

    def write_again(self, records: Iterable[TrialRecord], *, seconds: float) -> None:
        """Rewrite the file if trials were measured again since, and if there is time."""
        if self._file is None or self._saved_study is None:
            return
        found = list(self._optuna_trials(records))
        with _writing(self._file):
            known = {trial.user_attrs["trial"]: (trial.state, trial.value) for trial in _ended(self._saved_study)}
            same = all(known.get(trial.user_attrs["trial"]) == (trial.state, trial.value) for trial in found)
            if not same and WRITE_SECONDS * len(found) < seconds:
                self._saved_study = _new_study(self._file, self._name)
                self._saved_study.add_trials(found)

    def _optuna_trials(self, records: Iterable[TrialRecord]) -> Iterator[FrozenTrial]:
        for record in records:
            configuration = Configuration(record.asked or record.configuration)
            if record.phase in (Phase.BASELINE, Phase.SEARCH) and configuration in self._space:
                yield self._optuna_trial(record, {name: configuration[name] for name in self._distributions})

    def _optuna_trial(self, record: TrialRecord, params: dict[str, Any]) -> FrozenTrial:
        """Return a trial as Optuna keeps it: with its speed-up if it was measured, pruned if it failed."""
        value = None if record.speedup is None else record.speedup.value / self._more_examples(record)
        if record.trial == 0 and record.outcome is Outcome.OK:
            value = 1.0
        state = TrialState.PRUNED
        if record.outcome is Outcome.OK and value is not None:
            state = TrialState.COMPLETE
        elif record.outcome is Outcome.INTERRUPTED:  # it tells nothing of its configuration
            state = TrialState.FAIL
        attributes: Mapping[str, object] = {
            "trial": record.trial,
            "phase": str(record.phase),
            "outcome": str(record.outcome),
            "reason": record.reason[:500],
            "throughput": None if record.throughput is None else record.throughput.value,
        }
        made = optuna.trial.create_trial(
            state=state,
            value=value if record.outcome in (Outcome.OK, Outcome.PRUNED) else None,
            params=params,
            distributions=self._distributions,
            user_attrs={name: attribute for name, attribute in attributes.items() if attribute not in (None, "")},
            intermediate_values={len(record.pairs): value}
            if record.outcome is Outcome.PRUNED and value is not None
            else None,
        )
        # Optuna's times are local ones without a zone.
        made.datetime_start = datetime.fromisoformat(record.started_at).astimezone().replace(tzinfo=None)
        made.datetime_complete = made.datetime_start + timedelta(seconds=record.seconds)
        return made

    def _more_examples(self, record: TrialRecord) -> float:
        """Return how many times the baseline's examples a trial's batch should need to the same loss."""
        ratio = Configuration(record.configuration).update_size / self._space.baseline.update_size
        return math.exp(log_examples(max(1.0, ratio), self._over_critical))

    def ask(self) -> tuple[Trial, Configuration]:
        """Sample the next configuration; return it and its Optuna trial."""
        trial = self._study.ask(self._distributions)
        return trial, self._space.configuration(trial.params)

    def ask_for(self, configuration: Configuration) -> Trial:
        """Return an Optuna trial of a given configuration, which must lie in the space."""
        self._study.enqueue_trial({name: configuration[name] for name in self._distributions})
        return self._study.ask(self._distributions)

    def skip_sample(self, trial: Trial) -> None:
        """Leave a sample out: its configuration is known, or there is no time for it."""
        self._study.tell(trial, state=TrialState.PRUNED)

    def tell(self, trial: Trial, record: TrialRecord) -> None:
        """Tell the study how a trial did; see `_optuna_trial`."""
        made = self._optuna_trial(record, trial.params)
        for name, attribute in made.user_attrs.items():
            trial.set_user_attr(name, attribute)
        for step, value in made.intermediate_values.items():
            trial.report(value, step=step)
        if made.state is TrialState.COMPLETE:
            self._study.tell(trial, made.value)
        else:
            self._study.tell(trial, state=made.state)
        if self._saved_study is not None:
            with _writing(self._file):
                self._saved_study.add_trial(made)


def _ended(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that ended; others are of an invocation that was interrupted."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state is not TrialState.FAIL]
