"""Run directories as a pandas table, as files, and side by side."""

import io
import json
import os
import re
import shutil

import factories
import pandas as pd
import pytest
import simulated_runs
from rich.console import Console
from simulated_runs import a_record

from autotune.data.errors import DamagedRunWarning, RecipeError, RunDirectoryError
from autotune.data.facts import Gpu
from autotune.data.figures import Interval
from autotune.data.record import (
    ContinuedTraining,
    InterimAnalysis,
    Outcome,
    Pair,
    Phase,
    Slice,
    Standing,
    StepSeconds,
    TrialRecord,
    reference_of,
)
from autotune.data.run_directory import RunDirectory, RunRecord, WorkloadRecord
from autotune.front.results import show_comparison, show_history
from autotune.recipe.evidence import RecipeWorkload
from autotune.report.history import columns, compare, load_history, write_csv, write_parquet
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import KNOBS, Device
from autotune.stats.deciding import Verdict

MACHINE = simulated_runs.MACHINE.model_copy(update={"cpu": "Xeon"})
WORKLOAD = WorkloadRecord(name="digits", reference="digits.py:workload", fingerprint="sha256:aa", batch_size=32)
BASELINE = {
    "batch_size": 32,
    "precision": "float32",
    "jit_compile": "auto",
    "prefetch": 0,
    "num_parallel_calls": 0,
    "deterministic": True,
    "onednn": True,
}
EVERY_KNOB = dict(baseline_configuration(32, {}, Device.CPU, where="test"))
FASTER = {**BASELINE, "batch_size": 256, "jit_compile": True, "prefetch": "autotune"}


# ------------------------------------------------------------------------------------------------- builder


def interval(value):
    """An estimate with an interval of ±10%."""
    return Interval(value=value, low=value * 0.9, high=value * 1.1)


def a_slice(seconds):
    """A slice that took `seconds`."""
    steps = StepSeconds(p50=0.1, p90=0.1, p99=0.1, max=0.1)
    return Slice(seconds=seconds, steps=10, examples=320, epochs=0, cpu_seconds=seconds, step_seconds=steps)


def a_trial(number, phase=Phase.SEARCH, outcome=Outcome.OK, configuration=FASTER, **figures):
    """A trial's record with no figures but those given."""
    moment = {"started_at": "2026-11-20T19:10:01.250+00:00", "seconds": 3.5}
    return TrialRecord(trial=number, phase=phase, outcome=outcome, configuration=configuration, **{**moment, **figures})


FULL = {
    "launch_seconds": 0.01,
    "first_step_seconds": 1.5,
    "filling_seconds": 0.75,
    "compile_seconds": 1.25,
    "warmup_seconds": 0.5,
    "warmup_steps": 45,
    "settled": False,
    "epoch_overhead_seconds": 0.05,
    "stopped_by": "behind",
    "throughput": interval(2000.0),
    "speedup": interval(2.0),
    "peak_host_bytes": 3 << 30,
    "peak_device_bytes": 1 << 40,
    "input_wait_fraction": 0.25,
    "cpu_utilisation": 1.75,
    "pairs": (Pair(baseline_first=True, baseline=a_slice(7.0), candidate=a_slice(0.5)),),
    "slices": (a_slice(0.25),),
}
BASELINE_TRIAL = a_trial(0, Phase.BASELINE, configuration=BASELINE, throughput=interval(1000.0), slices=(a_slice(2.0),))
TRIALS = (
    BASELINE_TRIAL,
    a_trial(1, **FULL),
    a_trial(2, outcome=Outcome.PRUNED, reason="cannot win any more", speedup=interval(0.5)),
    a_trial(3, outcome=Outcome.OOM, reason="killed:\r out of\nmemory"),
    a_trial(4, Phase.CONFIRM, speedup=interval(3.0), throughput=interval(3000.0)),
)


def a_run(path, trials=TRIALS, *, recipe=None, **fields):
    """A run directory with `trials`; `fields` replace those of its run.json."""
    directory = RunDirectory(path)
    directory.create()
    directory.release()
    record = {
        "run": path.name,
        "started_at": "2026-11-20T19:10:00+00:00",
        "machine": MACHINE,
        "workload": WORKLOAD,
        "baseline": BASELINE,
        "arguments": {},
    }
    directory.write_run(RunRecord(**{**record, **fields}))
    for trial in trials:
        directory.write_trial(trial)
    if recipe is not None:
        directory.recipe_file.write_text(recipe if isinstance(recipe, str) else recipe.to_json())
    return path


