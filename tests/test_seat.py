"""Search trials: candidates beside the live baseline, or between two stretches of it."""

import contextlib

import pytest
from simulated import SimulatedTrial
from simulated_runs import BASELINE, FAST, Searching, Watcher, faster_by, lose, simulated_trials

from autotune.data.errors import INTERNAL, BudgetError, NoStableConfigurationError, TrialProcessError, WorkloadError
from autotune.data.figures import LogInterval
from autotune.data.record import Outcome, Pairing, Phase
from autotune.runtime.executor import TrialFailed
from autotune.stats.intervals import Spread
from autotune.tuning.events import Notice, TrialEnded
from autotune.tuning.run import Interrupted, TimeIsUp
from autotune.tuning.seat import SameInForce, Seat

OTHER = BASELINE.replace(prefetch=2)
TWICE = faster_by(jit_compile=2.0)
TAKEN = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")


def failing(outcome, *, of=None):
    """A failure of one configuration, or of all."""
    failure = TrialFailed(outcome, "as planned", hint="a hint", log_tail="the log")
    return lambda configuration: failure if of in (None, configuration) else None


def alive(trials):
    """What has a process."""
    return [trial.configuration for trial in trials.alive]


# ------------------------------------------------------------------------------------------------- baseline


def test_the_baseline_tells_what_the_workload_is(tmp_path):
    searching = Searching(tmp_path, simulated_trials(examples=1437, jit_resolves_to=True))
    run, record = searching.run, searching.run.records[0]
    assert (run.data.examples, run.data.endless) == (1437, False)
    assert run.baseline["jit_compile"] is record.configuration["jit_compile"] is True
    assert (record.phase, record.outcome) == (Phase.BASELINE, Outcome.OK)
    assert record.throughput.value == pytest.approx(4000.0)
    assert alive(searching.trials) == [run.baseline]


def test_a_workload_on_a_gpu_gets_the_gpus_knobs(tmp_path):
    run = Searching(tmp_path, simulated_trials(gpus=("NVIDIA H200",))).run
    assert "tensor_float_32" in run.baseline
    assert "onednn" not in run.baseline


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (failing(Outcome.CRASHED), NoStableConfigurationError, r"crashed.*as planned"),
        (failing(Outcome.TIMEOUT), BudgetError, "baseline"),
        (lambda each: TrialFailed(Outcome.ERROR, "dataset() is empty", input_error=True), WorkloadError, "dataset"),
        (lambda configuration: TAKEN, NoStableConfigurationError, r"\(error\).*busy or unavailable"),
        (lambda configuration: TrialFailed(Outcome.ERROR, f"{INTERNAL}: so"), TrialProcessError, f"^{INTERNAL}: so"),
    ],
)
def test_a_failing_baseline_ends_the_run_and_leaves_its_record(tmp_path, failure, error, words):
    trials = simulated_trials(failure=failure)
    started = []

    def keep(event):
        started.append(event)

    with pytest.raises(error, match=words):
        Searching(tmp_path, trials, observe=keep)
    (ended,) = [each for each in started if isinstance(each, TrialEnded)]
    assert (ended.record.trial, ended.record.outcome.measured) == (0, False)


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.CRASHED])
def test_baseline_stuck_in_a_fork_restarts_in_new_interpreter(tmp_path, outcome):
    watcher, failure = Watcher(), TrialFailed(outcome, "stuck")
    trials = simulated_trials(failure=lambda configuration: failure if trials.isolation == "template" else None)
    searching = Searching(tmp_path, trials, observe=watcher)
    assert (trials.isolation, searching.run.records[0].outcome) == ("spawn", Outcome.OK)
    (notice,) = [notice.text for notice in watcher.of(Notice)]
    assert "does not train in a fork" in notice
    assert "stuck" in notice


def test_failing_baseline_of_a_later_seat_affects_no_other_seat(tmp_path):
    trials = simulated_trials()
    searching = Searching(tmp_path, trials)
    trials.failure = lambda configuration: TrialFailed(Outcome.CRASHED, "stuck")
    with pytest.raises(NoStableConfigurationError):
        Seat(searching.run, name="other").start_baseline(60.0)
    assert trials.isolation == "template"


@pytest.mark.parametrize(("outcome", "error"), [(Outcome.TIMEOUT, BudgetError), (Outcome.ERROR, WorkloadError)])
def test_a_baseline_that_trains_nowhere_is_started_no_third_time(tmp_path, outcome, error):
    trials = simulated_trials(failure=lambda each: TrialFailed(outcome, "no", input_error=outcome is Outcome.ERROR))
    with pytest.raises(error):
        Searching(tmp_path, trials)
    assert len(trials.launched) == (2 if outcome is Outcome.TIMEOUT else 1)


