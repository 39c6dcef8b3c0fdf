"""Runs as tables in pandas: a row per trial, slice, or operation of a profile; or per run, to compare. CSV and Parquet.

Columns have their dtypes whatever the rows hold: tables can be put together, and an empty one behaves like a full one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.extensions import ExtensionDtype

from autotune.data.errors import RecipeError
from autotune.data.figures import Interval
from autotune.data.files import write_atomically
from autotune.data.models import KnobValue
from autotune.data.printable import one_line
from autotune.data.record import Outcome, Pair, Phase, Slice, Standing, TrialRecord, reference_of
from autotune.data.run_directory import Paths, RunDirectory, RunRecord, find_runs, parse_utc
from autotune.recipe.answer import kind_of
from autotune.recipe.recipe import Recipe, holds_recipes, read_recipes
from autotune.space.configuration import Configuration, baseline_of, read_trials
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import Stop
from autotune.stats.disturbance import gpu_figures
from autotune.stats.intervals import overall_rate
from autotune.stats.ratios import recorded_rate
from autotune.stats.same_loss import ExamplesNeeded, examples_needed

AUTOTUNE = -1  # stands for the word `autotune` among numbers, as `tf.data.AUTOTUNE` does
STRING, INTEGER, FLOAT, BOOLEAN = pd.StringDtype(), pd.Int64Dtype(), pd.Float64Dtype(), pd.BooleanDtype()
TIME = pd.DatetimeTZDtype("us", "UTC")


def typed(dtype: ExtensionDtype, names: str) -> dict[str, ExtensionDtype]:
    """Return columns of one dtype, by their names."""
    return dict.fromkeys(names.split(), dtype)


def table(rows: Sequence[Mapping[str, object]], columns: Mapping[str, ExtensionDtype]) -> pd.DataFrame:
    """Return a table of just these columns; what a row lacks, or is None, is NA."""
    return pd.DataFrame(
        {name: pd.Series([row.get(name) for row in rows], dtype=dtype) for name, dtype in columns.items()}
    )


_FIRST = typed(STRING, "run") | typed(INTEGER, "trial")
_FIRST["phase"], _FIRST["outcome"] = (
    pd.CategoricalDtype([str(member) for member in kind]) for kind in (Phase, Outcome)
)
_FIRST |= typed(BOOLEAN, "confirmed duplicate") | typed(STRING, "configuration_id changes answer")
_FIRST |= typed(BOOLEAN, "recommended") | typed(STRING, "headline")
_OF_GPU = typed(
    FLOAT, "joules_per_sample gpu_power_watts gpu_utilisation gpu_sm_clock_share gpu_temperature gpu_slowed_share"
)
_FIGURES = (
    typed(FLOAT, "throughput baseline_throughput speedup speedup_low speedup_high same_loss_speedup examples_factor")
    | typed(STRING, "learning_rate_rule left_out")
    | typed(FLOAT, "gain gain_low gain_high")
    | typed(FLOAT, "compile_seconds warmup_seconds")
    | typed(INTEGER, "warmup_steps")
    | typed(BOOLEAN, "settled")
    | typed(FLOAT, "measured_seconds loss")
    | typed(pd.CategoricalDtype([str(stop) for stop in Stop]), "stopped_by")
    | typed(FLOAT, "first_step_seconds filling_seconds epoch_overhead_seconds")
    | typed(INTEGER, "peak_host_bytes peak_device_bytes")
    | typed(FLOAT, "input_wait_fraction cpu_utilisation page_faults_per_step")
    | _OF_GPU
    | typed(STRING, "bottleneck")
    | typed(FLOAT, "bottleneck_share ceiling_input ceiling_compute scaling_efficiency")
    | typed(TIME, "started_at")
    | typed(FLOAT, "seconds")
    | typed(STRING, "seat host device machine workload objective reason")
)
_OF_SOME_DEVICES = (*_OF_GPU, "peak_device_bytes", "scaling_efficiency")


def columns() -> dict[str, ExtensionDtype]:
    """Return all columns of the table in order, each with its dtype; every knob has one."""
    domains = {knob.name: knob.domain for knob in KNOBS.values()}  # words beside numbers or booleans make no text
    numbers = {name: STRING if domain.integers is None else INTEGER for name, domain in domains.items()}
    return _FIRST | numbers | {name: BOOLEAN for name, domain in domains.items() if domain.booleans} | _FIGURES


def load_history(*runs: Paths, every_column: bool = False) -> pd.DataFrame:
    """Load one row per trial of one run or many, failed and pruned trials included.

    Args:
        runs: Run directories, or directories that hold some at any depth, such as `results`; also as one list.
        every_column: Keep the knobs that no trial has, and figures of devices that none ran on.

    Returns:
        The columns of `columns()`, in that order, rows by run and then by trial; times in seconds, sizes in bytes,
        rates in samples per second. `machine` is the machine's id; text is one line. NA are a knob that the trial's
        device does not have, the `reason` of a trial that ended well, and figures that were not measured.

        `changes` is how the configuration differs from the run's baseline; equal ones have the same
        `configuration_id`. `confirmed` is true for a speed-up that fresh processes have shown: of the others the
        luckiest look best. `duplicate` is true where another row of the run says more about the same configuration,
        such as its confirmation. `loss` is the training loss when the trial ended.

        `answer` is `same training`, `larger batch` (or `smaller batch`) or `baseline` for the trials that the recipe's
        answers and its baseline rest on, and `headline` their figure with its interval and unit. `recommended` is true
        for the trial that the recipe recommends, and NA without a recipe.

        Knobs filter by their values: `frame[frame.jit_compile]`, `frame[frame.prefetch == 2]`. Among numbers,
        `autotune` is -1, as `tf.data.AUTOTUNE` is. Words that leave the choice to Keras or to the script (`auto`,
        `as_written`) are NA there; `changes` has them.

        `bottleneck` is what limits the trial and `bottleneck_share` the figure that it rests on; the ceilings are
        what input and step reach alone. `scaling_efficiency` is the throughput over replicas times one device's.

        Power and `joules_per_sample` are of all the trial's GPUs, `gpu_utilisation` and `gpu_sm_clock_share` (of the
        highest clock) means over its slices, `gpu_temperature` the highest in °C, and `gpu_slowed_share` the share of
        slices in which heat, power or hardware held the clocks down. They are NA without a GPU, and where NVML does not
        tell. With `objective` "energy" a speed-up is a ratio of samples per joule.

        A trial's speed-up is over `baseline_throughput`: the baseline's slices in turn with its own, which are slower
        than the baseline alone. Throughputs of two rows were measured at other times and tell less than speed-ups.

        `examples_factor` is the examples that a leader with another batch size needs to the baseline's losses, over the
        baseline's, with the learning rate scaled by `learning_rate_rule`. `same_loss_speedup` is its speed-up over that
        factor: how much sooner it reaches those losses. They are NA where this was not measured with this trial.

        Trials of the phase `ablation` are a confirmed leader without its change of the knob `left_out`, and that leader
        itself beside them. `gain` is what the change gives: the leader's speed over the speed without it. They have no
        `speedup`, and claim nothing.

    Raises:
        RunDirectoryError: Nothing was given, no run was found at a path, or a file there is damaged.
    """
    rows: list[dict[str, object]] = []
    for directory in find_runs(*runs):
        run = directory.read_run()
        records = sorted(read_trials(directory), key=lambda record: record.trial)
        answers = _find_answers(directory, records)
        baseline, duplicates = baseline_of(directory, run, records), _find_duplicates(records, answers)
        of_run = {
            "run": directory.label,
            "machine": run.machine.id,
            "workload": one_line(run.workload.name) if run.workload else None,
            "objective": one_line(run.arguments.get("objective", "throughput")),
        }
        for record in records:
            row = _row(record, directory, reference_of(record, records), baseline)
            rows.append({**row, **of_run, "duplicate": record.trial in duplicates, **answers.get(record.trial, {})})
            if answers:
                rows[-1].setdefault("recommended", False)
    frame = table(rows, columns())
    if every_column or not rows:
        return frame
    missing = [name for name in KNOBS if not any(name in row for row in rows)]
    return frame.drop(columns=missing + [name for name in _OF_SOME_DEVICES if frame[name].isna().all()])


def _find_answers(directory: RunDirectory, records: Sequence[TrialRecord]) -> dict[int, dict[str, object]]:
    """Return the recipe's columns of trials: both answers' and the baseline's; nothing without a recipe."""
    try:
        recipe = Recipe.load(directory.recipe_file)
    except RecipeError:
        return {}
    answer, baseline = recipe.answer, Configuration(recipe.baseline)

    def trial_of(configuration: Mapping[str, KnobValue], speedup: Interval) -> int | None:
        same = [record for record in records if record.configuration == configuration and record.speedup]
        same.sort(key=lambda record: (record.speedup == speedup, record.phase is Phase.CONFIRM))
        return same[-1].trial if same else None

    reference = next(iter(recipe.evidence.confirmation.trials if recipe.changes else ()), 0)
    at_baseline = f"{answer.baseline.throughput.shown('', ',.0f')} {answer.samples}/s"
    found: dict[int | None, dict[str, object]] = {reference: {"answer": "baseline", "headline": at_baseline}}
    figures = {choice.kind: choice.said[0] for choice in answer.choices}
    for best in (recipe.same_training, recipe.larger_batch):
        if best is not None:
            kind = kind_of(Configuration(best.configuration), baseline)
            headline = figures.get(kind, answer.headline)
            found[trial_of(best.configuration, best.speedup)] = {"answer": kind, "headline": headline}
    recommended = trial_of(recipe.configuration, recipe.evidence.speedup) if recipe.changes else reference
    found[recommended] = {"answer": answer.recommended, "recommended": True, "headline": answer.headline}
    return {trial: known for trial, known in found.items() if trial is not None}