def a_recipe(verdict=Verdict.FASTER, speedup=(1.84, 1.79, 1.90), configuration=None):
    """A recipe that claims `speedup`, as value, low and high; by itself for a larger batch."""
    found = {
        "verdict": verdict,
        "excluded_gain": None if verdict is Verdict.FASTER else 0.05,
        "speedup": Interval(**dict(zip(("value", "low", "high"), speedup, strict=True))),
    }
    return factories.a_recipe(
        MACHINE,
        configuration=configuration or {**EVERY_KNOB, "batch_size": 512},
        baseline=EVERY_KNOB,
        workload=RecipeWorkload(name=WORKLOAD.name, fingerprint=WORKLOAD.fingerprint),
        evidence=found,
    )


@pytest.fixture
def run(tmp_path):
    """A run with one trial of each kind."""
    return a_run(tmp_path / "run-a")


def has_all_columns(frame):
    """Whether a table has the promised columns in order, each with its dtype."""
    return list(frame.dtypes.items()) == list(columns().items())


# --------------------------------------------------------------------------------------------- load_history


def test_a_table_has_the_same_columns_whatever_its_rows_hold(run, tmp_path):
    for frame in (load_history(run, every_column=True), load_history(a_run(tmp_path / "empty", ()))):
        assert has_all_columns(frame)
        assert list(frame.columns)[:4] == ["run", "trial", "phase", "outcome"]
        assert set(KNOBS) <= set(frame.columns)
    assert frame.empty


def test_counts_of_phases_and_outcomes_show_their_zeros(run):
    frame = load_history(run)
    for name, kind in (("phase", Phase), ("outcome", Outcome)):
        assert list(frame[name].cat.categories) == [str(member) for member in kind]
        assert not frame[name].cat.ordered
    assert frame["outcome"].value_counts()["timeout"] == 0


def test_every_trial_is_a_row_failed_and_pruned_included(run):
    frame = load_history(run)
    assert frame["trial"].tolist() == [0, 1, 2, 3, 4]
    assert frame["phase"].tolist() == ["baseline", "search", "search", "search", "confirm"]
    assert frame["outcome"].tolist() == ["ok", "ok", "pruned", "oom", "ok"]
    reasons = frame["reason"].astype(object).where(frame["reason"].notna(), None)
    assert reasons.tolist() == [None, None, "cannot win any more", "killed: out of memory", None]
    assert frame.loc[2, "speedup"] == 0.5


def test_how_a_leader_learns_has_columns_where_it_was_measured(tmp_path):
    own = tuple(tuple(0.9**probe for probe in range(1, 9)) for _ in range(4))
    slower = tuple(tuple(0.9 ** (probe / 1.5) for probe in range(1, 9)) for _ in range(4))
    branch = ContinuedTraining(
        after_steps=100, examples=8000, baseline=own, leader={"as is": ((),) * 4, "sqrt": slower}
    )
    leader = a_trial(5, Phase.CONFIRM, speedup=interval(3.0), branch=branch)
    unknown = a_trial(6, Phase.CONFIRM, speedup=interval(3.0), branch=ContinuedTraining(not_measured="no time"))
    frame = load_history(a_run(tmp_path / "run-a", (*TRIALS, leader, unknown))).set_index("trial")
    assert frame.loc[5, "examples_factor"] == pytest.approx(1.5, rel=0.01)
    assert frame.loc[5, "same_loss_speedup"] == pytest.approx(2.0, rel=0.01)
    assert frame.loc[5, "learning_rate_rule"] == "sqrt"
    figures = ["examples_factor", "same_loss_speedup", "learning_rate_rule"]
    assert frame.drop(index=5)[figures].isna().all(axis=None)