@pytest.mark.parametrize(("timeout", "told"), [(5.0, BudgetError), (600.0, NoStableConfigurationError)])
def test_stalled_baseline_in_a_small_budget_asks_for_more_time(tmp_path, timeout, told):
    trials = simulated_trials()
    trials.open()
    warm_at = trials.clock() + trials.start_seconds
    trials.foreign_load = lambda seconds: 0.999 if seconds > warm_at + 1.0 else 0.0
    with pytest.raises(told):
        Searching(tmp_path, trials, baseline_seconds=timeout, open_first=False)


def test_long_epochs_are_timed_in_fewer_slices(tmp_path):
    counts = [
        len(Searching(tmp_path / str(number), simulated_trials(speed, examples=96)).run.records[0].slices)
        for number, speed in enumerate((lambda configuration: 4000.0, lambda configuration: 12.0))
    ]
    assert counts[0] > counts[1] == 1


def test_the_baselines_closing_figures_are_kept_quietly(tmp_path):
    watcher = Watcher()
    searching = Searching(tmp_path, simulated_trials(), observe=watcher)
    searching.seat.end_baseline()
    searching.seat.end_baseline()
    record = searching.run.records[0]
    assert record.peak_host_bytes > 0
    assert record.input_wait_fraction == 0.0
    assert len(watcher.of(TrialEnded)) == 1
    assert alive(searching.trials) == []


@pytest.mark.parametrize("times", [1, 2])
def test_baseline_killed_while_timed_is_restarted(tmp_path, monkeypatch, times):
    measure, left = SimulatedTrial.measure, [None] * times

    def killed(trial, seconds, timeout_seconds):
        if left and trial.alive:
            left.pop()
            lose(trial)
        return measure(trial, seconds, timeout_seconds)

    monkeypatch.setattr(SimulatedTrial, "measure", killed)
    searching = Searching(tmp_path, simulated_trials(TWICE))
    assert searching.run.records[0].outcome is Outcome.OK
    assert len(searching.trials.launched) == times + 1


def test_a_stop_ends_the_slices_of_the_baseline(tmp_path):
    trials = simulated_trials()
    searching = Searching(tmp_path, trials, interruptions=lambda: any(trial._slices for trial in trials.launched))
    assert len(searching.run.records[0].slices) == 1


def test_slowly_starting_baseline_has_time_to_restart(tmp_path):
    searching = Searching(tmp_path, simulated_trials(TWICE, start_seconds=120.0), bracketed=True)
    _, record = searching.measure(timeout=300.0)
    assert record.outcome is Outcome.OK


# ----------------------------------------------------------------------------------------------- candidates


def test_a_candidate_is_set_against_the_baseline(tmp_path):
    searching = Searching(tmp_path, simulated_trials(TWICE))
    _, record = searching.measure(seconds=60.0)
    assert (record.outcome, record.stopped_by, record.pairing) == (Outcome.OK, "narrow", "alternating")
    assert record.speedup.value == pytest.approx(2.0)
    assert record.throughput.value == pytest.approx(8000.0)
    assert record.peak_host_bytes > 0
    assert record.input_wait_fraction is not None
    assert alive(searching.trials) == [BASELINE]


def test_who_goes_first_is_drawn_and_slices_are_of_single_epochs(tmp_path):
    searching = Searching(tmp_path, simulated_trials(lambda configuration: 60.0, noise=0.05, examples=96))
    trial, _ = searching.measure(seconds=60.0)
    _, record = searching.measure(trial=trial, seconds=60.0)
    assert {pair.baseline_first for pair in record.pairs} == {True, False}
    assert {each.epochs for pair in record.pairs for each in (pair.baseline, pair.candidate)} == {1}


def test_a_noisy_candidate_is_measured_until_its_time_is_up(tmp_path):
    _, record = Searching(tmp_path, simulated_trials(noise=0.3, examples=None)).measure(seconds=8.0)
    assert record.stopped_by == "time"
    assert 6.0 < sum(pair.baseline.seconds + pair.candidate.seconds for pair in record.pairs) < 9.0