def _find_duplicates(records: Sequence[TrialRecord], answers: Collection[int]) -> Collection[int]:
    """Return the trials of a configuration of which another trial says more: its confirmation, or a later success."""

    def evidence(record: TrialRecord) -> tuple[bool, bool, bool, bool, int]:
        is_leader = record.phase is Phase.CONFIRM and (bool(record.looks) or record.speedup is not None)
        is_first_look = record.phase in (Phase.BASELINE, Phase.SEARCH)
        return record.trial in answers, is_leader, record.outcome.measured, is_first_look, record.trial

    best = {Configuration(record.configuration).id: record.trial for record in sorted(records, key=evidence)}
    return {record.trial for record in records} - set(best.values())


_OF_RECORD = [name for name in (*_FIRST, *_FIGURES) if name in TrialRecord.model_fields or hasattr(TrialRecord, name)]


def _row(
    record: TrialRecord, directory: RunDirectory, reference: TrialRecord, baseline: Configuration | None
) -> dict[str, object]:
    """Return a trial as a row; None is NA. A column that no line here names is the record's field."""
    file = directory.trial_directory(record.trial) / "result.json"
    limit, top = record.bottleneck, record.ceilings
    configuration, knobs = Configuration(record.configuration), dict[str, KnobValue | None]()
    for name, value in configuration.items():
        domain = KNOBS[name].domain
        is_word = isinstance(value, str) and (domain.booleans or domain.integers is not None)
        knobs[name] = value if not is_word else AUTOTUNE if value == "autotune" else None
    rates = [(recorded_rate(pair.baseline, reference), pair.baseline.examples) for pair in record.pairs]
    return {
        **{name: getattr(record, name) for name in _OF_RECORD},
        **gpu_figures(record),
        **knobs,
        "configuration_id": configuration.id,
        "changes": configuration.describe(relative_to=baseline),
        "confirmed": bool(record.looks) and record.looks[-1].standing is Standing.CONFIRMED,
        "loss": record.last_loss,
        "throughput": record.throughput.value if record.throughput else None,
        "baseline_throughput": overall_rate(rates) if rates else None,
        **_bounds("speedup", record.speedup),
        **_learning(record),
        "left_out": record.ablation.knob if record.ablation else None,
        **_bounds("gain", record.ablation.gain if record.ablation else None),
        "bottleneck": limit.name if limit else None,
        "bottleneck_share": limit.share if limit else None,
        "ceiling_input": top.by_input if top else None,
        "ceiling_compute": top.by_compute if top else None,
        "measured_seconds": record.measured_seconds if record.pairs or record.slices else None,
        "started_at": parse_utc(record.started_at, file),
        # One line, so that a row stays one line in CSV: some readers end a row at a bare carriage return.
        "reason": one_line(" ".join(record.reason.split())) or None,
    }