def test_figures_stand_under_their_names(run):
    row, record = load_history(run).loc[1], TRIALS[1]
    assert (row["run"], row["machine"], row["workload"]) == ("run-a", MACHINE.id, "digits")
    assert (row["throughput"], row["speedup"], row["speedup_low"], row["speedup_high"]) == (2000.0, 2.0, 1.8, 2.2)
    assert row["started_at"] == pd.Timestamp("2026-11-20T19:10:01.250Z")
    others = FULL.keys() & columns().keys() - {"throughput", "speedup"}
    assert {name: row[name] for name in others} == {name: getattr(record, name) for name in others}


def test_a_speed_up_is_over_the_baseline_beside_it(tmp_path):
    pairs = tuple(Pair(baseline_first=True, baseline=a_slice(0.8), candidate=a_slice(0.4)) for _ in range(3))
    alone = BASELINE_TRIAL.model_copy(update={"slices": (a_slice(0.3),), "throughput": interval(320 / 0.3)})
    beside = a_trial(1, pairs=pairs, throughput=interval(320 / 0.4), speedup=interval(2.0))
    frame = load_history(a_run(tmp_path / "run", (alone, beside)))
    first, second = frame.iloc[0], frame.iloc[1]
    assert second["throughput"] < first["throughput"]
    assert second["throughput"] / second["baseline_throughput"] == pytest.approx(second["speedup"])
    assert first["baseline_throughput"] is pd.NA


def test_baseline_throughput_includes_its_own_epoch_overhead(tmp_path):
    pairs = (Pair(baseline_first=True, baseline=a_slice(0.5), candidate=a_slice(0.5)),)
    alone = BASELINE_TRIAL.model_copy(update={"examples_per_epoch": 1000, "epoch_overhead_seconds": 1.0})
    beside = a_trial(1, pairs=pairs, examples_per_epoch=1000, epoch_overhead_seconds=9.0)
    frame = load_history(a_run(tmp_path / "run", (alone, beside)))
    examples = pairs[0].baseline.examples
    assert frame.iloc[1]["baseline_throughput"] == pytest.approx(1000 / (1000 * 0.5 / examples + 1.0))


def test_measured_seconds_leave_the_baselines_turns_out(run):
    assert load_history(run).loc[1, "measured_seconds"] == 0.75


def test_knobs_have_types_by_which_people_filter(run):
    row = load_history(run).loc[1]
    assert row["batch_size"] == 256
    assert row["precision"] == "float32"
    assert row["deterministic"] is True or row["deterministic"] == True  # noqa: E712
    assert (row["jit_compile"], row["prefetch"], row["num_parallel_calls"]) == (True, -1, 0)
    frame = load_history(run)
    assert frame[frame.jit_compile]["trial"].tolist() == [1, 2, 3, 4]
    assert frame[frame.prefetch == 0]["trial"].tolist() == [0]
    assert pd.isna(frame.loc[0, "jit_compile"]), "the choice is Keras's"
    assert frame.loc[1, "changes"] == "batch_size=256 jit_compile=true prefetch=autotune"


def test_what_was_not_measured_is_na(run):
    row = load_history(run).loc[3]
    known = {*list(columns())[:8], "started_at", "seconds", "machine", "workload", "objective", "reason"}
    assert {name for name in row.index if pd.notna(row[name])} == known | set(FASTER)


def test_what_limits_a_trial_stands_in_its_row(run):
    limit = {"name": "input", "share": 0.4, "why": "the step waits for input 40% of its time"}
    with_changes(run, bottleneck=limit, ceilings={"by_input": 400.0, "by_compute": None})
    row = load_history(run).loc[1]
    assert (row["bottleneck"], row["bottleneck_share"], row["ceiling_input"]) == ("input", 0.4, 400.0)
    assert pd.isna(row["ceiling_compute"])
    assert load_history(run)["bottleneck"].isna().sum() == len(load_history(run)) - 1


def test_rows_go_by_trial_number_beyond_four_digits(tmp_path):
    run = a_run(tmp_path / "run", [a_trial(10000), a_trial(9999)])
    assert load_history(run)["trial"].tolist() == [9999, 10000]


def test_times_of_other_zones_are_turned_to_utc(tmp_path):
    trials = [a_trial(0, started_at="2026-11-20T19:10:00+02:00"), a_trial(1, started_at="2026-11-20T17:10:00")]
    frame = load_history(a_run(tmp_path / "run", trials))
    assert (frame["started_at"] == pd.Timestamp("2026-11-20T17:10:00Z")).all()


