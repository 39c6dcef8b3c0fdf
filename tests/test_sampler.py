"""The Optuna study of a run."""

import contextlib
import resource
import sqlite3
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState
from simulated_runs import BASELINE, a_pair, a_record, space, space_of

from autotune.data.errors import RunDirectoryError
from autotune.data.record import Outcome, Phase
from autotune.tuning.sampler import Sampler, distributions

UNEVEN_SPACE = space(batch_size=[20, 32, 50, 300], prefetch=[0, 2, 8, "autotune"], jit_compile=[False, True])
FIRST = 10
"""Trials before the samples are modelled."""


def a_sampler(space, *, file=None, seed=0):
    """A sampler, in memory unless a file is given."""
    return Sampler(space, file=file, name="digits", seed=seed)


def run(sampler, count, outcome=lambda configuration: 1.0):
    """Ask, and tell what `outcome` says: a speed-up, or None for a failure. Returns what was asked."""
    asked = []
    for number in range(1, count + 1):
        trial, configuration = sampler.ask()
        asked.append(configuration)
        speedup = outcome(configuration)
        failed = {} if speedup else {"outcome": Outcome.CRASHED, "reason": "killed by SIGSEGV"}
        sampler.tell(trial, a_record(configuration, trial=number, speedup=speedup, **failed))
    return asked


def test_every_sample_lies_in_the_space():
    space = space_of(UNEVEN_SPACE)
    asked = run(a_sampler(space), 5 * FIRST, lambda configuration: configuration.batch_size / 100)
    assert all(configuration in space for configuration in asked)
    for name, choices in space.choices.items():
        assert {type(each[name]) for each in asked} <= {type(choice) for choice in choices}
        assert {each[name] for each in asked} == set(choices)


def test_the_order_of_numbers_counts():
    found = distributions(space_of(UNEVEN_SPACE))
    assert found["batch_size"] == IntDistribution(20, 300, log=True)
    assert found["prefetch"] == CategoricalDistribution((0, 2, 8, "autotune"))
    assert found["jit_compile"] == CategoricalDistribution((False, True))


def test_a_seed_makes_the_samples_repeatable():

    def speed(configuration):
        return configuration.batch_size / 100

    space = space_of(UNEVEN_SPACE)
    first, again, other = (run(a_sampler(space, seed=seed), 25, speed) for seed in (7, 7, 8))
    assert first == again != other


def test_the_model_goes_where_it_is_fast():
    asked = run(a_sampler(space_of()), 50, lambda configuration: configuration.batch_size / 32)
    modelled = asked[FIRST:]
    assert sum(each.batch_size >= 256 for each in modelled) > 0.75 * len(modelled)


@pytest.mark.parametrize("seed", range(3))
def test_a_failing_half_of_the_space_is_mostly_avoided(seed):
    asked = run(a_sampler(space_of(), seed=seed), 40 + FIRST, lambda each: None if each["jit_compile"] else 1.0)
    assert sum(bool(each["jit_compile"]) for each in asked[FIRST:]) <= 15


def test_the_study_opens_as_optuna_reads_it(tmp_path):
    sampler = a_sampler(space_of(), file=tmp_path / "study.db")
    trial, configuration = sampler.ask()
    sampler.tell(trial, a_record(configuration, trial=4, speedup=1.5))
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    (kept,) = study.trials
    assert study.study_name == "digits"
    assert study.direction.name == "MAXIMIZE"
    assert kept.value == 1.5
    assert kept.params == {name: configuration[name] for name in kept.params}
    assert kept.user_attrs["trial"] == 4
    assert kept.user_attrs["outcome"] == "ok"


def told(record):
    """What Optuna keeps of a trial that ended with this record."""
    sampler = a_sampler(space_of())
    sampler.tell(sampler.ask_for(BASELINE), record)
    (kept,) = sampler._study.trials
    return kept


@pytest.mark.parametrize(
    "outcome", [each for each in Outcome if each not in (Outcome.OK, Outcome.PRUNED, Outcome.INTERRUPTED)], ids=str
)
def test_failed_trials_are_told_as_pruned(outcome):
    kept = told(a_record(outcome=outcome, speedup=3.0, reason="x" * 9000))
    assert kept.state is TrialState.PRUNED
    assert kept.intermediate_values == {}
    assert kept.user_attrs["outcome"] == str(outcome)


def test_an_interrupted_trial_teaches_the_sampler_nothing():
    assert told(a_record(outcome=Outcome.INTERRUPTED)).state is TrialState.FAIL


def test_a_trial_that_could_not_win_is_told_with_its_value():
    kept = told(a_record(outcome=Outcome.PRUNED, speedup=0.5, pairs=(a_pair(0.5), a_pair(0.5))))
    assert kept.state is TrialState.PRUNED
    assert kept.intermediate_values == {2: 0.5}


def test_the_baseline_counts_as_one():
    kept = told(a_record(trial=0, phase=Phase.BASELINE))
    assert kept.state is TrialState.COMPLETE
    assert kept.value == 1.0


def test_a_trial_without_an_interval_is_told_as_pruned():
    assert told(a_record(trial=5)).state is TrialState.PRUNED