@pytest.mark.parametrize("slower", [0.5, 0.97])
def test_only_a_candidate_that_cannot_win_is_pruned(tmp_path, slower):
    trials = simulated_trials(faster_by(jit_compile=slower), noise=0.05, examples=None)
    best = LogInterval(value=0.02, low=-0.03, high=0.07, count=4)
    _, record = Searching(tmp_path, trials).measure(
        seconds=40.0, timeout=90.0, leader=best, pooled_spread=Spread(deviation=0.07, degrees=50)
    )
    assert (record.outcome is Outcome.PRUNED) is (slower == 0.5)
    if slower == 0.5:
        assert (record.stopped_by, len(record.pairs)) == ("cannot_win", 2)
        assert record.reason


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMEOUT, Outcome.ERROR, Outcome.NONFINITE], ids=str)
def test_a_failing_candidate_is_data(tmp_path, outcome):
    searching = Searching(tmp_path, simulated_trials(failure=failing(outcome, of=FAST)))
    began = searching.run.clock()
    trial, record = searching.measure(timeout=12.0)
    assert searching.run.clock() - began <= 12.0 + 1e-6
    assert (record.outcome, record.reason, record.log_tail) == (outcome, "as planned\na hint", "the log")
    assert searching.run.directory.trials[trial.number] == record
    assert searching.measure(OTHER)[1].outcome is Outcome.OK
    assert searching.seat.baseline.trial.instances == 1


@pytest.mark.parametrize("together", [True, False])
def test_xla_fallback_is_recorded_as_not_compiled(tmp_path, together):
    trials = simulated_trials(xla_falls_back=True, fits_together=lambda each: together or len(each) < 2)
    searching = Searching(tmp_path, trials)
    trial, record = searching.measure()
    assert trial.requested["jit_compile"] is True
    assert record.configuration["jit_compile"] is False


def test_measuring_again_adds_to_what_was_measured(tmp_path):
    searching = Searching(tmp_path, simulated_trials(TWICE, noise=0.1))
    trial, first = searching.measure()
    _, second = searching.measure(trial=trial)
    assert second.pairs[: len(first.pairs)] == first.pairs
    assert {pair.instance for pair in second.pairs} == {0, 1}
    assert (second.instances, len(trial.log_ratios)) == (2, len(second.pairs))
    assert second.seconds > first.seconds


# ------------------------------------------------------------------------------------- in force, boundaries


def test_what_is_in_force_is_what_was_tried(tmp_path):
    asked = BASELINE.replace(steps_per_execution=16)
    trials = simulated_trials(in_force=lambda each: {"steps_per_execution": 9} if each == asked else {})
    trial, record = Searching(tmp_path, trials).measure(asked)
    assert trial.configuration["steps_per_execution"] == record.configuration["steps_per_execution"] == 9
    assert record.asked == dict(asked)


def test_what_was_tried_under_another_name_is_not_measured_again(tmp_path):
    trials = simulated_trials(in_force=lambda configuration: {"jit_compile": False} if configuration == FAST else {})
    searching = Searching(tmp_path, trials)
    trial = searching.run.new_trial(Phase.SEARCH, FAST)
    with pytest.raises(SameInForce) as caught:
        searching.measure(trial=trial, known=lambda configuration: configuration == BASELINE)
    assert caught.value.configuration == BASELINE
    record = searching.run.records[trial.number]
    assert (record.outcome, record.pairs) == (Outcome.PRUNED, ())
    assert alive(trials) == [BASELINE]


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({"batch_size": 64}, False),
        ({"jit_compile": True}, False),
        ({"prefetch": 2}, True),
        ({"persistent_iterator": True}, True),
        ({"batch_size": 64, "num_parallel_calls": 4}, True),
    ],
)
def test_boundary_is_the_baselines_unless_the_pipeline_differs(tmp_path, changes, own):
    searching = Searching(tmp_path, simulated_trials(examples=1_000_000))
    searching.measure(BASELINE.replace(**changes))
    searching.lose_the_baseline()
    searching.measure(BASELINE.replace(**changes))
    launched = searching.trials.launched
    first, again = (each for each in launched if each.configuration == BASELINE)
    candidate = launched[1]
    assert first.timing.boundary is None
    assert candidate.timing.boundary == (None if own else searching.run.boundary)
    assert again.timing.boundary == searching.run.boundary is not None


def test_slow_steps_skip_the_boundary_of_another_pipeline(tmp_path):
    trials = simulated_trials(lambda configuration: 64.0, examples=1_000_000)  # half a second a step
    searching = Searching(tmp_path, trials)
    searching.measure(BASELINE.replace(prefetch=2))
    assert trials.launched[1].timing.boundary == searching.run.boundary is not None


# -------------------------------------------------------------------------------------------- bracketing