def test_a_workload_that_was_never_known_is_na(tmp_path):
    run = a_run(tmp_path / "run", TRIALS[:1], workload=None)
    assert load_history(run)["workload"].isna().all()


def test_several_runs_stand_below_each_other(tmp_path):
    first = a_run(tmp_path / "z", TRIALS[:2])
    second = a_run(tmp_path / "a", TRIALS[:3], machine=MACHINE.model_copy(update={"cores": 4}))
    frame = load_history(first, str(second), every_column=True)
    assert frame["run"].tolist() == ["z", "z", "a", "a", "a"]
    assert frame["machine"].nunique() == 2
    assert frame.index.tolist() == [0, 1, 2, 3, 4]
    assert has_all_columns(frame)


def test_a_results_tree_stands_for_all_runs_in_it(tmp_path):
    for name in ("mlp/4", "cnn/2", "mlp/6", "cnn/1", "mlp/5", "cnn/3"):
        a_run(tmp_path / "results" / name, TRIALS[:1])
    (tmp_path / "results" / "README.md").write_text("What each run shows.")
    assert load_history(tmp_path / "results")["run"].tolist() == ["1", "2", "3", "4", "5", "6"]
    assert load_history(tmp_path / "results" / "mlp")["run"].tolist() == ["4", "5", "6"]


def test_a_run_that_is_named_twice_counts_once(run, tmp_path):
    assert len(load_history(run, tmp_path, run / ".." / run.name)) == len(TRIALS)


def test_history_skips_unfinished_trials_and_nested_runs(run):
    (run / "trials" / "0005").mkdir()
    (run / "trials" / "0001" / "run.json").write_text("{}")
    assert len(load_history(run)) == len(TRIALS)


# ---------------------------------------------------------------------------------------------- wrong input


def message_of(call, *arguments, error=RunDirectoryError):
    """The first line of the error that the call raises; it is all of its message."""
    with pytest.raises(error) as caught:
        call(*arguments)
    assert "\n" not in caught.value.message
    return caught.value.message


def warning_of(call, *arguments):
    """The only warning of the call, without its end."""
    with pytest.warns(DamagedRunWarning) as caught:
        call(*arguments)
    (warning,) = caught
    return re.sub(": this (trial|run) is omitted$", "", str(warning.message))


@pytest.mark.parametrize("call", [load_history, compare])
def test_no_run_at_all_is_an_error(call):
    assert message_of(call) == "no run was given"


@pytest.mark.parametrize("call", [load_history, compare])
def test_a_path_that_holds_no_run_is_an_error_that_names_it(call, tmp_path):
    (tmp_path / "empty").mkdir()
    missing = message_of(call, tmp_path / "missing")
    assert missing == f"{tmp_path}/missing is not a run directory: No such file or directory"
    empty = message_of(call, tmp_path / "empty")
    assert empty == f"{tmp_path}/empty is not a run directory: there is no run.json in it or below it"


def test_a_file_is_no_run_and_is_compared_only_if_it_is_a_recipe(tmp_path):
    (tmp_path / "file").write_text("")
    said = message_of(load_history, tmp_path / "file")
    assert said == f"{tmp_path}/file is not a run directory: Not a directory"
    with pytest.raises(RecipeError, match="not a recipe"):
        compare(tmp_path / "file")


