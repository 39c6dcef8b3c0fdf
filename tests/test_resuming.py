"""A run goes on, stopped or ended: nothing finished is lost or run again. Killed for real, on simulated trials."""

import json
import os
import random
import shutil
import signal
from datetime import datetime, timedelta

import optuna
import pytest
from simulated_runs import (
    MACHINE,
    SMALL_SPACE,
    DirectoryWithoutStudy,
    Searching,
    Watcher,
    a_record,
    faster_by,
    go_on,
    leaders_of,
    on_disk,
    run_on,
    simulated_trials,
    space,
    tune_simulated,
    with_run,
)

from autotune.data.errors import RunDirectoryError
from autotune.data.record import Outcome, Pairing, Phase, Standing
from autotune.data.run_directory import RunDirectory
from autotune.runtime.executor import TrialFailed
from autotune.runtime.supervisor import fork
from autotune.space.configuration import Configuration, read_trials
from autotune.stats.deciding import EndedBy, Verdict
from autotune.tuning.earlier_runs import note_resumption, read_earlier, refuse_another_machine
from autotune.tuning.events import TrialBegan, TrialMeasured

SPEED = faster_by(jit_compile=1.5, batch_size=1.2, steps_per_execution=1.1)
ONE_KNOB = space(jit_compile=[False, True])
PRECISION = space(precision=["float32", "mixed_bfloat16"])
MOMENTS = 6
EVENTS = 45
"""About as many events as a whole run has before its confirmation ends."""
BEGAN = datetime.fromisoformat("2026-11-20T19:10:01.250+00:00")
"""What the run.json of a simulated run says."""
A_WHILE = 10.0
"""Seconds: by then the baseline is warm, and no candidate has ended."""


class Stopped(BaseException):
    """Ends a run from within, as nothing in it expects."""


def trials(seed=0, speed=SPEED, **settings):
    """The machine that both invocations run on."""
    return simulated_trials(speed, **{"noise": 0.05, "instance_noise": 0.01, "seed": seed, **settings})


def stop_at(path, number, *, on=None, kind=DirectoryWithoutStudy, when=None, **options):
    """A run that ends when its trial `number` is announced, or `when` an event comes; `on` are its trials."""

    def react(event):
        if when(event) if when else isinstance(event, TrialBegan) and event.trial == number:
            raise Stopped

    with on_disk(path, kind) as directory, pytest.raises(Stopped):
        tune_simulated(on or trials(), directory, observe=Watcher(react), **options)
    return RunDirectory(path)


def ended(path, machine=None, **options):
    """A run to its end, on disk; returns its recipe."""
    with on_disk(path, DirectoryWithoutStudy) as directory:
        return tune_simulated(machine or trials(), directory, **options)


def searched(directory):
    """The trials of the search that were measured or failed, by number."""
    return {
        record.trial: record
        for record in read_trials(directory)
        if record.phase in (Phase.BASELINE, Phase.SEARCH) and record.outcome is not Outcome.INTERRUPTED
    }


def assert_each_was_run_once(directory):
    """No two trials of the search have the same configuration."""
    seen = [Configuration(record.configuration) for record in searched(directory).values()]
    assert len(seen) == len(set(seen))


# --------------------------------------------------------------------------------------------- a run that was stopped


def test_finished_trials_are_not_run_again(tmp_path):
    directory = stop_at(tmp_path / "run", 5)
    before = searched(directory)
    assert set(before) == {0, 1, 2, 3, 4}
    recipe = go_on(trials(1), tmp_path / "run")
    after = searched(directory)
    assert all(after[n].pairs[: len(each.pairs)] == each.pairs for n, each in before.items())
    assert_each_was_run_once(directory)
    assert after[0].slices[: len(before[0].slices)] == before[0].slices
    assert len(after[0].slices) > len(before[0].slices)
    assert after[0].instances > before[0].instances
    assert recipe.evidence.verdict is Verdict.FASTER
    assert directory.recipe_file.exists()