def test_what_does_not_fit_alone_is_out_of_memory(tmp_path):
    trials = simulated_trials(fits_together=lambda configurations: sum(one.batch_size for one in configurations) <= 128)
    searching = Searching(tmp_path, trials)
    assert searching.measure(BASELINE.replace(batch_size=256))[1].outcome is Outcome.OOM
    for size, pairing in ((64, Pairing.ALTERNATING), (128, Pairing.BRACKETED)):
        _, record = searching.measure(BASELINE.replace(batch_size=size))
        assert (record.outcome, record.pairing) == (Outcome.OK, pairing)


def lose_slices_of_the_baseline(monkeypatch, trials, outcome, *, since_slices=0, beside=True):
    """Each slice of the baseline fails while `FAST` is alive, or at all, once that has had so many."""
    measure, own = SimulatedTrial.measure, []

    def losing(trial, seconds, timeout_seconds):
        if trial.configuration == FAST:
            own.append(trial)
        elif len(own) >= since_slices and (FAST in alive(trials) or not beside):
            trial.kill()
            raise TrialFailed(outcome, "the baseline's last words", log_tail="the log")
        return measure(trial, seconds, timeout_seconds)

    monkeypatch.setattr(SimulatedTrial, "measure", losing)


@pytest.mark.parametrize("since_slices", [0, 3])
def test_baseline_oom_beside_a_candidate_switches_to_bracketing(tmp_path, monkeypatch, since_slices):
    trials = simulated_trials(TWICE, noise=0.3)
    searching = Searching(tmp_path, trials)
    lose_slices_of_the_baseline(monkeypatch, trials, Outcome.OOM, since_slices=since_slices)
    _, record = searching.measure(seconds=30.0, timeout=60.0)
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)
    assert len({pair.instance for pair in record.pairs}) == (2 if since_slices else 1)
    assert searching.measure(OTHER)[1].pairing is Pairing.ALTERNATING
    assert alive(trials) == [BASELINE]


def test_oom_stands_if_no_time_is_left_for_a_run_alone(tmp_path, monkeypatch):
    trials = simulated_trials(TWICE, noise=0.3)
    searching = Searching(tmp_path, trials, left=12.0)
    lose_slices_of_the_baseline(monkeypatch, trials, Outcome.OOM, since_slices=3)
    _, record = searching.measure(seconds=30.0, timeout=60.0)
    assert len(record.pairs) >= 2, "the case is another one"
    assert (record.outcome, record.pairing) == (Outcome.OOM, Pairing.ALTERNATING)
    assert (record.reason, record.log_tail) == ("the baseline's last words", "the log")


@pytest.mark.parametrize(("outcome", "bracketed"), [(Outcome.CRASHED, False), (Outcome.OOM, True)])
def test_a_baseline_that_fails_twice_by_itself_ends_the_run(tmp_path, monkeypatch, outcome, bracketed):
    trials = simulated_trials()
    searching = Searching(tmp_path, trials, bracketed=bracketed)
    lose_slices_of_the_baseline(monkeypatch, trials, outcome, beside=False)
    with pytest.raises(NoStableConfigurationError, match=f"{outcome}.*the baseline's last words"):
        searching.measure()
    assert alive(trials) == []


# -------------------------------------------------------------------------------------------- a lost device


@pytest.mark.parametrize(("first", "later"), [(("H200",), ()), (("H200", "H200"), ("H200",))])
def test_a_candidate_that_has_lost_its_card_is_no_candidate(tmp_path, first, later):
    searching = Searching(tmp_path, simulated_trials(TWICE, gpus=first))
    searching.trials.gpus = later
    trial = searching.run.new_trial(Phase.SEARCH, OTHER)
    with pytest.raises(NoStableConfigurationError, match="no longer available") as caught:
        searching.measure(trial=trial)
    record = searching.run.records[trial.number]
    assert record.outcome is Outcome.INTERRUPTED
    assert f"sees {', '.join(later) or 'no GPU'}; the baseline saw H200" in record.reason
    assert "--resume" in caught.value.hint


def test_a_card_that_is_taken_between_brackets_is_told_as_that(tmp_path):
    searching = Searching(tmp_path, simulated_trials(), bracketed=True)
    searching.measure()
    searching.trials.failure = lambda configuration: TAKEN if configuration == BASELINE else None
    searching.lose_the_baseline()
    with pytest.raises(NoStableConfigurationError, match=r"\(error\).*busy or unavailable"):
        searching.measure(OTHER)


# ------------------------------------------------------------------------------------ stopped, or out of time


