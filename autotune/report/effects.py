"""Tables of a run: what each knob did, from trials that differ in it alone; its slices and operations in long form."""

from __future__ import annotations

import itertools
import math
import sqlite3
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import pandas as pd

from autotune.data.figures import Interval
from autotune.data.models import KnobValue
from autotune.data.record import Outcome, Pair, Phase, Slice, TrialRecord
from autotune.data.run_directory import RunDirectory
from autotune.data.runs_on_disk import Paths, find_runs
from autotune.report.history import BOOLEAN, FLOAT, INTEGER, STRING, table, typed
from autotune.space.configuration import Configuration, format_value, read_trials

_EFFECTS = typed(STRING, "run knob before after") | typed(FLOAT, "effect low high")
_EFFECTS |= typed(INTEGER, "pairs") | typed(FLOAT, "importance")
_SLICES = {"run": STRING, "trial": INTEGER, "side": STRING, "instance": INTEGER} | typed(FLOAT, "at seconds")
_SLICES |= typed(INTEGER, "steps examples epochs") | typed(FLOAT, "throughput cpu_seconds loss")
_SLICES["disturbed"] = BOOLEAN
_OPERATIONS = {"run": STRING, "trial": INTEGER} | typed(STRING, "operation kind on")
_OPERATIONS |= typed(INTEGER, "count") | typed(FLOAT, "self_seconds share")
_WIDTH = 1.96


def knob_effects(*runs: Paths) -> pd.DataFrame:
    """Estimate what changing one knob did to the speed, all others equal; arguments and errors as in `load_history`.

    Returns:
        A row for each run, knob, and pair of its values, the largest effects first. `effect` is the ratio of
        throughputs, `after` over `before`, of `pairs` pairs of trials that differ in this knob alone, weighted by
        their errors, with its 95% interval `low` to `high`. `importance` is the knob's share of the variance of
        speed-ups (Optuna's PED-ANOVA); NA where there are too few trials.
    """
    found: list[dict[str, Any]] = []
    for directory in find_runs(*runs):
        importances = _importances(directory)
        found += [
            {"run": directory.label, **effect, "importance": importances.get(effect["knob"])}
            for effect in effects_in(read_trials(directory))
        ]
    rows = sorted(found, key=lambda row: (row["run"], -abs(math.log(row["effect"]))))
    return table(rows, _EFFECTS)


def effects_in(records: Iterable[TrialRecord]) -> list[dict[str, Any]]:
    """Return the rows of `knob_effects` for one run, without the run and importances."""
    rows = []
    for (knob, before, after), ratios in _ratios(_measured(records)).items():
        weights = [1 / max(error, 1e-3) ** 2 for _, error in ratios]
        mean, error = statistics.fmean([ratio for ratio, _ in ratios], weights), _WIDTH / math.sqrt(sum(weights))
        changed = {"knob": knob, "before": before, "after": after}
        effect = {"effect": math.exp(mean), "low": math.exp(mean - error), "high": math.exp(mean + error)}
        rows.append({**changed, **effect, "pairs": len(ratios)})
    return rows


def load_slices(*runs: Paths) -> pd.DataFrame:
    """Load every timed slice of every trial, in long form; arguments and errors as in `load_history`.

    Returns:
        A row for each slice. `side` is `candidate`, `baseline` (beside it), or `alone`; `at` is when it was measured,
        in seconds of the run; `throughput` in samples per second; `disturbed` is NA for slices without a partner.
    """
    rows: list[dict[str, object]] = []
    for directory in find_runs(*runs):
        run = directory.label
        for record in read_trials(directory):
            sides: list[tuple[str, Pair | None, Slice]] = [("alone", None, measured) for measured in record.slices]
            for pair in record.pairs:
                sides += [("baseline", pair, pair.baseline), ("candidate", pair, pair.candidate)]
            for side, beside, measured in sides:
                values = {name: getattr(measured, name, None) for name in _SLICES} | {"run": run, "side": side}
                if beside is not None:
                    values |= {"instance": beside.instance, "disturbed": beside.disturbed}
                rows.append({**values, "trial": record.trial, "throughput": measured.examples / measured.seconds})
    return table(rows, _SLICES)


def load_ops(*runs: Paths) -> pd.DataFrame:
    """Load the operations of profiled trials that took most time; arguments and errors as in `load_history`.

    Returns:
        Ten rows a trial at most; with a GPU ten more, its kernels, whose kind is `kernel` or `tensor cores`.
        `self_seconds` are of all profiled steps, `share` is of all operations' or kernels' self time.
    """
    rows = [
        {
            "run": directory.label,
            "trial": record.trial,
            "operation": operation.name,
            **operation.model_dump(exclude={"name"}),
        }
        for directory in find_runs(*runs)
        for record in read_trials(directory)
        for operation in (() if record.profile is None else (*record.profile.operations, *record.profile.kernels))
    ]
    return table(rows, _OPERATIONS)


def _measured(records: Iterable[TrialRecord]) -> list[tuple[Configuration, Interval]]:
    """Return configurations with their speed-ups in the search; the baseline's is 1."""
    found: list[tuple[Configuration, Interval]] = []
    for record in records:
        if record.phase is Phase.BASELINE and record.outcome is Outcome.OK and not found:
            found.append((Configuration(record.configuration), Interval(value=1.0, low=1.0, high=1.0)))
        elif record.phase is Phase.SEARCH and record.outcome.measured and record.speedup is not None:
            found.append((Configuration(record.configuration), record.speedup))
    return found


Ratios = dict[tuple[str, str, str], list[tuple[float, float]]]


def _ratios(measured: Iterable[tuple[Configuration, Interval]]) -> Ratios:
    """Return log-ratios and their errors, by knob and by its two values, in a fixed order of these."""
    by_rest: dict[tuple[str, frozenset[object]], list[tuple[KnobValue, Interval]]] = defaultdict(list)
    for configuration, speedup in measured:
        values = {(name, type(value), value) for name, value in configuration.items()}
        for knob, kind, value in values if speedup.low > 0 else ():
            by_rest[knob, frozenset(values - {(knob, kind, value)})].append((value, speedup))
    found: Ratios = defaultdict(list)
    for (knob, _), tried in by_rest.items():
        for (a, before), (b, after) in itertools.combinations(tried, 2):
            first, second = format_value(a), format_value(b)
            if first == second:
                continue
            falls = a > b if type(a) is int and type(b) is int else first > second
            ratio = (-1 if falls else 1) * math.log(after.value / before.value)
            error = math.hypot(before.log.half_width, after.log.half_width) / _WIDTH
            found[(knob, second, first) if falls else (knob, first, second)].append((ratio, error))
    return found


def open_study_file(directory: RunDirectory) -> Any:
    """Open the study for reading alone: SQLite would otherwise delete the file that a foreign journal names."""
    import optuna

    uri = f"{directory.study_file.absolute().as_uri()}?mode=ro"  # a name may hold what ends a path in a URI
    connect = partial(sqlite3.connect, uri, uri=True, check_same_thread=False)
    return optuna.storages.RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect})


def _importances(directory: RunDirectory) -> dict[str, float]:
    """Return each knob's share of the variance, by Optuna; empty where that is not known."""
    if not directory.study_file.exists():
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            storage = open_study_file(directory)
            (name,) = [summary.study_name for summary in optuna.get_all_study_summaries(storage)]
            study = optuna.load_study(study_name=name, storage=storage)
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except Exception:  # too few trials, a study of another version, a file that is locked
        return {}