def test_the_baseline_is_announced_as_such_whatever_keras_chose(tmp_path):
    def machine():
        return trials(in_force=lambda configuration: {"jit_compile": True})

    stop_at(tmp_path, 2, on=machine())
    watcher = Watcher()
    go_on(machine(), tmp_path, budget=60.0, observe=watcher)
    announced = [event for event in watcher.of(TrialBegan) if event.phase is Phase.BASELINE]
    assert [event.changes for event in announced] == ["baseline"]


def test_the_study_knows_all_of_it(tmp_path):
    directory = stop_at(tmp_path / "run", 4, kind=RunDirectory)
    go_on(trials(1), tmp_path / "run", kind=RunDirectory, budget=60.0)
    study = optuna.load_study(study_name="simulated", storage=f"sqlite:///{directory.study_file}")
    told = [trial.user_attrs["trial"] for trial in study.trials if "trial" in trial.user_attrs]
    assert set(told) >= set(searched(directory))
    open_ones = (optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.WAITING)
    assert not [trial for trial in study.trials if trial.state in open_ones]


@pytest.mark.parametrize(("pairing", "inferred"), [(Pairing.ALTERNATING, False), (Pairing.BRACKETED, True)])
def test_oom_beside_the_baseline_says_nothing_of_larger_batches(tmp_path, pairing, inferred):
    directory = stop_at(tmp_path / "run", 2)
    record = searched(directory)[1]
    small = {**record.configuration, "batch_size": 64, "steps_per_execution": 1}
    failed = {"configuration": small, "asked": None, "outcome": Outcome.OOM, "pairing": pairing}
    directory.write_trial(record.model_copy(update=failed))
    go_on(trials(1), tmp_path / "run")
    larger = [record for record in searched(directory).values() if record.configuration["batch_size"] > 64]
    assert (Outcome.INFERRED_OOM in {each.outcome for each in larger}) is inferred


def test_a_run_without_a_baseline_begins_again(tmp_path):
    directory = stop_at(tmp_path / "run", 0)
    earlier = read_earlier(directory)
    assert (earlier.records, earlier.next_number, earlier.spent_seconds) == ({}, 0, 0.0)
    go_on(trials(1), tmp_path / "run", budget=60.0)
    assert searched(directory)[0].outcome is Outcome.OK


def test_what_the_dataset_sets_itself_is_found_again(tmp_path):
    own = {"set_by_dataset": {"data_autotune": False}}
    directory = stop_at(tmp_path / "run", 3, on=trials(**own))
    go_on(trials(1, **own), tmp_path / "run", budget=60.0)
    assert {record.configuration["data_autotune"] for record in read_trials(directory)} == {False}


# ------------------------------------------------------------------------------------------- leaders and their errors


def test_a_confirmation_that_was_stopped_goes_on(tmp_path):
    path, seen = tmp_path / "run", []

    def when(event):
        if isinstance(event, TrialBegan) and event.phase is Phase.CONFIRM:
            seen.append(event.trial)
        enough = isinstance(event, TrialMeasured) and event.trial in seen
        when.count += enough
        return when.count == 1

    when.count = 0
    stop_at(path, None, when=when, on=trials(speed=faster_by(jit_compile=1.2)), space=ONE_KNOB)
    (before,) = leaders_of(read_trials(RunDirectory(path)))
    assert before.looks[-1].standing is Standing.OPEN
    recipe = go_on(trials(1, speed=faster_by(jit_compile=1.2)), path, space=ONE_KNOB)
    (after,) = leaders_of(read_trials(RunDirectory(path)))
    assert [
        look.model_copy(update={"standing": Standing.OPEN, "confirmed_at_seconds": None}) for look in after.looks
    ] == list(before.looks)
    assert after.pairs[: len(before.pairs)] == before.pairs
    assert recipe.evidence.verdict is Verdict.FASTER
    processes = {pair.instance for pair in after.pairs}
    assert len(processes) == recipe.evidence.confirmation.processes > len({pair.instance for pair in before.pairs})