def test_a_given_configuration_can_be_asked_for():
    sampler = a_sampler(space_of(UNEVEN_SPACE))
    wanted = BASELINE.replace(batch_size=300, prefetch="autotune", jit_compile=True)
    assert sampler.ask_for(wanted).params == {"batch_size": 300, "prefetch": "autotune", "jit_compile": True}


def test_a_full_disk_is_said(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RunDirectoryError, match=r"cannot write .*study\.db: ") as caught:
            a_sampler(space_of(UNEVEN_SPACE), file=tmp_path / "study.db")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Free some space" in caught.value.hint


def test_a_disk_that_fills_up_midway_is_said(tmp_path):
    sampler = a_sampler(space_of(UNEVEN_SPACE), file=tmp_path / "study.db")
    run(sampler, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RunDirectoryError, match=r"cannot write .*study\.db: "):
            run(sampler, 50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_passed_over_is_told_as_pruned():
    sampler = a_sampler(space_of())
    optuna_trial, _ = sampler.ask()
    sampler.skip_sample(optuna_trial)
    (kept,) = sampler._study.trials
    assert kept.state is TrialState.PRUNED
    assert kept.user_attrs == {}


@pytest.mark.parametrize("left_behind", ["an open trial", "a damaged file"])
def test_the_study_is_made_anew_from_the_records(tmp_path, left_behind):
    space, faster = space_of(), BASELINE.replace(jit_compile=True)
    file = tmp_path / "study.db"
    if left_behind == "an open trial":
        a_sampler(space, file=file).ask_for(faster).set_user_attr("trial", 1)
    else:
        file.write_bytes(b"SQLite format 3\0 and nothing")
    sampler = a_sampler(space, file=file)
    sampler.catch_up(
        [
            a_record(BASELINE, trial=0),
            a_record(faster, trial=1, speedup=1.5),
            a_record(faster, trial=2, speedup=1.5, phase=Phase.CONFIRM),
            a_record(faster, trial=3, phase=Phase.SOAK),
        ]
    )
    assert [(trial.user_attrs["trial"], trial.value) for trial in sampler._study.trials] == [(0, 1.0), (1, 1.5)]
    assert {trial.state for trial in sampler._study.trials} == {TrialState.COMPLETE}


def values_in(file):
    """The trials of a study file, as the number in the run and the value."""
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{file}")
    return [(trial.user_attrs["trial"], trial.value) for trial in study.trials]


def test_what_the_file_holds_is_not_written_again(tmp_path):
    space, faster, file = space_of(), BASELINE.replace(jit_compile=True), tmp_path / "study.db"
    before = [a_record(BASELINE, trial=0), a_record(faster, trial=1, speedup=1.5)]
    a_sampler(space, file=file).catch_up(before)
    with contextlib.closing(sqlite3.connect(file)) as study:
        study.execute("UPDATE trials SET datetime_start = '2001-01-01 00:00:00'")
        study.commit()
    a_sampler(space, file=file).catch_up([*before, a_record(faster, trial=2, speedup=1.4)])
    assert values_in(file) == [(0, 1.0), (1, 1.5), (2, 1.4)]
    years = [
        trial.datetime_start.year
        for trial in optuna.load_study(study_name="digits", storage=f"sqlite:///{file}").trials
    ]
    assert [year == 2001 for year in years] == [True, True, False]


def test_writing_the_file_takes_no_longer_than_it_may(tmp_path):
    records, file = [a_record(BASELINE, trial=0), a_record(BASELINE, trial=1)], tmp_path / "study.db"
    sampler = a_sampler(space_of(), file=file)
    sampler.catch_up(records, seconds=0.0)
    assert len(sampler._study.trials) == 2
    assert values_in(file) == []
    a_sampler(space_of(), file=file).catch_up(records)
    assert [number for number, _ in values_in(file)] == [0, 1]


def test_a_study_of_other_trials_is_replaced(tmp_path):
    space, file = space_of(), tmp_path / "study.db"
    a_sampler(space, file=file).catch_up([a_record(BASELINE, trial=0), a_record(BASELINE, trial=7)])
    a_sampler(space, file=file).catch_up([a_record(BASELINE, trial=0)])
    assert values_in(file) == [(0, 1.0)]


@pytest.mark.parametrize(("seconds", "value"), [(60.0, 1.7), (0.0, 1.5)])
def test_repeated_measurement_is_rewritten_if_time_allows(tmp_path, seconds, value):
    space, faster, file = space_of(), BASELINE.replace(jit_compile=True), tmp_path / "study.db"
    baseline, record = a_record(BASELINE, trial=0), a_record(faster, trial=1, speedup=1.5)
    sampler = a_sampler(space, file=file)
    sampler.catch_up([baseline, record])
    sampler.write_again([baseline, a_record(faster, trial=1, speedup=1.7)], seconds=seconds)
    assert values_in(file) == [(0, 1.0), (1, value)]


@pytest.mark.parametrize(
    "name", ["what?x=1", "50% #1", "a%41", "{SCHEMA_VERSION}", "{}", "file:x?mode=memory", "größe"]
)
def test_the_study_is_in_its_directory_whatever_that_is_called(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    run(a_sampler(space_of(), file=Path(name) / "study.db"), 1)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [f"{name}/study.db"]
    with contextlib.closing(sqlite3.connect(tmp_path / name / "study.db")) as study:
        assert study.execute("SELECT count(*) FROM trials").fetchone() == (1,)