@pytest.mark.parametrize("call", [load_history, compare])
def test_damaged_run_fails_if_named_and_is_skipped_in_a_folder(call, run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    (run / "run.json").write_text("[]")
    assert message_of(call, run).startswith(f"{run}/run.json is damaged: ")
    assert warning_of(call, tmp_path).startswith(f"{run}/run.json is damaged: ")


def test_a_thousand_damaged_results_are_one_warning(run):
    for file in run.glob("trials/*/result.json"):
        file.write_text("{")
    with pytest.warns(
        DamagedRunWarning, match=r"0000/result\.json is damaged.*: this trial and \d+ others are omitted$"
    ):
        assert len(load_history(run)) == 0


@pytest.mark.parametrize("call", [load_history, compare])
def test_a_path_with_a_null_character_is_an_error(call):
    assert message_of(call, "a\0b") == r"a\x00b is not a run directory: embedded null byte"


def test_links_are_not_followed_into_directories_below(run, tmp_path):
    for name, place in (("up", ".."), ("loop", "loop"), ("nowhere", "missing")):
        (tmp_path / name).symlink_to(place)
    assert len(compare(tmp_path)) == 1


def test_numbers_that_are_none_are_refused_in_the_arguments(run):
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(json.dumps({**json.loads(text), "arguments": {"budget": float("nan")}}))
    assert "is damaged: arguments.budget" in message_of(load_history, run)


def with_changes(run, **changes):
    """The run, with `changes` made to the result of its trial 1."""
    file = run / "trials" / "0001" / "result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(file)


TOO_LARGE = "Input should be less than or equal to 9223372036854775807"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"configuration": {"batch_size": 1, "warp": 9}}, ": configuration: there is no knob called 'warp'"),
        ({"configuration": {"batch_size": "big"}}, ": configuration: batch_size cannot be 'big'"),
        ({"started_at": "yesterday"}, " is damaged: started_at: 'yesterday' is not a time"),
        (
            {"started_at": "0001-01-01T00:00:00+23:00"},
            " is damaged: started_at: '0001-01-01T00:00:00+23:00' is not a time",
        ),
        ({"peak_host_bytes": 1 << 63}, f" is damaged: peak_host_bytes: {TOO_LARGE}, found {1 << 63}"),
        ({"trial": 1 << 63}, f" is damaged: trial: {TOO_LARGE}, found {1 << 63}"),
        ({"trial": 0}, " is damaged: trial: 0, expected the number of its directory"),
        (
            {"configuration": {"batch_size": 64.5}},
            " is damaged: configuration.batch_size: expected a valid boolean, a valid integer or a valid string, "
            "found 64.5",
        ),
        ({"schema_version": 2}, ": written by another version of autotune"),
    ],
)
def test_values_that_cannot_be_are_named_with_their_file(run, changes, expected):
    file = with_changes(run, **changes)
    assert warning_of(load_history, run) == file + expected


# -------------------------------------------------------------------------------------------------- writing


def read_back(frame, folder):
    """The frame as it is read from CSV, as in the docstring, and from Parquet."""
    write_csv(frame, folder / "history.csv")
    write_parquet(frame, folder / "history.parquet")
    dtypes = {name: dtype for name, dtype in columns().items() if name != "started_at"}
    options = {"keep_default_na": False, "na_values": [""], "parse_dates": ["started_at"]}
    yield pd.read_csv(folder / "history.csv", dtype=dtypes, **options).astype(columns())
    yield pd.read_parquet(folder / "history.parquet")


WHOLE_SECOND, BETWEEN_SECONDS = "2026-11-20T19:10:00.000+00:00", "2026-11-20T19:10:01.250+00:00"


@pytest.mark.parametrize(
    "trials",
    [
        TRIALS,
        [a_trial(0, started_at=WHOLE_SECOND), a_trial(1, started_at=BETWEEN_SECONDS)],
        [a_trial(0, started_at=BETWEEN_SECONDS), a_trial(1, started_at=WHOLE_SECOND)],
    ],
    ids=["every kind", "whole second first", "whole second last"],
)
def test_written_files_read_back_as_the_same_table(tmp_path, trials):
    frame = load_history(a_run(tmp_path / "run", trials), every_column=True)
    for back in read_back(frame, tmp_path):
        pd.testing.assert_frame_equal(back, frame)


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_of_a_csv_is_a_formula(tmp_path, name):
    run = a_run(tmp_path / "run", workload=WORKLOAD.model_copy(update={"name": name}))
    write_csv(load_history(run), tmp_path / "history.csv")
    read = pd.read_csv(tmp_path / "history.csv", dtype=str, keep_default_na=False)
    (written,) = set(read["workload"])
    assert written in (f"'{name}", name.replace("\t", " ").replace("\r", " "))
    assert not written.startswith(tuple("=+-@\t\r"))
    frame = load_history(run).assign(workload="-1", reason="-4.5")
    write_csv(frame, tmp_path / "history.csv")
    read = pd.read_csv(tmp_path / "history.csv", dtype=str)
    assert (set(read["workload"]), set(read["reason"])) == ({"-1"}, {"-4.5"})