def test_resumed_leader_gets_further_looks_at_own_errors(tmp_path):
    path = tmp_path / "run"
    wild = {"speed": faster_by(jit_compile=1.5), "noise": 0.02}
    machine = trials(**wild)
    restless = lambda event: (  # noqa: E731  # a word
        setattr(machine, "instance_noise", 0.6)
        if isinstance(event, TrialBegan) and event.phase is Phase.CONFIRM
        else None
    )
    first = ended(path, machine, space=ONE_KNOB, budget=70.0, observe=Watcher(restless))
    (before,) = leaders_of(read_trials(RunDirectory(path)))
    assert first.evidence.verdict is Verdict.UNDECIDED
    assert before.looks[-1].standing in (Standing.OUT_OF_TIME, Standing.NOT_SHOWN)
    go_on(trials(1, instance_noise=0.01, **wild), path, space=ONE_KNOB, budget=400.0)
    (after,) = leaders_of(read_trials(RunDirectory(path)))
    assert after.looks[: len(before.looks)] == before.looks
    assert after.pairs[: len(before.pairs)] == before.pairs
    errors = [look.error for look in after.looks]
    assert [look.leader for look in after.looks] == list(range(1, len(errors) + 1))
    assert len(errors) > 1
    assert sum(errors) <= 0.05
    assert after.looks[1].most > before.looks[0].most


def test_a_run_that_has_its_answer_goes_on_with_it(tmp_path):
    path = tmp_path / "run"
    speed = faster_by(jit_compile=1.5, batch_size=0.7, steps_per_execution=0.7)
    first = ended(path, trials(speed=speed), budget=150.0)
    assert first.evidence.verdict is Verdict.FASTER
    before = searched(RunDirectory(path))
    second = go_on(trials(1, speed=speed), path, budget=150.0)
    assert len(searched(RunDirectory(path))) > len(before)
    assert second.configuration == first.configuration
    assert second.evidence.speedup == first.evidence.speedup
    assert second.evidence.throughput == first.evidence.throughput
    assert second.evidence.stability == first.evidence.stability
    assert len(leaders_of(read_trials(RunDirectory(path)))) == 1
    assert_each_was_run_once(RunDirectory(path))


def test_what_was_compared_once_is_known_later(tmp_path):
    for learns, verdict in ((True, Verdict.FASTER), (False, Verdict.UNSTABLE)):
        path = tmp_path / str(learns)
        settings = {
            "speed": faster_by(precision=1.6),
            "learns": lambda configuration, learns=learns: learns or configuration["precision"] == "float32",
        }
        first = ended(path, trials(**settings), space=PRECISION, budget=200.0)
        assert first.evidence.verdict is verdict
        second = trials(1, **settings)
        recipe = go_on(second, path, space=PRECISION, budget=100.0)
        assert recipe.evidence.verdict is verdict
        assert recipe.evidence.stability == first.evidence.stability
        assert all(trial.timed for trial in second.launched)


def test_an_exhausted_run_ends_at_once(tmp_path):
    path = tmp_path / "run"
    quiet = {"speed": faster_by(jit_compile=1.5), "noise": 0.01}
    first = ended(path, trials(**quiet), space=ONE_KNOB, budget=300.0)
    machine = trials(1, **quiet)
    second = go_on(machine, path, space=ONE_KNOB, budget=300.0)
    assert (second.configuration, second.evidence.verdict) == (first.configuration, Verdict.FASTER)
    assert second.evidence.ended_by is EndedBy.EXHAUSTED
    assert machine.clock() < 30.0


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_interrupted_goes_on(tmp_path, stop):
    path = tmp_path / "run"
    first = ended(
        path,
        observe=Watcher(
            lambda event: (
                signal.raise_signal(signal.SIGTERM) if isinstance(event, TrialBegan) and event.trial == stop else None
            )
        ),
    )
    assert first.evidence.ended_by is EndedBy.INTERRUPTED
    stopped = [each.configuration for each in read_trials(RunDirectory(path)) if each.outcome is Outcome.INTERRUPTED]
    assert len(stopped) == 1
    second = go_on(trials(1), path)
    assert second.evidence.verdict is Verdict.FASTER
    assert all(each in [one.configuration for one in searched(RunDirectory(path)).values()] for each in stopped)
    assert_each_was_run_once(RunDirectory(path))


