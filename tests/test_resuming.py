"""A run that was stopped goes on: nothing finished is lost or run again. Killed for real, on simulated trials."""

import json
import os
import random
import signal
from datetime import datetime, timedelta

import optuna
import pytest
from simulated_runs import (
    MACHINE,
    SMALL_SPACE,
    Watcher,
    a_record,
    faster_by,
    on_disk,
    run_on,
    simulated_trials,
    tune_simulated,
    with_run,
)

from autotune.errors import ArgumentError, BudgetError, RunDirectoryError
from autotune.run_directory import Resumption, RunDirectory
from autotune.space.configuration import Configuration
from autotune.study.plan import ENOUGH_INSTANCES
from autotune.study.progress import Notice, TrialBegan
from autotune.study.resuming import note_resumption, read_earlier, refuse_another_machine
from autotune.trial.live import TrialFailed
from autotune.trial.record import Outcome, Phase

SPEED = faster_by(jit_compile=1.5, batch_size=1.2, steps_per_execution=1.1)
MOMENTS = 50
EVENTS = 60
"""About as many events as a whole run has before its confirmation ends."""
BEGAN = datetime.fromisoformat("2026-11-20T19:10:01.250+00:00")
"""What the run.json of a simulated run says."""
A_WHILE = 10.0
"""Seconds: by then the baseline is warm, and no candidate has ended."""


class Stopped(BaseException):
    """Ends a run from within, as nothing in it expects."""


def trials(seed=0, **settings):
    """The machine that both invocations run on."""
    return simulated_trials(SPEED, noise=0.05, instance_noise=0.01, seed=seed, **settings)


def stop_at(path, number, *, failure=None, machine_of_its_own=None, on=None, **options):
    """A run that ends when its trial `number` is announced; `on` are its trials."""

    def react(event):
        if isinstance(event, TrialBegan) and event.trial == number:
            raise Stopped

    with on_disk(path) as directory, pytest.raises(Stopped):
        tune_simulated(
            on or trials(failure=failure, **(machine_of_its_own or {})),
            directory,
            observe=Watcher(react),
            **options,
        )
    return RunDirectory(path)


def go_on(directory, *, seed=1, machine_of_its_own=None, **options):
    """The second invocation; returns its recipe."""
    earlier = read_earlier(directory)
    with directory.reopened():
        return tune_simulated(
            trials(seed, **(machine_of_its_own or {})), directory, earlier=earlier, **options
        )


def searched(directory):
    """The trials of the search that were measured or failed, by number."""
    return {
        each.trial: each
        for each in directory.read_trials()
        if each.phase is not Phase.CONFIRM and each.outcome is not Outcome.INTERRUPTED
    }


def assert_each_was_run_once(directory):
    """No two trials of the search have the same configuration."""
    seen = [Configuration(each.configuration) for each in searched(directory).values()]
    assert len(seen) == len(set(seen))


def test_finished_trials_are_not_run_again(tmp_path):
    """What was measured stands, the search goes on after it, and the recipe counts both."""
    directory = stop_at(tmp_path / "run", 5)
    before = searched(directory)
    assert set(before) == {0, 1, 2, 3, 4}
    recipe = go_on(directory)
    after = searched(directory)
    assert {number: after[number].pairs for number in (1, 2)} == {n: before[n].pairs for n in (1, 2)}
    assert_each_was_run_once(directory)
    assert recipe.evidence.verdict == "faster"
    assert directory.recipe_file.exists()


@pytest.mark.parametrize(("spent", "instances"), [(185.0, ENOUGH_INSTANCES), (230.0, ENOUGH_INSTANCES - 1)])
def test_a_run_killed_in_its_confirmation_is_confirmed_anew(tmp_path, spent, instances):
    """The search's time was over: what it found is confirmed in the rest, and nothing is said of a larger budget."""
    directory = stop_at(tmp_path / "run", 6)
    earlier, before = read_earlier(directory), searched(directory)
    machine, watcher = trials(1), Watcher()
    machine.clock.advance(spent)
    with directory.reopened():
        recipe = tune_simulated(machine, directory, earlier=earlier, observe=watcher)
    assert searched(directory).keys() == before.keys()
    assert recipe.evidence.verdict == "faster"
    assert recipe.evidence.confirmation.instances >= instances
    assert any("the search's time was over" in each.text for each in watcher.of(Notice))
    assert machine.clock() <= 300.0