@pytest.mark.parametrize("name", ["NA", "None", "nan", "null", "<NA>", "1e5", "true"])
def test_a_name_is_a_name_whatever_it_is(tmp_path, name):
    run = a_run(tmp_path / name, workload=WORKLOAD.model_copy(update={"name": name}))
    frame = load_history(run, every_column=True)
    for back in read_back(frame, tmp_path):
        pd.testing.assert_frame_equal(back, frame)
    assert set(frame["workload"]) == set(frame["run"]) == {name}
    printed = io.StringIO()
    show_history(frame, Console(file=printed, width=400))
    assert printed.getvalue().splitlines()[0] == f"run {name}  {name}"


def test_csv_has_one_header_a_line_per_trial_and_like_booleans(run, tmp_path):
    write_csv(load_history(run, every_column=True), str(tmp_path / "history.csv"))
    header, *lines = (tmp_path / "history.csv").read_text().splitlines()
    assert header == ",".join(columns())
    assert [line.split(",")[:4] for line in lines][3] == ["run-a", "3", "search", "oom"]
    assert len(lines) == len(TRIALS)
    cells = pd.read_csv(tmp_path / "history.csv", dtype=str).loc[1]
    assert (cells["jit_compile"], cells["deterministic"], cells["onednn"]) == ("true", "true", "true")
    assert cells.isna()["tensor_float_32"]


def test_parquet_of_no_trials_keeps_columns_and_dtypes(tmp_path):
    write_parquet(load_history(a_run(tmp_path / "run", ())), tmp_path / "history.parquet")
    back = pd.read_parquet(tmp_path / "history.parquet")
    assert back.empty
    assert back.dtypes.astype(str).to_dict() == {name: str(dtype) for name, dtype in columns().items()}


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_some_rows_of_the_table_can_be_written(write, run, tmp_path):
    frame = load_history(run, every_column=True)
    write(frame[frame["outcome"] == "oom"], tmp_path / "some")
    back = pd.read_csv(tmp_path / "some") if write is write_csv else pd.read_parquet(tmp_path / "some")
    assert list(back.columns) == list(columns())
    assert back["trial"].tolist() == [3]
    assert back.index.tolist() == [0]


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(write, run, tmp_path, monkeypatch):

    def full(descriptor):
        raise OSError(28, "No space left on device")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "history").write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    message = message_of(write, load_history(run), tmp_path / "out" / "history")
    assert message.endswith("No space left on device")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["history"]
    assert (tmp_path / "out" / "history").read_text() == "before"


# --------------------------------------------------------------------------------------------- compare


def only(*paths):
    """The one row of a comparison; None for NA."""
    (row,) = rows_of(compare(*paths))
    return row