def test_a_restored_trial_says_what_its_record_says(tmp_path):
    searching = Searching(tmp_path, trials(speed=faster_by(jit_compile=1.5)))
    trial, record = searching.measure()
    with on_disk(tmp_path / "run") as directory:
        for each in searching.run.records.values():
            directory.write_trial(each)
    (restored,) = read_earlier(directory).trials()[1:]
    assert restored.log_ratios == pytest.approx(trial.log_ratios)
    assert restored.speedup == record.speedup
    assert (restored.instances, restored.seconds) == (record.instances, record.seconds)


# ------------------------------------------------------------------------------------------------- what is refused


def test_a_run_of_another_format_is_refused(tmp_path):
    directory = stop_at(tmp_path / "run", 4)
    for file in directory.path.glob("trials/*/result.json"):
        record = json.loads(file.read_text())
        del record["processes"]
        file.write_text(json.dumps(record))
    with pytest.raises(RunDirectoryError, match="begun by another version of autotune"):
        read_earlier(directory)
    assert searched(directory), "it is still readable"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"space": SMALL_SPACE.replace("[1, 8]", "[1, 4]")}, "the search space"), ({}, "the workload's file")],
)
def test_another_question_is_refused(tmp_path, options, words):
    directory = stop_at(tmp_path / "run", 4)
    before = searched(directory)
    second = trials(1)
    if not options:
        second.facts = second.facts.model_copy(update={"fingerprint": "sha256:11"})
    with pytest.raises(RunDirectoryError, match=f"{words} changed since it began"):
        go_on(second, tmp_path / "run", **options)
    assert searched(directory) == before  # the baseline, too, which had to run again to tell


# ----------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("set_by", [3600.0, -3600.0], ids=["forward", "back"])
def test_wall_clock_change_does_not_affect_time_spent(tmp_path, monkeypatch, set_by):
    machine = trials()

    def now():
        moved = set_by if machine.clock() > A_WHILE else 0.0
        return (BEGAN + timedelta(seconds=machine.clock() + moved)).isoformat(timespec="milliseconds")

    monkeypatch.setattr("autotune.tuning.trial.now_utc", now)
    directory = stop_at(tmp_path / "run", 5, on=machine)
    assert machine.clock() > 2 * A_WHILE
    assert read_earlier(directory).spent_seconds == machine.clock()


def test_time_spent_adds_up_over_resumed_runs(tmp_path):
    directory = stop_at(tmp_path / "run", 3)
    before = read_earlier(directory).spent_seconds
    early = [pair.candidate.at for record in searched(directory).values() for pair in record.pairs]

    def react(event):
        if isinstance(event, TrialBegan) and event.trial == 6:
            raise Stopped

    second = trials(1)
    with pytest.raises(Stopped):
        go_on(second, tmp_path / "run", observe=Watcher(react))
    assert read_earlier(directory).spent_seconds == before + second.clock() > before > 0.0
    ends = [pair.candidate.at for record in searched(directory).values() for pair in record.pairs]
    assert len(ends) == len(set(ends)) > len(early)
    assert sorted(ends)[: len(early)] == sorted(early)


def test_rewritten_record_keeps_the_end_time_of_its_trial(tmp_path):
    run = run_on(trials(), tmp_path)
    run.clock.advance(3.0)
    first = run.save_record(a_record(trial=1))
    run.clock.advance(4.0)
    again = run.save_record(first.model_copy(update={"outcome": Outcome.UNSTABLE}))
    assert (first.ended_at_seconds, again.ended_at_seconds) == (3.0, 3.0)
    assert run.directory.trials[1] == run.records[1] == again


