"""Choose the next configuration: neighbours of the fastest so far, the usually best first; then Optuna's samples.

Every proposal is a trial of the run's Optuna study, which gets its result. Optuna samples numbers on a logarithmic
scale, snapped to the space's choices, so that their order counts; everything else is categorical. A failed trial is
reported as pruned: TPE ignores trials reported as failed, and would return to the failing half of the space.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sqlite3
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from operator import itemgetter
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
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS
from autotune.space.probes import Situation, near
from autotune.space.space_file import ResolvedSpace
from autotune.tuning.costs import is_busy

optuna.logging.set_verbosity(optuna.logging.ERROR)

MOST_REPEATS = 5  # samples in a row that are known or passed over, before configurations are drawn at random
MOST_DRAWN = 4096  # configurations drawn at random; a smaller space is gone through whole
MOST_OF_OTHERS = 2  # values of a knob without probes, before the sampler has its turn
WAITS = 0.15  # share of its time waiting for input from which a pipeline's knobs are tried first
SHORT_STEP_SECONDS = 0.01  # a call into TensorFlow takes about 1 ms, which several steps may share
GAIN = 0.03  # from which on a change is taken along; the logarithm of a speed-up, as large as usual errors
MOST_JOINED = 3  # candidates whose changes are also added to the fastest one by one
WRITE_SECONDS = 0.05  # the most that Optuna takes to write a trial to a file
RANDOM_TRIALS = 10  # trials, probes included, before TPE's model is used: Optuna's own default

Changes = dict[str, KnobValue]


@dataclass(frozen=True, kw_only=True)
class Others:
    """The trials known besides the fastest if several seats search: too few have ended to continue step by step."""

    running: Sequence[Configuration]  # the latest last
    ratios: Mapping[Configuration, float]  # logarithms of the speed-ups that were measured, the baseline's included


def has_short_steps(record: TrialRecord) -> bool:
    """Return whether a call into TensorFlow takes much of a step."""
    steps = [measured.step_seconds.p50 for measured in record.slices]
    return not steps or statistics.median(steps) <= SHORT_STEP_SECONDS


def waits_for_input(best: TrialRecord, others: Sequence[TrialRecord]) -> bool:
    """Return whether the fastest trial waits for input; if that was not measured, whether the latest other does."""
    known = [trial.input_wait_fraction for trial in (best, *reversed(others)) if trial.input_wait_fraction is not None]
    return known[0] > WAITS if known else not is_busy(best.slices)


class Proposals:
    """Proposes configurations that were not tried.

    Args:
        space: The search space.
        sampler: The run's Optuna study.
        first: Configurations of the space that are proposed before all others.
    """

    def __init__(self, space: ResolvedSpace, sampler: Sampler, *, first: Sequence[Configuration] = ()) -> None:
        self._space = space
        self._sampler = sampler
        self._leaders = first  # of earlier runs
        self._begun: dict[Configuration, Configuration] = {}  # the fastest, when each was proposed
        self.exhausted = self.nothing_fits = False  # nothing new is left, or nothing new fits into the time

    def next(
        self,
        tried: Collection[Configuration],
        best: Configuration,
        *,
        waits: bool = False,
        short_steps: bool = True,
        passes_over: Callable[[Configuration], bool] = lambda configuration: False,
        others: Others | None = None,
    ) -> tuple[Trial, Configuration] | None:
        """Return the next configuration and its Optuna trial; None where nothing new is left."""
        if len(tried) >= self._space.size:
            self.exhausted = True
            return None
        beginning = others.running[-1] if others and others.running else best  # taken to become the fastest
        near = neighbours(beginning, tried, self._space, waits=waits, short_steps=short_steps)
        if others is not None:
            near = [joined for joined in self._joined(best, others.ratios) if joined in self._space] + near
        proposed = self._first([*self._leaders, *near], tried, passes_over)
        if proposed is not None:
            self._begun[proposed[1]] = best
        return proposed

    def _first(
        self,
        near: Iterable[Configuration],
        tried: Collection[Configuration],
        passes_over: Callable[[Configuration], bool],
    ) -> tuple[Trial, Configuration] | None:
        """Propose the first new one of these, else the sampler's, else one drawn at random."""
        for configuration in near:
            if configuration not in tried and not passes_over(configuration):
                return self._sampler.ask_for(configuration), configuration
        for _ in range(MOST_REPEATS):
            asked, configuration = self._sampler.ask()
            if configuration not in tried and not passes_over(configuration):
                return asked, configuration
            self._sampler.pass_over(asked)
        untried = False
        for configuration in self._drawn(len(tried)):
            if configuration not in tried:
                untried = True
                if not passes_over(configuration):
                    return self._sampler.ask_for(configuration), configuration
        self.exhausted = not untried and self._space.size <= MOST_DRAWN
        self.nothing_fits = not self.exhausted
        return None

    def _joined(self, best: Configuration, ratios: Mapping[Configuration, float]) -> list[Configuration]:
        """Add to the fastest all changes that made others faster than the fastest before them; and some of them."""
        gains: list[tuple[float, Changes]] = []
        for configuration, ratio in ratios.items():
            before = self._begun.get(configuration)
            if before is None or before not in ratios or ratio - ratios[before] <= GAIN:
                continue
            changed = configuration.differences(before)
            changes = {knob: configuration[knob] for knob in changed if configuration[knob] != best[knob]}
            if changes:
                gains.append((ratio - ratios[before], changes))
        gains.sort(key=itemgetter(0))
        everything = {name: value for _, changes in gains for name, value in changes.items()}
        some = [changes for _, changes in gains[: -MOST_JOINED - 1 : -1]]
        return [self._space.canonical(best.replace(**changes)) for changes in (everything, *some)]

    def _drawn(self, seed: int) -> Iterator[Configuration]:
        """Draw configurations at random: the whole space where it is small."""
        draw, choices = random.Random(seed), self._space.choices
        if self._space.size <= MOST_DRAWN:
            every = list(itertools.product(*choices.values()))
            draw.shuffle(every)
        else:
            every = [tuple(draw.choice(values) for values in choices.values()) for _ in range(MOST_DRAWN)]
        for values in every:
            yield self._space.configuration(dict(zip(choices, values, strict=True)))