def rows_of(frame):
    """The rows of a table; None for NA."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


@pytest.mark.parametrize(("fields", "workload"), [({}, "digits"), ({"workload": None, "baseline": None}, None)])
def test_a_run_without_a_recipe_claims_nothing(tmp_path, fields, workload):
    row = only(a_run(tmp_path / "run-a", **fields))
    assert (row["run"], row["workload"], row["machine"]) == ("run-a", workload, "Xeon × 2 cores")
    assert row["trials"] == len(TRIALS)
    assert {row[name] for name in ("verdict", "claim", "low", "high", "throughput", "recommended")} == {None}


@pytest.mark.parametrize("verdict", Verdict)
def test_a_recipe_brings_verdict_claim_and_recommendation(tmp_path, verdict):
    claims = verdict is Verdict.FASTER
    recipe = a_recipe() if claims else a_recipe(verdict, (1.0, 1.0, 1.0), EVERY_KNOB)
    summary = only(a_run(tmp_path / "run", recipe=recipe))
    assert (summary["verdict"], summary["differs"]) == (verdict, "")
    assert (summary["claim"], summary["low"], summary["high"]) == ((1.84, 1.79, 1.90) if claims else (1.0, 1.0, 1.0))
    assert summary["recommended"] == ("batch_size=512" if claims else "baseline")


def compared_with_first(tmp_path, **fields):
    """The row of a run that differs in `fields` from the first one it is compared with."""
    first, other = rows_of(compare(a_run(tmp_path / "first"), a_run(tmp_path / "other", **fields)))
    assert first["differs"] == ""
    return other


def test_versions_that_do_not_change_speed_leave_runs_comparable(tmp_path):
    packages = {**MACHINE.packages, "optuna": "5.1.0"}
    other = compared_with_first(tmp_path, machine=MACHINE.model_copy(update={"packages": packages}))
    assert other["differs"] == ""


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"machine": MACHINE.model_copy(update={"cores": 4})}, "another machine (cores: 4, not 2)"),
        ({"workload": None}, "the workload of one of the runs is not known"),
        ({"workload": WORKLOAD.model_copy(update={"name": "images"})}, "another workload (images, not digits)"),
        ({"workload": WORKLOAD.model_copy(update={"fingerprint": "sha256:bb"})}, "the workload's code has changed"),
        ({"baseline": {**BASELINE, "batch_size": 64}}, "another baseline"),
        (
            {"machine": MACHINE.model_copy(update={"cores": 4}), "workload": None},
            "another machine (cores: 4, not 2), the workload of one of the runs is not known",
        ),
    ],
)
def test_runs_that_differ_in_what_matters_are_not_comparable(tmp_path, fields, expected):
    other = compared_with_first(tmp_path, **fields)
    assert other["differs"] == expected
    assert other["trials"] == len(TRIALS)


def test_a_run_that_ended_before_its_baseline_stays_comparable(tmp_path):
    assert compared_with_first(tmp_path, baseline=None)["differs"] == ""


def test_a_machine_is_told_in_words():
    gpus = [Gpu(name=name, memory_bytes=1) for name in ("H200", "L4", "H200")]
    machine = MACHINE.model_copy(update={"cores": 1, "gpus": tuple(gpus)})
    assert machine.describe() == "Xeon × 1 core, 2 × H200, L4"


def test_leaders_confirmed_concurrently_have_own_baselines():
    confirming = {"phase": Phase.CONFIRM}
    references = [a_record(trial=number, slices=(a_slice(0.5),), **confirming) for number in (3, 4)]
    leaders = [
        a_record(
            trial=number,
            looks=(InterimAnalysis(leader=number, candidate=1, error=0.02, most=12, reference=of),),
            **confirming,
        )
        for number, of in ((5, 4), (6, 3))
    ]
    records = [a_record(trial=0, phase=Phase.BASELINE), *references, *leaders]
    assert [reference_of(leader, records).trial for leader in leaders] == [4, 3]
    assert [reference_of(reference, records).trial for reference in references] == [3, 4]


def test_runs_may_be_given_as_a_list(tmp_path):
    runs = [a_run(tmp_path / name, TRIALS[:2]) for name in ("a", "b")]
    pd.testing.assert_frame_equal(load_history(runs), load_history(*runs))
    assert compare(runs)["run"].tolist() == ["a", "b"]
    with pytest.raises(RunDirectoryError, match="no run was given"):
        load_history([])


def test_columns_of_other_devices_are_left_out_unless_asked_for(run):
    missing = columns().keys() - set(load_history(run).columns)
    assert {"tensor_float_32", "replicas", "gpu_power_watts", "scaling_efficiency"} <= missing
    assert not missing & {"jit_compile", "onednn", "throughput", "reason", "seat"}
    of_gpu = a_run(run.parent / "gpu", [a_trial(0, peak_device_bytes=1, configuration={"tensor_float_32": True})])
    assert {"tensor_float_32", "peak_device_bytes"} <= set(load_history(run, of_gpu).columns)


def a_confirmation(number, standing, configuration=FASTER, **figures):
    """The trial of a leader's fresh processes."""
    looks = InterimAnalysis(leader=1, candidate=1, error=0.05, most=12, reference=9, standing=standing)
    return a_trial(number, Phase.CONFIRM, configuration=configuration, looks=(looks,), **figures)