def _learning(record: TrialRecord) -> dict[str, object]:
    """Return how a leader with another batch size learns; nothing where that was not measured with it."""
    needed = None if record.branch is None or record.branch.not_measured else examples_needed(record.branch)
    factor = needed.log_ratio.ratio if isinstance(needed, ExamplesNeeded) else None
    if not isinstance(needed, ExamplesNeeded) or factor is None:
        return {}
    return {
        "same_loss_speedup": record.speedup.value / factor.value if record.speedup else None,
        "examples_factor": factor.value,
        "learning_rate_rule": needed.rule,
    }


def _bounds(name: str, figure: Interval | None) -> dict[str, object]:
    """Return the columns of a figure and its interval."""
    if figure is None:
        return {name: None}
    return {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table's rows as dictionaries; None for NA."""
    known = frame.astype(object).where(frame.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in known.to_dict("records")]


_SLICES = {"run": STRING, "trial": INTEGER, "side": STRING, "instance": INTEGER} | typed(FLOAT, "at seconds")
_SLICES |= typed(INTEGER, "steps examples epochs") | typed(FLOAT, "throughput cpu_seconds loss")
_SLICES["disturbed"] = BOOLEAN
_OPERATIONS = {"run": STRING, "trial": INTEGER} | typed(STRING, "operation kind on")
_OPERATIONS |= typed(INTEGER, "count") | typed(FLOAT, "self_seconds share")


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
            for side, paired, measured in sides:
                values = {name: getattr(measured, name, None) for name in _SLICES} | {"run": run, "side": side}
                if paired is not None:
                    values |= {"instance": paired.instance, "disturbed": paired.disturbed}
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


_FORMULA = re.compile(r"^(?:[=@\t\r]|[+-](?!\d*\.?\d+$))")  # a plain number is none


def write_csv(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the table as CSV, whole or not at all: NA as an empty field, booleans as `true` and `false`.

    Text that a spreadsheet would read as a formula gets a leading apostrophe, which `read_csv` keeps.

    `read_csv` restores the table with `keep_default_na=False, na_values=[""]`, `parse_dates=["started_at"]` and, as
    `dtype`, the other columns of `columns()`; under pandas 2 its `astype(columns())` has the unit of `started_at` as
    well. Without the first two it takes a workload called "NA" or "None" for NA.
    """
    booleans = [name for name in frame.columns if pd.api.types.is_bool_dtype(frame[name].dtype)]
    words = {name: frame[name].astype(STRING).str.lower() for name in booleans}
    for name in frame.columns:
        if frame[name].dtype == STRING:  # a script's name or a reason, which others have written
            words[name] = frame[name].str.replace(_FORMULA, r"'\g<0>", regex=True)
    if "started_at" in frame:  # pandas 2 leaves a fraction of zero out, and reads dates of one form only
        words["started_at"] = frame["started_at"].dt.strftime("%Y-%m-%d %H:%M:%S.%f+00:00")
    write_atomically(Path(path), frame.assign(**words).to_csv(index=False))


def write_parquet(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the table as Parquet, whole or not at all. A table without rows loses its categories."""
    write_atomically(Path(path), frame.to_parquet(engine="pyarrow", index=False))


# ------------------------------------------------------------------------------------------------------ comparing runs


COLUMNS = (
    typed(STRING, "run workload machine verdict headline")
    | typed(FLOAT, "claim low high throughput baseline_throughput")
    | typed(STRING, "recommended limited_by")
    | typed(INTEGER, "trials")
    | typed(STRING, "differs")
)


def compare(*runs: Paths) -> pd.DataFrame:
    """Compare runs and recipes: what each found on which machine, and whether their speeds may be compared.

    Args:
        runs: Run directories, or directories that hold some at any depth, such as `results`; recipe files, and
            folders of them. Also as one list.

    Returns:
        A row for each run, in the order of the arguments, those found below one by path; then a row for each recipe
        file; of a folder of recipes, the newest of each kind of machine. `claim` is the speed-up over the run's own
        baseline with its interval `low` to `high`, of what `headline` says; `throughput` is the recommended
        configuration's, in samples per second, and `baseline_throughput` the baseline's; `limited_by` is what limits
        the baseline. `recommended` is described by its changes to the run's baseline.
        `differs` says why a row's speeds may not be compared with the first row's; it is empty where they may. What a
        run without a recipe lacks is NA.

    Raises:
        RunDirectoryError: Nothing was given, no run was found at a path, or a file there is damaged.
        RecipeError: A recipe cannot be read.
    """
    paths = [Path(path) for given in runs for path in ([given] if isinstance(given, str | os.PathLike) else given)]
    of_recipes = [path for path in paths if holds_recipes(path)]
    of_runs = [path for path in paths if path not in of_recipes]
    found: list[tuple[str, Recipe | RunRecord, int]] = []  # with the number of trials
    for directory in find_runs(of_runs) if of_runs or not of_recipes else ():
        if os.path.exists(directory.recipe_file):
            recipe = Recipe.load(directory.recipe_file)
            found.append((directory.label, recipe, recipe.created_by.trials))
        else:
            found.append((directory.label, directory.read_run(), len(directory.trial_numbers("result.json"))))
    recipes = [recipe for path in of_recipes for recipe in read_recipes(path).recipes]
    found += [(one_line(recipe.created_by.run), recipe, recipe.created_by.trials) for recipe in recipes]
    rows = [
        {
            "run": label,
            "workload": None if source.workload is None else one_line(source.workload.name),
            "machine": one_line(source.machine.describe()),
            **(_finding(source) if isinstance(source, Recipe) else {}),
            "trials": trials,
            "differs": _differences(found[0][1], source),
        }
        for label, source, trials in found
    ]
    return table(rows, COLUMNS)


def _finding(recipe: Recipe) -> dict[str, object]:
    """Return what only a run with a recipe has."""
    answer = recipe.answer
    return {
        "verdict": str(answer.verdict),
        "headline": one_line(answer.headline),
        "claim": answer.speedup.value,
        "low": answer.speedup.low,
        "high": answer.speedup.high,
        "throughput": answer.after.throughput.value,
        "baseline_throughput": answer.baseline.throughput.value,
        "recommended": Configuration(recipe.configuration).describe(Configuration(recipe.baseline)),
        "limited_by": recipe.evidence.baseline_limited_by,
    }


def _differences(first: Recipe | RunRecord, other: Recipe | RunRecord) -> str:
    """Say why the speeds of `other` may not be compared with those of `first`; empty where they may."""
    reasons = []
    if unlike := first.machine.unlike_facts(other.machine):
        facts = "; ".join(f"{label}: {found}, not {before}" for label, before, found in unlike)
        reasons.append(f"another machine ({facts})")
    objectives = [
        known.evidence.objective if isinstance(known, Recipe) else known.arguments.get("objective", "throughput")
        for known in (first, other)
    ]
    if objectives[0] != objectives[1]:
        reasons.append(f"another objective ({objectives[1]}, not {objectives[0]})")
    if other is first:
        pass
    elif first.workload is None or other.workload is None:
        reasons.append("the workload of one of the runs is not known")
    elif first.workload.name != other.workload.name:
        reasons.append(f"another workload ({other.workload.name}, not {first.workload.name})")
    elif first.workload.fingerprint != other.workload.fingerprint:
        reasons.append("the workload's code has changed")
    # A speed-up says nothing without what it is relative to. A run that ended early has no baseline.
    elif first.baseline and other.baseline and first.baseline != other.baseline:
        reasons.append("another baseline")
    return ", ".join(reasons)