def test_a_trial_that_is_stopped_is_kept_as_such(tmp_path):
    asked = []
    searching = Searching(tmp_path, simulated_trials(TWICE, noise=0.3), interruptions=lambda: len(asked))
    trial, record = searching.measure()
    asked.append("stop")
    with pytest.raises(Interrupted):
        searching.measure(trial=trial)
    assert searching.run.records[trial.number] == record
    other = searching.run.new_trial(Phase.SEARCH, OTHER)
    with pytest.raises(Interrupted):
        searching.measure(trial=other)
    assert searching.run.records[other.number].outcome is Outcome.INTERRUPTED
    assert alive(searching.trials) == [BASELINE]


def test_what_cannot_start_in_time_is_not_begun(tmp_path):
    searching = Searching(tmp_path, simulated_trials(TWICE), left=20.0)
    trial, record = searching.measure(OTHER)
    searching.trials.clock.advance(max(0.0, searching.run.deadline.left() - 1.0))
    launched = len(searching.trials.launched)
    new = searching.run.new_trial(Phase.SEARCH, FAST)
    for each in (trial, new):
        with pytest.raises(TimeIsUp):
            searching.measure(trial=each)
    assert len(searching.trials.launched) == launched
    assert searching.run.records[trial.number] == record
    assert searching.run.records[new.number].outcome is Outcome.INTERRUPTED


def test_configuration_needs_its_own_import_only_once(tmp_path):
    searching = Searching(tmp_path, simulated_trials())
    apart = BASELINE.replace(onednn=False)
    assert searching.seat.imports_first(apart)
    assert not searching.seat.imports_first(FAST)
    searching.measure(apart)
    assert not searching.seat.imports_first(apart)


@pytest.mark.parametrize("left", [4.0 + 0.8 * step for step in range(8)])
def test_whenever_the_time_is_up_nobody_is_blamed(tmp_path, left):
    trials = simulated_trials(faster_by(jit_compile=1.05), examples=5600, noise=0.02)
    searching = Searching(tmp_path, trials, left=left)
    trial = searching.run.new_trial(Phase.SEARCH, FAST)
    with contextlib.suppress(TimeIsUp):
        searching.measure(trial=trial, seconds=60.0)
    record = searching.run.records[trial.number]
    assert record.outcome is (Outcome.OK if len(record.pairs) > 1 else Outcome.INTERRUPTED)


@pytest.mark.parametrize("bracketed", [False, True])
def test_stalled_machine_is_not_waited_for_past_the_deadline(tmp_path, bracketed):
    trials = simulated_trials(TWICE)
    searching = Searching(tmp_path, trials, bracketed=bracketed, left=3.0)
    trials.drift = lambda seconds: 1e-6
    with pytest.raises(TimeIsUp):
        searching.measure()
    assert searching.run.deadline.left() >= 0.0
    assert trials.clock() <= searching.run.deadline.at
    searching.seat.end_baseline()
    assert alive(trials) == []


def test_a_slice_at_whose_end_an_epoch_ends_has_its_time(tmp_path):
    trials = simulated_trials(TWICE, examples=1_000_000, uncounted_seconds=70.0)
    for bracketed in (False, True):
        _, record = Searching(tmp_path, trials, bracketed=bracketed).measure(timeout=30.0)
        assert record.outcome is Outcome.OK


def ruin(monkeypatch, *ruined):
    """The weights of these configurations are found to be ruined when their processes are ended."""
    finish = SimulatedTrial.finish

    def look(trial, seconds, timeout, *, thorough):
        if trial.configuration in ruined:
            raise TrialFailed(Outcome.NONFINITE, "the weight w is not finite")
        return finish(trial, seconds, timeout)

    monkeypatch.setattr(SimulatedTrial, "finish", look)


@pytest.mark.parametrize("bracketed", [False, True])
def test_ruined_weights_at_the_end_are_a_candidates_failure(tmp_path, monkeypatch, bracketed):
    searching = Searching(tmp_path, simulated_trials(TWICE), bracketed=bracketed)
    ruin(monkeypatch, FAST)
    _, record = searching.measure()
    assert (record.outcome, record.reason) == (Outcome.NONFINITE, "the weight w is not finite")


def test_ruined_weights_of_the_baseline_end_the_run(tmp_path, monkeypatch):
    searching = Searching(tmp_path, simulated_trials(TWICE))
    ruin(monkeypatch, BASELINE)
    with pytest.raises(NoStableConfigurationError, match=r"nonfinite.*the weight w"):
        searching.seat.end_baseline()