@pytest.mark.parametrize("slower", [False, True])
def test_a_run_in_which_nothing_was_found_needs_time_for_it(tmp_path, slower):
    """With the baseline alone, or what is slower, there is nothing to confirm: time for a trial is asked for."""
    directory = stop_at(tmp_path / "run", 2 if slower else 1, on=simulated_trials(faster_by(batch_size=0.5)))
    assert len(searched(directory)) == 1 + slower
    machine = trials(1)
    machine.clock.advance(185.0)
    with directory.reopened(), pytest.raises(BudgetError):
        tune_simulated(machine, directory, earlier=read_earlier(directory))
    assert not directory.recipe_file.exists()


def test_a_budget_for_the_rest_is_one_for_a_search(tmp_path):
    """Where it is too small for that, it is refused with one that would do: the run can still be gone on with."""
    directory = stop_at(tmp_path / "run", 6)
    with directory.reopened(), pytest.raises(BudgetError):
        tune_simulated(trials(1), directory, earlier=read_earlier(directory), budget=31.0, spent_before=150.0)
    assert not directory.recipe_file.exists()


def test_what_the_dataset_sets_itself_is_found_again(tmp_path):
    """The baseline that is started again has it in its configuration already: it is the same question all the same."""
    own = {"set_by_dataset": {"data_autotune": False}}
    directory = stop_at(tmp_path / "run", 3, machine_of_its_own=own)
    go_on(directory, machine_of_its_own=own)
    assert {each.configuration["data_autotune"] for each in directory.read_trials()} == {False}


def test_the_baseline_is_added_to(tmp_path):
    """It must live again beside the candidates; its earlier slices stay."""
    directory = stop_at(tmp_path / "run", 3)
    before = searched(directory)[0]
    go_on(directory)
    after = searched(directory)[0]
    assert after.slices[: len(before.slices)] == before.slices
    assert len(after.slices) > len(before.slices)
    assert after.instances == before.instances + 1


def test_the_study_knows_all_of_it(tmp_path):
    """Each trial of the search is told once; what was open when the run stopped is told as failed."""
    directory = stop_at(tmp_path / "run", 4)
    go_on(directory)
    study = optuna.load_study(study_name="simulated", storage=f"sqlite:///{directory.study_file}")
    told = [each.user_attrs["trial"] for each in study.trials if "trial" in each.user_attrs]
    assert set(told) >= set(searched(directory))
    open_ones = (optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.WAITING)
    assert not [each for each in study.trials if each.state in open_ones]


def test_a_failed_configuration_is_not_tried_again(tmp_path):
    """What ran out of memory before the stop is known after it."""

    def failure(configuration):
        if configuration["jit_compile"] is True:
            return TrialFailed(Outcome.OOM, "out of memory")
        return None

    directory = stop_at(tmp_path / "run", 4, failure=failure)
    second = trials(1, failure=failure)
    with directory.reopened():
        tune_simulated(second, directory, earlier=read_earlier(directory))
    alone = Configuration(searched(directory)[0].configuration).replace(jit_compile=True)
    assert alone not in [each.configuration for each in second.launched]
    assert_each_was_run_once(directory)


def test_a_run_without_a_baseline_begins_again(tmp_path):
    """Stopped while it imported: there is nothing to go on from, and it is no error."""
    directory = stop_at(tmp_path / "run", 0)
    earlier = read_earlier(directory)
    assert (earlier.records, earlier.next_number, earlier.spent_seconds) == ({}, 0, 0.0)
    go_on(directory)
    assert searched(directory)[0].outcome is Outcome.OK


def test_a_run_that_has_ended_cannot_be_resumed(tmp_path):
    """Its recipe is named."""
    with on_disk(tmp_path / "run") as directory:
        tune_simulated(trials(), directory)
    with pytest.raises(ArgumentError, match=r"has ended: its recipe is .*recipe\.json"):
        read_earlier(RunDirectory(tmp_path / "run"))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"space": SMALL_SPACE.replace("[1, 8]", "[1, 4]")}, "the search space"), ({}, "the workload's file")],
)
def test_another_question_is_refused(tmp_path, options, words):
    """Figures of two workloads or spaces are not mixed, and what was measured stays."""
    directory = stop_at(tmp_path / "run", 4)
    before = searched(directory)
    second = trials(1)
    if not options:
        second.facts = second.facts.model_copy(update={"fingerprint": "sha256:11"})
    with directory.reopened(), pytest.raises(RunDirectoryError, match=f"{words} changed since it began"):
        tune_simulated(second, directory, earlier=read_earlier(directory), **options)
    assert searched(directory) == before  # the baseline, too, which had to run again to tell