def neighbours(
    best: Configuration,
    tried: Collection[Configuration],
    space: ResolvedSpace,
    *,
    waits: bool = False,
    short_steps: bool = True,
) -> list[Configuration]:
    """Return the untried neighbours of the fastest configuration, the most promising first."""
    # A change that was tried anywhere before comes after those that were not.
    now = Situation(at_first=best == space.baseline, waits_for_input=waits, short_steps=short_steps)
    known = {item for configuration in (space.baseline, *tried) for item in configuration.items()}
    found: dict[Configuration, bool] = {}  # and whether each of its changes was tried before
    for changes in _changes(best, space, now):
        configuration = space.canonical(best.replace(**changes))
        if configuration not in tried:
            found.setdefault(configuration, changes.items() <= known)
    return sorted(found, key=found.__getitem__)


def _changes(best: Configuration, space: ResolvedSpace, now: Situation) -> Iterator[Changes]:
    """Yield the changes of the knobs' probes, in their order; then a few values of each knob without probes."""
    placed = [
        (place, {knob.name: probe.to, **probe.together})
        for knob in KNOBS.values()
        for probe in knob.probes
        if (place := probe.place(now)) is not None
    ]
    for _, picks in sorted(placed, key=itemgetter(0)):
        wanted = {name: pick(space.choices[name], best[name]) for name, pick in picks.items() if name in space.choices}
        changes = {name: value for name, value in wanted.items() if value is not None}
        if changes:
            yield changes
    for name, choices in space.choices.items():
        if not KNOBS[name].probes:
            others = [value for value in choices if value != best[name]]
            yield from ({name: value} for value in others[:MOST_OF_OTHERS])


def distributions(space: ResolvedSpace) -> dict[str, BaseDistribution]:
    """Return what Optuna samples each varied knob from."""
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


def _journal_of(file: Path) -> Path:
    return file.with_name(f"{file.name}-journal")


def _new_study(file: Path, name: str) -> optuna.Study:
    """Make an empty study file, instead of any that is there."""
    for path in (file, _journal_of(file)):
        path.unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of naming the metric
        study = optuna.create_study(storage=_connect(file), study_name=name, direction="maximize")
        study.set_metric_names(["speedup"])
    return study


def _study_in(file: Path, name: str) -> optuna.Study:
    """Open the study that an earlier invocation left, or make an empty one."""
    # A journal is not rolled back: SQLite would delete the file that somebody else's names.
    if file.exists() and not _journal_of(file).exists():
        with contextlib.suppress(Exception):  # it is damaged, of another version, or another study
            return optuna.load_study(study_name=name, storage=_connect(file))
    return _new_study(file, name)


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

    def __init__(self, space: ResolvedSpace, *, file: Path | None, name: str, seed: int, several: bool = False) -> None:
        self._space = space
        self._file = file
        self._distributions = distributions(space)
        self._name = name
        with warnings.catch_warnings():
            # Multivariate TPE is marked experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = _GridTPE(space, seed, several=several)
            # In memory: what is asked and not run stays out of the file, and asking takes a tenth of the time.
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._saved_study: optuna.Study | None = None
        if file is not None:
            with _writing(file):
                self._saved_study = _study_in(file, name)

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
        value = None if record.speedup is None else record.speedup.value
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

    def ask(self) -> tuple[Trial, Configuration]:
        """Sample the next configuration; return it and its Optuna trial."""
        trial = self._study.ask(self._distributions)
        return trial, self._space.configuration(trial.params)

    def ask_for(self, configuration: Configuration) -> Trial:
        """Return an Optuna trial of a given configuration, which must lie in the space."""
        self._study.enqueue_trial({name: configuration[name] for name in self._distributions})
        return self._study.ask(self._distributions)

    def pass_over(self, trial: Trial) -> None:
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