def test_the_best_rows_begin_with_those_that_were_confirmed(tmp_path):
    lucky, unstable = {**FASTER, "prefetch": 2}, {**FASTER, "prefetch": 4}
    trials = [
        BASELINE_TRIAL,
        a_trial(1, speedup=interval(2.5)),
        a_trial(2, speedup=interval(9.0), configuration=lucky),
        a_trial(3, speedup=interval(8.0), configuration=unstable),
        a_trial(4, Phase.CONFIRM, configuration=BASELINE, slices=(a_slice(1.0),)),
        a_confirmation(5, Standing.CONFIRMED, speedup=interval(2.0)),
        a_confirmation(6, Standing.UNSTABLE, configuration=unstable, outcome=Outcome.UNSTABLE),
    ]
    frame = load_history(a_run(tmp_path / "run", trials))
    assert frame[frame.duplicate]["trial"].tolist() == [1, 3, 4]
    assert frame[frame.confirmed]["trial"].tolist() == [5]
    assert frame.loc[1, "configuration_id"] == frame.loc[5, "configuration_id"] != frame.loc[2, "configuration_id"]
    best = frame[~frame.duplicate].sort_values(["confirmed", "speedup"], ascending=False)  # as in docs/history.md
    assert best["trial"].tolist()[:2] == [5, 2]


def terminal_lines(show, frame, width=80):
    """What a terminal of that width shows."""
    printed = io.StringIO()
    show(frame, Console(file=printed, width=width, force_terminal=True, color_system=None))
    return printed.getvalue().splitlines()


def test_a_history_fits_a_terminal_of_80_columns_and_is_aligned(tmp_path):
    trials = [*TRIALS[:4], a_confirmation(5, Standing.CONFIRMED, speedup=interval(2.0), throughput=interval(2000.0))]
    runs = [a_run(tmp_path / name, trials) for name in ("20261120-191001-1a2b3c", "20261120-201001-4d5e6f")]
    *lines, last = terminal_lines(show_history, load_history(runs))
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("run ")] == [f"run {path.name}  digits" for path in runs]
    assert len({line.index(" confirm") for line in lines if " confirm " in line}) == 1
    assert sum("×2.00 confirmed" in line for line in lines) == 2
    assert last.startswith("10 trials.")
    assert "seat" not in "".join(lines)


def test_history_in_a_narrow_terminal_shows_a_block_per_trial(tmp_path):
    frame = load_history(a_run(tmp_path / "run", TRIALS[:2]))
    *lines, _ = (line.rstrip() for line in terminal_lines(show_history, frame, width=40))
    assert max(map(len, lines)) <= 40
    assert [line for line in lines if line.startswith("no. ")] == ["no. 0", "no. 1"]
    assert "  phase      baseline" in lines


def test_comparison_too_wide_for_terminal_shows_a_block_per_run(tmp_path):
    other = MACHINE.model_copy(update={"cpu": "A processor with a long name, as vendors give them"})
    runs = [
        a_run(tmp_path / name, recipe=a_recipe().model_copy(update={"machine": machine}))
        for name, machine in (("20261120-191001-1a2b3c", MACHINE), ("20261120-201001-4d5e6f", other))
    ]
    lines = terminal_lines(show_comparison, compare(runs))
    blocks = [line.rstrip() for line in lines if line.startswith(("run ", "  machine", "  recommended"))]
    assert blocks[0::3] == [f"run {path.name}" for path in runs]
    assert blocks[1] == "  machine      Xeon × 2 cores"
    assert blocks[4].startswith("  machine      A processor with a long name")
    assert all(line.startswith("  recommended  batch_size=") for line in blocks[2::3])


def test_comparison_shows_differences_and_shared_values_once(tmp_path):
    runs = [
        a_run(tmp_path / name, recipe=a_recipe(speedup=(value, value - 0.1, value + 0.1)))
        for name, value in (("20261120-191001-1a2b3c", 1.2), ("20261120-201001-4d5e6f", 1.9))
    ]
    lines = terminal_lines(show_comparison, compare(runs))
    assert max(map(len, lines)) <= 80
    assert lines[:2] == ["workload: digits", "machine: Xeon × 2 cores"]
    heading = next(line for line in lines if line.lstrip().startswith("run "))
    assert heading.split() == ["run", "claim", "recommended"]
    assert "×1.20" in "".join(lines)
    assert "×1.90" in "".join(lines)