def wall_clock(monkeypatch, clock, *, set_by=0.0):
    """What the date of a trial is read from: set anew, by so many seconds, a while after the run has begun."""

    def now():
        moved = set_by if clock() > A_WHILE else 0.0
        return (BEGAN + timedelta(seconds=clock() + moved)).isoformat(timespec="milliseconds")

    monkeypatch.setattr("autotune.study.running.now_utc", now)


@pytest.mark.parametrize("set_by", [3600.0, -3600.0], ids=["forward", "back"])
def test_a_wall_clock_that_is_set_changes_nothing_of_what_is_spent(tmp_path, monkeypatch, set_by):
    """Set forward an hour it uses up no budget, and set back it gives none again: the run's own clock counts."""
    machine = trials()
    wall_clock(monkeypatch, machine.clock, set_by=set_by)
    directory = stop_at(tmp_path / "run", 5, on=machine)
    assert machine.clock() > 2 * A_WHILE
    starts = [datetime.fromisoformat(each.started_at) for each in directory.read_trials()]
    assert max(starts) - min(starts) >= timedelta(seconds=3600 - A_WHILE)
    assert read_earlier(directory).spent_seconds == machine.clock()


def test_what_is_spent_adds_up_over_invocations(tmp_path):
    """Gone on with, with a budget of its own, and stopped again: all that both took."""
    directory = stop_at(tmp_path / "run", 3)
    before = read_earlier(directory).spent_seconds
    second, earlier = trials(1), read_earlier(directory)

    def react(event):
        if isinstance(event, TrialBegan) and event.trial == 6:
            raise Stopped

    with directory.reopened(), pytest.raises(Stopped):
        tune_simulated(second, directory, earlier=earlier, spent_before=before, observe=Watcher(react))
    assert read_earlier(directory).spent_seconds == before + second.clock() > before > 0.0


def test_a_record_that_stands_keeps_the_moment_at_which_its_trial_ended(tmp_path):
    """Kept once more, because nothing came on top or it is judged anew, it ended when it did."""
    run = run_on(trials(), tmp_path)
    run.clock.advance(3.0)
    first = run.keep(a_record(trial=1))
    run.clock.advance(4.0)
    again = run.keep(first.model_copy(update={"outcome": Outcome.UNSTABLE}))
    assert (first.ended_at_seconds, again.ended_at_seconds) == (3.0, 3.0)
    assert run.directory.trials[1] == run.records[1] == again


def test_a_run_of_an_older_version_goes_on(tmp_path, monkeypatch):
    """Its records do not say when they ended: their dates do, and the run ends with a recipe."""
    machine = trials()
    wall_clock(monkeypatch, machine.clock)
    directory = stop_at(tmp_path / "run", 5, on=machine)
    for each in searched(directory).values():
        of_then = each.model_dump(mode="json", exclude={"ended_at_seconds"})
        (directory.trial_directory(each.trial) / "result.json").write_text(json.dumps(of_then))
    assert {each.ended_at_seconds for each in searched(directory).values()} == {None}
    assert read_earlier(directory).spent_seconds == pytest.approx(machine.clock(), abs=0.5)
    assert go_on(directory).evidence.verdict == "faster"