def test_a_resumption_is_written_down(tmp_path):
    directory = stop_at(tmp_path / "run", 2)
    before = directory.read_run()
    note_resumption(directory, read_earlier(directory))
    after = directory.read_run()
    assert after.model_copy(update={"resumed": ()}) == before
    assert [each.spent_seconds for each in after.resumed] == [read_earlier(directory).spent_seconds]


def test_another_machine_is_refused(tmp_path):
    earlier = read_earlier(stop_at(tmp_path / "run", 2))
    refuse_another_machine(earlier, MACHINE)
    with pytest.raises(RunDirectoryError, match="begun on another machine: cores: measured on 2, here 64"):
        refuse_another_machine(earlier, MACHINE.model_copy(update={"cores": 64}))


def test_a_run_on_a_cluster_is_held_against_its_first_seats_host(tmp_path):
    path = tmp_path / "run"
    with on_disk(path, DirectoryWithoutStudy) as directory:
        of_seat = MACHINE.model_copy(update={"cores": 64})
        cluster = trials()
        cluster.machine = of_seat
        tune_simulated(cluster, directory, budget=60.0, trials=2)
    assert read_earlier(DirectoryWithoutStudy(path)).run.machine.cores == 64
    again = trials()
    again.machine = of_seat
    go_on(again, path, budget=60.0)
    again = trials()
    again.machine = MACHINE
    with pytest.raises(RunDirectoryError, match="begun on another machine: cores: measured on 64, here 2"):
        go_on(again, path, budget=60.0)


def test_two_cannot_have_the_same_run(tmp_path):
    directory = stop_at(tmp_path / "run", 2)
    with (
        directory.reopen(),
        pytest.raises(RunDirectoryError, match="in use by another"),
        RunDirectory(tmp_path / "run").reopen(),
    ):
        pass


def test_damaged_record_is_skipped_and_its_number_not_reused(tmp_path):
    directory = stop_at(tmp_path / "run", 4)
    file = directory.trial_directory(2) / "result.json"
    file.write_text("{")
    earlier = read_earlier(directory)
    assert sorted(earlier.records) == [0, 1, 3]
    assert earlier.damage.startswith(f"{file} is damaged")
    go_on(trials(), tmp_path / "run", budget=60.0)
    assert file.read_text() == "{"


