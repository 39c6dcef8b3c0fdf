"""The Optuna study of a run: asks for configurations, is told how they did.

Numbers are sampled on a logarithmic scale and snapped to the space's choices, so that their order counts;
everything else is categorical. A failed trial is told as pruned: told as failed, TPE would ignore it and
walk back into the failing half of the space.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
from autotune.space.search_space import ResolvedSpace

optuna.logging.set_verbosity(optuna.logging.ERROR)

RANDOM_TRIALS = 10
"""Trials, probes included, before TPE's model is used: Optuna's own default."""
_FEWEST_ORDERED = 3


def distributions(space: ResolvedSpace) -> dict[str, BaseDistribution]:
    """What Optuna samples each varied knob from."""
    return {name: _distribution(choices) for name, choices in space.choices.items()}


def _distribution(choices: tuple[KnobValue, ...]) -> BaseDistribution:
    if _ordered(choices):
        numbers = [int(each) for each in choices]
        return IntDistribution(min(numbers), max(numbers), log=True)
    return CategoricalDistribution(choices)


def _ordered(choices: tuple[KnobValue, ...]) -> bool:
    return len(choices) >= _FEWEST_ORDERED and all(type(each) is int and each > 0 for each in choices)


class _GridTPE(TPESampler):
    """TPE whose integers are snapped to the choices of a space."""

    def __init__(self, space: ResolvedSpace, seed: int) -> None:
        super().__init__(n_startup_trials=RANDOM_TRIALS, multivariate=True, seed=seed)
        self._space = space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        sampled = super().sample_relative(study, trial, search_space)
        return {name: self._snap(name, value) for name, value in sampled.items()}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        sampled = super().sample_independent(study, trial, param_name, param_distribution)
        return self._snap(param_name, sampled)

    def _snap(self, name: str, value: Any) -> Any:
        choices = self._space.choices[name]
        if not _ordered(choices):
            return value
        return min(choices, key=lambda each: abs(math.log(int(each) / value)))


def _storage(file: Path) -> optuna.storages.RDBStorage:
    """The study's file. Writes are left to the kernel: they outlive this process, and cost a tenth of the time."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")

    def unhurried(connection: Any, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(storage.engine, "connect", unhurried)
    storage.engine.dispose()  # the connections made so far were hurried ones
    return storage


@contextlib.contextmanager
def _writing(file: Path | None) -> Iterator[None]:
    """What the database says about a full disk, a missing directory or a lock, as an error of ours.

    Raises:
        RunDirectoryError: The study's file cannot be written.
    """
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = first_line(str(getattr(cause, "orig", None) or cause))
        hint = "What was finished before stays readable. Free some space, or give --out another directory."
        if "not a database" in reason or "malformed" in reason:
            hint = "It is damaged. Take it away: --resume makes it anew, from what stands in trials/."
        raise RunDirectoryError(f"cannot write {file}: {reason}", hint=hint) from error


class Sampler:
    """The study of one run, kept in its `study.db`.

    Args:
        space: What is sampled.
        file: Path of the SQLite file, or None to keep the study in memory.
        name: The study's name, as optuna-dashboard shows it.
        seed: Makes the samples repeatable, given the same results.

    Raises:
        RunDirectoryError: From every method: the file cannot be written.
    """

    def __init__(self, space: ResolvedSpace, *, file: Path | None, name: str, seed: int) -> None:
        self._space = space
        self._file = file
        self._distributions = distributions(space)
        with _writing(file), warnings.catch_warnings():
            # Naming the metric is marked experimental since Optuna 3.2; the dashboard shows the name.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study = optuna.create_study(
                load_if_exists=True,  # a run that is resumed
                storage=None if file is None else _storage(file),
                study_name=name,
                direction="maximize",
                sampler=_GridTPE(space, seed),
            )
            self._study.set_metric_names(["speedup"])

    def catch_up(self, records: Iterable[TrialRecord]) -> None:
        """Tell the study what it was not told of: the baseline of a new run, the last trials of one that was stopped.

        Args:
            records: All that was measured. What the study holds as open is given up: it was in flight.
        """
        with _writing(self._file):
            for each in self._study.get_trials(deepcopy=False):
                if each.state is TrialState.RUNNING:
                    self._study.tell(each.number, state=TrialState.FAIL)
            while self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                self._study.tell(self._study.ask(), state=TrialState.FAIL)
            told = {
                each.user_attrs.get("trial")
                for each in self._study.get_trials(deepcopy=False)
                if each.state is not TrialState.FAIL  # given up between its attributes and its value
            }
        for record in records:
            configuration = Configuration(record.asked or record.configuration)
            of_search = record.phase in (Phase.BASELINE, Phase.SEARCH)
            if of_search and record.trial not in told and configuration in self._space:
                self.tell(self.ask_for(configuration), record)

    def ask(self) -> tuple[Trial, Configuration]:
        """The next configuration to look at, and the Optuna trial to be told about it."""
        with _writing(self._file):
            trial = self._study.ask(self._distributions)
        return trial, self._space.configuration(trial.params)

    def ask_for(self, configuration: Configuration) -> Trial:
        """An Optuna trial of a given configuration, which must lie in the space."""
        with _writing(self._file):
            self._study.enqueue_trial({name: configuration[name] for name in self._distributions})
            return self._study.ask(self._distributions)

    def pass_over(self, trial: Trial) -> None:
        """Its configuration is not run: the time does not hold it."""
        with _writing(self._file):
            self._study.tell(trial, state=TrialState.PRUNED)

    def tell(self, trial: Trial, record: TrialRecord) -> None:
        """How the trial did: its speed-up when it was measured, pruned when it failed."""
        with _writing(self._file):
            self._tell(trial, record)

    def _tell(self, trial: Trial, record: TrialRecord) -> None:
        attributes: Mapping[str, object] = {
            "trial": record.trial,
            "phase": str(record.phase),
            "outcome": str(record.outcome),
            "reason": record.reason[:500],
            "throughput": None if record.throughput is None else record.throughput.value,
        }
        for name, value in attributes.items():
            if value not in (None, ""):
                trial.set_user_attr(name, value)
        value = None if record.speedup is None else record.speedup.value
        if record.trial == 0 and record.outcome is Outcome.OK:
            value = 1.0
        if record.outcome is Outcome.OK and value is not None:
            self._study.tell(trial, value)
            return
        if record.outcome is Outcome.INTERRUPTED:
            self._study.tell(trial, state=TrialState.FAIL)  # it tells nothing of its configuration
            return
        if record.outcome is Outcome.PRUNED and value is not None:
            trial.report(value, step=len(record.pairs))
        self._study.tell(trial, state=TrialState.PRUNED)