def test_dates_are_not_asked_where_a_record_says_when_it_ended(tmp_path):
    """One that a later invocation has kept counts in what older records came to, whatever their dates say now."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    with_run(directory)
    of_a_clock_set_back_since = "2026-11-20T23:59:00.000+00:00"
    directory.write_trial(a_record(trial=0, ended_at_seconds=40.0))
    directory.write_trial(a_record(trial=1, started_at=of_a_clock_set_back_since, seconds=5.0))
    directory.write_trial(a_record(trial=2, ended_at_seconds=31.0))
    assert read_earlier(directory).spent_seconds == 40.0


def test_a_pause_is_not_the_runs_time(tmp_path):
    """Stopped, gone on with a day later, and stopped again: by dates, too, what is spent is what was tuned."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    with_run(directory)  # begun on the 20th at 19:10:01.250
    directory.write_trial(a_record(trial=0, started_at="2026-11-20T19:10:06.250+00:00", seconds=4.0))
    earlier = read_earlier(directory)
    assert earlier.spent_seconds == 9.0
    later = Resumption(at="2026-11-21T19:00:00.000+00:00", spent_seconds=9.0)
    directory.write_run(earlier.run.model_copy(update={"resumed": (later,)}))
    assert read_earlier(directory).spent_seconds == 9.0
    directory.write_trial(a_record(trial=1, started_at="2026-11-21T19:00:10.000+00:00", seconds=5.0))
    assert read_earlier(directory).spent_seconds == 24.0


def test_slices_go_on_in_the_runs_time(tmp_path):
    """With a budget of its own, an invocation's slices still come after those of the one before."""
    directory = stop_at(tmp_path / "run", 4)
    before = [pair.candidate.at for each in searched(directory).values() for pair in each.pairs]
    go_on(directory, budget=100.0, spent_before=max(before))
    ends = [pair.candidate.at for each in directory.read_trials() for pair in each.pairs]
    assert len(ends) == len(set(ends)) > len(before)
    assert sorted(ends)[: len(before)] == sorted(before)


def test_a_damaged_date_is_an_error_where_dates_are_asked(tmp_path):
    """The run and what is wrong with it are named."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    with_run(directory)
    directory.write_trial(a_record(trial=0, started_at="yesterday"))
    with pytest.raises(RunDirectoryError, match=r"run: a time is damaged: .*yesterday"):
        _ = read_earlier(directory).spent_seconds


def test_a_resumption_is_written_down(tmp_path):
    """With the moment and the seconds before it; all else in run.json stays."""
    directory = stop_at(tmp_path / "run", 2)
    before = directory.read_run()
    note_resumption(directory, read_earlier(directory))
    after = directory.read_run()
    assert after.model_copy(update={"resumed": ()}) == before
    assert [each.spent_seconds for each in after.resumed] == [read_earlier(directory).spent_seconds]


def test_another_machine_is_refused(tmp_path):
    """Speeds of two machines are not mixed."""
    earlier = read_earlier(stop_at(tmp_path / "run", 2))
    refuse_another_machine(earlier, MACHINE)
    with pytest.raises(RunDirectoryError, match="begun on another machine: cores: measured on 2, here 64"):
        refuse_another_machine(earlier, MACHINE.model_copy(update={"cores": 64}))


def test_two_cannot_have_the_same_run(tmp_path):
    """The second is refused while the first has it."""
    directory = stop_at(tmp_path / "run", 2)
    with (
        directory.reopened(),
        pytest.raises(RunDirectoryError, match="in use by another"),
        RunDirectory(tmp_path / "run").reopened(),
    ):
        pass


def test_options_of_a_damaged_run_are_an_error(tmp_path):
    """What stands in run.json is checked like what is typed."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    with_run(directory)
    directory.write_run(directory.read_run().model_copy(update={"arguments": {"budget": "long"}}))
    with pytest.raises(RunDirectoryError, match=r"run\.json: arguments: budget is 'long'"):
        _ = read_earlier(directory).options


def killed_after(path, events):
    """A run in a process of its own, killed by SIGKILL once so many events have happened; how it ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            with on_disk(path) as directory:
                tune_simulated(trials(), directory, observe=lambda event: os.write(writing, b"."))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    seen = 0
    while seen < events and (more := os.read(reading, 1)):
        seen += len(more)
    os.kill(pid, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """After SIGKILL nothing finished is lost or run twice, and the resumed run ends with a recipe."""
    moments = random.Random(0)
    killed = 0
    for index in range(MOMENTS):
        path = tmp_path / str(index)
        if killed_after(path, moments.randint(1, EVENTS)) != -signal.SIGKILL:
            continue
        killed += 1
        directory = RunDirectory(path)
        before = searched(directory)
        go_on(directory, seed=index + 1)
        after = searched(directory)
        assert set(before) <= set(after)
        assert all(after[n].pairs[: len(each.pairs)] == each.pairs for n, each in before.items())
        assert_each_was_run_once(directory)
        assert directory.recipe_file.exists()
    assert killed >= 0.9 * MOMENTS