def test_leader_with_unreadable_baseline_is_not_restored(tmp_path):
    ended(tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    records = {record.trial: record for record in read_trials(directory)}
    leader = next(record for record in records.values() if record.looks)
    for lost in (leader.looks[-1].reference, leader.looks[-1].candidate):
        file = directory.trial_directory(lost) / "result.json"
        before = file.read_text()
        file.write_text("{")
        assert leader.trial not in read_earlier(directory).records
        file.write_text(before)
    assert leader.trial in read_earlier(directory).records


def test_a_run_whose_baseline_cannot_be_read_is_refused(tmp_path):
    directory = stop_at(tmp_path / "run", 2)
    (directory.trial_directory(0) / "result.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="the baseline's record cannot be read"):
        read_earlier(directory)


def test_what_a_killed_run_has_left_is_removed(tmp_path):
    directory = stop_at(tmp_path / "run", 2)
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    for folder in ("script-scratch", "scratch-abc"):
        (directory.path / folder).mkdir()
        (directory.path / folder / "written-1-0").symlink_to(mine)
    (directory.path / ".run.json.0123456789abcdef").write_text("{")
    (directory.trial_directory(1) / ".result.json.0123456789abcdef").write_text("{")
    (directory.path / ".notes.txt").write_text("mine")
    before = {path for path in directory.path.rglob("*") if "abc" not in path.name and "scratch" not in str(path)}
    with directory.reopen():
        pass
    left = set(directory.path.rglob("*"))
    assert left == before
    assert directory.path / ".notes.txt" in left
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["report.html", "recipe.json", ".lock", "logs", "script-scratch", "space.toml"])
def test_a_run_that_holds_a_link_is_not_gone_on_with(tmp_path, name):
    directory = stop_at(tmp_path / "run", 2)
    path = directory.path / name
    outside = tmp_path / "outside"
    outside.write_text("")
    if path.is_dir():
        shutil.rmtree(path)
        outside.unlink()
        outside.mkdir()
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    for enter in (lambda: read_earlier(RunDirectory(tmp_path / "run")), RunDirectory(tmp_path / "run").create):
        with pytest.raises(RunDirectoryError, match=f"{name} is a link"):
            enter()
    assert os.path.getsize(outside) == 0 or outside.is_dir()


def test_resume_tolerates_links_in_layers_but_no_linked_layers(tmp_path):
    directory = stop_at(tmp_path / "run", 2)
    layers = directory.log_directory / "layers"
    (layers / "123" / "upper-0").mkdir(parents=True)
    (layers / "123" / "upper-0" / "link").symlink_to(tmp_path)
    os.mkfifo(layers / "123" / "upper-0" / "pipe")
    earlier = read_earlier(RunDirectory(directory.path))
    assert sorted(earlier.records) == [0, 1]
    with RunDirectory(directory.path).reopen():
        pass
    shutil.rmtree(layers)
    layers.symlink_to(tmp_path)
    with pytest.raises(RunDirectoryError, match="layers is a link"):
        read_earlier(RunDirectory(directory.path))


def test_run_directory_deleted_meanwhile_is_reported_as_gone(tmp_path):
    def observe(event):
        if isinstance(event, TrialBegan) and event.trial == 2:
            (tmp_path / "run").rename(tmp_path / "gone")

    with on_disk(tmp_path / "run") as directory, pytest.raises(RunDirectoryError, match="the run directory is gone"):
        tune_simulated(trials(), directory, budget=60.0, observe=observe)
    assert not (tmp_path / "run").exists()


def test_options_of_a_damaged_run_are_an_error(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    with_run(directory)
    directory.write_run(directory.read_run().model_copy(update={"arguments": {"budget": "long"}}))
    with pytest.raises(RunDirectoryError, match=r"run\.json: arguments: budget: 'long' is not a duration"):
        _ = read_earlier(directory).options


def killed_after(path, events):
    """A run in a process of its own, killed by SIGKILL once so many events have happened; how it ended."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            with on_disk(path) as directory:
                tune_simulated(trials(), directory, budget=120.0, observe=lambda event: os.write(writing, b"."))
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
    moments = random.Random(0)
    killed = 0
    for index in range(MOMENTS):
        path = tmp_path / str(index)
        if killed_after(path, moments.randint(1, EVENTS)) != -signal.SIGKILL:
            continue
        killed += 1
        directory = RunDirectory(path)
        before = searched(directory)
        go_on(trials(index + 1), path, kind=RunDirectory)
        after = searched(directory)
        assert set(before) <= set(after)
        assert all(after[n].pairs[: len(each.pairs)] == each.pairs for n, each in before.items())
        assert_each_was_run_once(directory)
        assert directory.recipe_file.exists()
    assert killed >= 0.9 * MOMENTS


def test_the_number_of_an_interrupted_trial_is_not_used_again(tmp_path):
    with on_disk(tmp_path / "run") as directory:
        directory.write_trial(a_record(trial=0, phase=Phase.BASELINE))
        directory.write_trial(a_record(trial=1, speedup=1.1))
        directory.write_trial(a_record(trial=2, outcome=Outcome.INTERRUPTED))
        directory.prepare_trial(3)  # it was killed before it had a result
    earlier = read_earlier(directory)
    assert sorted(earlier.records) == [0, 1]
    assert earlier.next_number == 4


def test_need_for_fresh_interpreters_is_recorded_in_the_run(tmp_path):
    machine = trials()
    stuck = TrialFailed(Outcome.TIMEOUT, "stuck")
    machine.failure = lambda configuration: stuck if machine.isolation == "template" else None
    stopped = stop_at(tmp_path / "run", 2, on=machine)
    assert stopped.read_run().isolation == "spawn"
