"""Candidates beside the live baseline."""

import contextlib
import math

import pytest
from simulated_runs import BASELINE, Watcher, a_plan, faster_by, run_on, simulated_trials

from autotune.errors import BudgetError, NoStableConfigurationError, WorkloadError
from autotune.study.progress import TrialEnded, TrialMeasured
from autotune.study.side_by_side import (
    BASELINE_SLICES,
    BRACKET_SLICES,
    INPUT_WAIT_SECONDS,
    Interrupted,
    SideBySide,
)
from autotune.study.slicing import SLICE_SECONDS
from autotune.study.waiting import TimeIsUp
from autotune.trial.live import TrialFailed
from autotune.trial.record import Outcome, Pairing, Phase
from autotune.trial.simulated import SimulatedTrial

FAST = BASELINE.replace(jit_compile=True)
TWICE = faster_by(jit_compile=2.0)


def started(tmp_path, trials, *, bracketed=False, baseline_seconds=60.0, **settings):
    """A run whose baseline is warm, and what runs candidates beside it."""
    trials.open()
    run = run_on(trials, tmp_path, **settings)
    beside = SideBySide(run, bracketed=bracketed)
    beside.start_baseline(baseline_seconds)
    return run, beside


def measure(run, beside, configuration=FAST, *, trial=None, incumbent_low=None, **plan):
    """Measure a configuration, or a trial again; returns trial and record."""
    trial = trial or run.new_trial(Phase.SEARCH, configuration)
    return trial, beside.measure(trial, a_plan(**plan), incumbent_low=incumbent_low)


def failing(outcome, **when):
    """A failure of every configuration that has these values."""

    def failure(configuration):
        hit = all(configuration[name] == value for name, value in when.items())
        return TrialFailed(outcome, "as planned", hint="a hint", log_tail="the log") if hit else None

    return failure


def only_one_fits(alive):
    """There is memory for one trial at a time."""
    return len(alive) == 1


# ------------------------------------------------------------------------------------------------- baseline


def test_the_baseline_tells_what_the_workload_is(tmp_path):
    """From trial 0 come the example count and what `jit_compile="auto"` means; it is timed alone and kept."""
    run, beside = started(tmp_path, simulated_trials(examples=1437, jit_resolves_to=True))
    record = run.records[0]
    assert (run.data.examples, run.data.endless) == (1437, False)
    assert run.baseline["jit_compile"] is True
    assert (record.phase, record.outcome) == (Phase.BASELINE, Outcome.OK)
    assert record.configuration["jit_compile"] is True
    assert record.throughput.value == pytest.approx(4000.0)
    assert beside.baseline.live is not None


def test_a_workload_on_a_gpu_gets_the_gpus_knobs(tmp_path):
    """Whatever was guessed before TensorFlow said what it sees: the baseline has the knobs that exist there."""
    run, _ = started(tmp_path, simulated_trials(gpus=("NVIDIA H200",)))
    assert "tensor_float_32" in run.baseline
    assert "onednn" not in run.baseline


def test_a_failing_baseline_leaves_its_record(tmp_path):
    """No configuration can be recommended when the baseline fails; its record and log say why."""
    trials = simulated_trials(failure=failing(Outcome.CRASHED))
    trials.open()
    run = run_on(trials, tmp_path)
    with pytest.raises(NoStableConfigurationError, match=r"crashed.*as planned") as caught:
        SideBySide(run).start_baseline(60.0)
    assert caught.value.exit_code == 3
    assert caught.value.detail == "the log"
    assert run.records[0].outcome is Outcome.CRASHED
    assert run.records[0].seconds == pytest.approx(1.5)
    assert run.directory.trials[0].reason == "as planned\na hint"


def test_a_workload_at_fault_is_the_users_to_mend(tmp_path):
    """A baseline that fails because of the workload itself is wrong input, not an unstable configuration."""
    fault = TrialFailed(Outcome.ERROR, "dataset() is empty", hint="check the path", input_error=True)
    trials = simulated_trials(failure=lambda configuration: fault)
    with pytest.raises(WorkloadError, match="dataset"):
        SideBySide(run_on(trials, tmp_path)).start_baseline(60.0)


def test_a_baseline_that_is_never_warm_asks_for_more_time(tmp_path):
    """A timeout before the first slice is a question of the budget; one of a baseline started again is a failure."""
    hangs = simulated_trials(failure=failing(Outcome.TIMEOUT))
    hangs.open()
    opened = hangs.clock()
    with pytest.raises(BudgetError, match="was not warm and timed") as caught:
        SideBySide(run_on(hangs, tmp_path)).start_baseline(60.0)
    assert caught.value.detail == "the log"
    assert hangs.clock() == pytest.approx(opened + 60.0)
    stalls = simulated_trials()
    run, beside = started(tmp_path, stalls)
    stalls.retire(0)
    stalls.failure = failing(Outcome.TIMEOUT, jit_compile=False)
    with pytest.raises(NoStableConfigurationError):
        measure(run, beside)


@pytest.mark.parametrize(("timeout", "told"), [(3.0, BudgetError), (60.0, NoStableConfigurationError)])
def test_a_baseline_that_stands_still_in_a_small_budget_asks_for_more_time(tmp_path, timeout, told):
    """A slice that the budget left less time than it may take is a question of the budget; else it is a failure."""
    trials = simulated_trials()
    trials.open()
    warm = trials.clock() + trials.start_seconds
    trials.foreign_load = lambda seconds: 0.999 if seconds > warm + 2 * SLICE_SECONDS else 0.0
    beside = SideBySide(run_on(trials, tmp_path))
    with pytest.raises(told):
        beside.start_baseline(timeout)
    assert beside.baseline.slices


def test_the_baselines_closing_figures_are_kept_quietly(tmp_path):
    """Ending the baseline adds memory and input wait to its record, without announcing a second end."""
    watcher = Watcher()
    run, beside = started(tmp_path, simulated_trials(), observe=watcher)
    before = run.records[0].seconds
    beside.end_baseline()
    beside.end_baseline()
    assert run.records[0].peak_host_bytes > 0
    assert run.records[0].input_wait_fraction == 0.0
    assert run.records[0].seconds == pytest.approx(before + INPUT_WAIT_SECONDS)
    assert len(watcher.of(TrialEnded)) == 1
    assert run.trials.alive == []


def test_a_baseline_that_died_is_started_again(tmp_path):
    """Once: the candidate beside it is measured all the same."""
    trials = simulated_trials(TWICE)
    run, beside = started(tmp_path, trials)
    trials.retire(0)
    _, record = measure(run, beside)
    assert record.outcome is Outcome.OK
    assert record.speedup.value == pytest.approx(2.0)
    assert beside.baseline.instances == 2


def test_a_baseline_that_does_not_come_back_ends_the_run(tmp_path):
    """Without a baseline nothing can be compared."""
    trials = simulated_trials()
    run, beside = started(tmp_path, trials)
    trials.retire(0)
    trials.failure = failing(Outcome.CRASHED, jit_compile=False)
    with pytest.raises(NoStableConfigurationError):
        measure(run, beside)
    assert trials.alive == []


# ----------------------------------------------------------------------------------------------- candidates


def test_a_candidate_is_set_against_the_baseline(tmp_path):
    """Without noise the speed-up is the planted one, and measuring stops as soon as it is known."""
    run, beside = started(tmp_path, simulated_trials(TWICE))
    _, record = measure(run, beside, measured=20.0)
    assert (record.outcome, record.stopped_by, record.pairing) == (Outcome.OK, "narrow", "alternating")
    assert record.speedup.value == pytest.approx(2.0)
    assert record.throughput.value == pytest.approx(8000.0)
    assert record.peak_host_bytes > 0
    assert record.seconds > record.measured_seconds
    assert [each.configuration for each in run.trials.alive] == [BASELINE]


@pytest.mark.parametrize("left", [4.0 + 0.4 * step for step in range(12)])
def test_an_epoch_that_runs_in_is_waited_for(tmp_path, left):
    """Whenever the search's time is over, a slice that cannot end in it is no failure of the candidate."""
    epochs_of_more_than_a_second = simulated_trials(faster_by(jit_compile=1.05), examples=5600, noise=0.02)
    run, beside = started(tmp_path, epochs_of_more_than_a_second)
    trial = run.new_trial(Phase.SEARCH, FAST)
    with contextlib.suppress(TimeIsUp):
        beside.measure(trial, a_plan(measured=60.0, search_last=run.clock() + left), incumbent_low=None)
    assert run.records[trial.number].outcome in (Outcome.OK, Outcome.INTERRUPTED)


def test_who_goes_first_is_drawn(tmp_path):
    """In some pairs the baseline runs first, in others the candidate."""
    run, beside = started(tmp_path, simulated_trials(noise=0.2))
    began = run.clock()
    _, record = measure(run, beside, measured=30.0)
    assert record.seconds == pytest.approx(run.clock() - began)
    assert {pair.baseline_first for pair in record.pairs} == {True, False}


def test_a_drifting_machine_does_not_bias_the_speedup(tmp_path):
    """The machine's speed halves and comes back twice a minute; the pairs see the planted factor all the same."""
    drift = lambda seconds: math.exp(0.35 * math.sin(seconds / 5))  # noqa: E731  # a formula
    run, beside = started(tmp_path, simulated_trials(faster_by(jit_compile=1.3), drift=drift))
    _, record = measure(run, beside, measured=60.0)
    rates = [pair.candidate.examples / pair.candidate.seconds for pair in record.pairs]
    assert max(rates) / min(rates) > 1.5
    assert record.speedup.value == pytest.approx(1.3, rel=0.03)
    assert record.speedup.low < 1.3 < record.speedup.high


def test_a_noisy_candidate_is_measured_until_its_time_is_up(tmp_path):
    """About as long as the plan says, the baseline's turns included."""
    run, beside = started(tmp_path, simulated_trials(noise=0.3, examples=None))
    began = run.clock()
    _, record = measure(run, beside, measured=8.0)
    assert record.stopped_by == "time"
    assert 6.0 < 2 * record.measured_seconds < 9.0
    assert run.clock() - began < 13.0


def test_a_candidate_that_cannot_win_is_pruned(tmp_path):
    """It is given up after a few pairs, and what was measured of it is kept."""
    run, beside = started(tmp_path, simulated_trials(faster_by(jit_compile=0.5), noise=0.05))
    _, record = measure(run, beside, incumbent_low=math.log(1.5), measured=40.0)
    assert (record.outcome, record.stopped_by) == (Outcome.PRUNED, "cannot_win")
    assert len(record.pairs) < 8
    assert record.speedup.value == pytest.approx(0.5, rel=0.2)
    assert record.reason


@pytest.mark.parametrize(
    "outcome", [Outcome.CRASHED, Outcome.TIMEOUT, Outcome.ERROR, Outcome.NONFINITE], ids=str
)
def test_a_failing_candidate_is_data(tmp_path, outcome):
    """It leaves a record with outcome, reason, hint and log, and the baseline goes on."""
    run, beside = started(tmp_path, simulated_trials(failure=failing(outcome, jit_compile=True)))
    trial, record = measure(run, beside)
    assert record.outcome is outcome
    assert (record.reason, record.log_tail) == ("as planned\na hint", "the log")
    assert run.directory.trials[trial.number] == record
    assert measure(run, beside, BASELINE.replace(prefetch=2))[1].outcome is Outcome.OK
    assert beside.baseline.instances == 1


@pytest.mark.parametrize(("first", "later"), [(("H200",), ()), (("H200", "H200"), ("H200",))])
def test_a_candidate_that_has_lost_its_card_is_no_candidate(tmp_path, first, later):
    """TensorFlow would train it on the processor, or on fewer cards, without a word: the search ends, and says so."""
    trials = simulated_trials(TWICE, gpus=first)
    run, beside = started(tmp_path, trials)
    assert measure(run, beside)[1].outcome is Outcome.OK
    trials.gpus = later
    with pytest.raises(NoStableConfigurationError, match="not available any more"):
        measure(run, beside, BASELINE.replace(prefetch=2))
    record = run.records[max(run.records)]
    assert record.outcome is Outcome.INTERRUPTED
    assert record.reason.startswith(
        f"TensorFlow sees {', '.join(later) or 'no GPU'}, where the baseline saw H200"
    )


def test_a_candidate_that_hangs_costs_its_time_limit_only(tmp_path):
    """A trial that never gets warm is over after the plan's limit."""
    run, beside = started(tmp_path, simulated_trials(failure=failing(Outcome.TIMEOUT, jit_compile=True)))
    began = run.clock()
    measure(run, beside, trial_timeout=12.0)
    assert run.clock() - began == pytest.approx(12.0)


# --------------------------------------------------------------------------------------- more of the same


def test_measuring_again_adds_to_what_was_measured(tmp_path):
    """A second process of the same trial: its pairs come on top, and say that they are another instance's."""
    run, beside = started(tmp_path, simulated_trials(TWICE, noise=0.1))
    trial, first = measure(run, beside)
    _, second = measure(run, beside, trial=trial)
    assert second.pairs[: len(first.pairs)] == first.pairs
    assert {pair.instance for pair in second.pairs} == {0, 1}
    assert second.instances == 2
    assert second.seconds > first.seconds > first.measured_seconds
    assert len(second.pairs) == len(trial.log_ratios) > len(first.pairs)


# -------------------------------------------------------------------------------------------- bracketing


def test_what_does_not_fit_beside_the_baseline_is_bracketed(tmp_path):
    """Baseline, candidate, baseline again, never two alive; the record says so."""
    trials = simulated_trials(TWICE, fits_together=only_one_fits)
    watcher = Watcher()
    run, beside = started(tmp_path, trials, observe=watcher)
    trial, record = measure(run, beside)
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)
    assert len(record.pairs) == 2 * BRACKET_SLICES == watcher.of(TrialMeasured)[-1].pairs
    assert record.speedup.value == pytest.approx(2.0)
    assert record.stopped_by == "time"
    assert record.peak_host_bytes > 0
    assert trial.live is None
    assert [each.configuration for each in trials.alive] == [BASELINE]


def test_what_does_not_fit_alone_is_out_of_memory(tmp_path):
    """Tried beside the baseline and alone; then it is an OOM, and the baseline is there for the next one."""
    trials = simulated_trials(fits_together=lambda alive: sum(each.batch_size for each in alive) <= 128)
    run, beside = started(tmp_path, trials)
    _, record = measure(run, beside, BASELINE.replace(batch_size=256))
    assert record.outcome is Outcome.OOM
    _, next_one = measure(run, beside, BASELINE.replace(batch_size=64))
    assert (next_one.outcome, next_one.pairing) == (Outcome.OK, Pairing.ALTERNATING)


def test_a_candidate_that_just_fits_alone_does_not_cost_the_baseline(tmp_path):
    """After an OOM the baseline is started again before the next candidate, which may leave no room for it."""
    trials = simulated_trials(fits_together=lambda alive: sum(each.batch_size for each in alive) <= 128)
    run, beside = started(tmp_path, trials)
    assert measure(run, beside, BASELINE.replace(batch_size=256))[1].outcome is Outcome.OOM
    _, record = measure(run, beside, BASELINE.replace(batch_size=128))
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)


def test_a_baseline_that_dies_beside_a_hungry_candidate_is_not_given_up(tmp_path):
    """Where it cannot be started again beside the candidate, the candidate is bracketed; the run goes on."""
    trials = simulated_trials(TWICE, fits_together=lambda alive: len(alive) == 1 or alive[0] != FAST)
    run, beside = started(tmp_path, trials)
    baseline = beside.baseline.live
    launch = trials.launch

    def launch_and_lose_the_baseline(configuration, **arguments):
        if configuration == FAST and baseline.alive:
            trials.orphaned.add(baseline)
            baseline.kill()
        return launch(configuration, **arguments)

    trials.launch = launch_and_lose_the_baseline
    _, record = measure(run, beside)
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)
    assert record.speedup.value == pytest.approx(2.0)


def lose_slices_of_the_baseline(monkeypatch, trials, outcome, *, since_slices=0):
    """Each slice of the baseline fails while `FAST` is alive, once that has had so many."""
    measure, own = SimulatedTrial.measure, []

    def losing(trial, seconds, timeout_seconds):
        if trial.configuration == FAST:
            own.append(trial)
        elif len(own) >= since_slices and FAST in [each.configuration for each in trials.alive]:
            trial.kill()
            raise TrialFailed(outcome, "the baseline's last words", log_tail="the log")
        return measure(trial, seconds, timeout_seconds)

    monkeypatch.setattr(SimulatedTrial, "measure", losing)


def test_a_baseline_that_runs_out_of_memory_beside_a_candidate_twice_is_not_given_up(tmp_path, monkeypatch):
    """In its slices, too, that is the candidate's failure: it is bracketed, and the run goes on."""
    trials = simulated_trials(TWICE)
    run, beside = started(tmp_path, trials)
    lose_slices_of_the_baseline(monkeypatch, trials, Outcome.OOM)
    _, record = measure(run, beside)
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)
    assert len(record.pairs) == 2 * BRACKET_SLICES
    assert record.speedup.value == pytest.approx(2.0)
    assert [each.configuration for each in trials.alive] == [BASELINE]


def test_a_candidate_that_leaves_the_baseline_no_memory_after_some_pairs_is_bracketed(tmp_path, monkeypatch):
    """Memory may grow late, and fit alone: its pairs are kept, and others added without the baseline beside it."""
    trials = simulated_trials(TWICE, noise=0.3)
    run, beside = started(tmp_path, trials)
    lose_slices_of_the_baseline(monkeypatch, trials, Outcome.OOM, since_slices=3)
    trial, record = measure(run, beside, measured=30.0)
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)
    assert len(record.pairs) >= 2 + 2 * BRACKET_SLICES
    assert record.speedup.value == pytest.approx(2.0, rel=0.5)
    assert trial.live is None
    _, next_one = measure(run, beside, BASELINE.replace(prefetch=2))
    assert (next_one.outcome, next_one.pairing) == (Outcome.OK, Pairing.ALTERNATING)
    assert [each.configuration for each in trials.alive] == [BASELINE]


def test_a_candidate_that_runs_out_of_memory_when_there_is_no_time_to_try_it_alone_has_run_out_of_it(
    tmp_path, monkeypatch
):
    """The pairs that it gave before make it no success."""
    trials = simulated_trials(TWICE, noise=0.3)
    run, beside = started(tmp_path, trials)
    lose_slices_of_the_baseline(monkeypatch, trials, Outcome.OOM, since_slices=3)
    ends = run.clock() + 12.0
    _, record = measure(run, beside, measured=30.0, search_ends=ends, search_last=ends)
    assert len(record.pairs) >= 2, "the case is another one"
    assert (record.outcome, record.pairing) == (Outcome.OOM, Pairing.ALTERNATING)
    assert (record.reason, record.log_tail) == ("the baseline's last words", "the log")


def test_a_card_that_another_process_holds_tells_nothing_of_memory(tmp_path):
    """Beside the baseline it is tried without; alone as well, the search ends, and a resumed one tries it again."""
    taken = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")
    run, beside = started(tmp_path, simulated_trials(failure=lambda each: taken if each == FAST else None))
    with pytest.raises(
        NoStableConfigurationError, match=r"not available any more.*busy or unavailable"
    ) as caught:
        measure(run, beside)
    assert "--resume" in caught.value.hint
    record = run.records[max(run.records)]
    assert record.outcome is Outcome.INTERRUPTED
    assert "a process that is not of this run has the card" in record.reason


def test_a_card_that_is_taken_before_the_run_is_told_as_that(tmp_path):
    """The baseline's process is the only one: what is missing is no memory."""
    taken = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")
    trials = simulated_trials(failure=lambda each: taken)
    trials.open()
    run = run_on(trials, tmp_path)
    with pytest.raises(NoStableConfigurationError, match=r"\(error\).*busy or unavailable") as caught:
        SideBySide(run).start_baseline(60.0)
    assert "nvidia-smi" in caught.value.hint


def test_a_card_that_is_taken_between_brackets_is_told_as_that(tmp_path):
    """The baseline's process is to start again, with no other alive."""
    taken = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")
    trials = simulated_trials(fits_together=only_one_fits)
    run, beside = started(tmp_path, trials)
    measure(run, beside)
    trials.failure = lambda each: taken if each == BASELINE else None
    beside.baseline.live = None
    with pytest.raises(NoStableConfigurationError, match=r"\(error\).*busy or unavailable"):
        measure(run, beside, BASELINE.replace(prefetch=2))


def test_a_baseline_that_crashes_beside_a_candidate_twice_ends_the_run(tmp_path, monkeypatch):
    """Only want of memory is laid at the candidate's door."""
    trials = simulated_trials()
    run, beside = started(tmp_path, trials)
    lose_slices_of_the_baseline(monkeypatch, trials, Outcome.CRASHED)
    with pytest.raises(NoStableConfigurationError, match=r"crashed.*the baseline's last words"):
        measure(run, beside)
    assert trials.alive == []


def test_a_baseline_that_runs_out_of_memory_alone_twice_ends_the_run(tmp_path, monkeypatch):
    """Without a candidate beside it nobody else is to blame."""
    trials = simulated_trials()
    run, beside = started(tmp_path, trials, bracketed=True)
    asked = []

    def starving(trial, seconds, timeout_seconds):
        asked.append(trial)
        trial.kill()
        raise TrialFailed(Outcome.OOM, "out of memory")

    monkeypatch.setattr(SimulatedTrial, "measure", starving)
    with pytest.raises(NoStableConfigurationError, match="oom"):
        measure(run, beside)
    assert len(asked) == 2


def test_a_bracketed_trial_is_measured_again_by_bracketing(tmp_path):
    """More slices for it do not end in the same OOM once more: it stays as good as it was."""
    trials = simulated_trials(TWICE, noise=0.05, fits_together=only_one_fits)
    run, beside = started(tmp_path, trials)
    trial, _ = measure(run, beside)
    launched = len(trials.launched)
    _, record = measure(run, beside, trial=trial)
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)
    assert len(record.pairs) == 4 * BRACKET_SLICES
    assert len(trials.launched) == launched + 2


def test_a_leader_that_just_fitted_is_bracketed_when_it_is_measured_again(tmp_path):
    """Memory holds both at one moment and not at the next: its second look is as its first would have been."""
    room = [True]
    trials = simulated_trials(TWICE, noise=0.05, fits_together=lambda alive: room[0] or len(alive) == 1)
    run, beside = started(tmp_path, trials)
    trial, first = measure(run, beside)
    room[0] = False
    _, record = measure(run, beside, trial=trial)
    assert (first.outcome, first.pairing) == (Outcome.OK, Pairing.ALTERNATING)
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)
    assert len(record.pairs) == len(first.pairs) + 2 * BRACKET_SLICES
    assert record.speedup.value == pytest.approx(2.0, rel=0.1)


def test_a_baseline_that_starts_slowly_has_the_time_to_start_again(tmp_path):
    """Two minutes, as the first time: it is not given up after a minute and a half."""
    trials = simulated_trials(TWICE, start_seconds=120.0)
    run, beside = started(tmp_path, trials, bracketed=True, baseline_seconds=400.0)
    _, record = measure(run, beside, search_ends=2000.0, search_last=2000.0, trial_timeout=300.0)
    assert (record.outcome, record.pairing) == (Outcome.OK, Pairing.BRACKETED)


def test_bracketing_can_be_asked_for(tmp_path):
    """With `--pairing bracketed` there are never two processes alive, even where they would fit."""
    seen = []
    trials = simulated_trials(TWICE, fits_together=lambda alive: seen.append(len(alive)) or True)
    run, beside = started(tmp_path, trials, bracketed=True)
    _, record = measure(run, beside)
    assert record.pairing is Pairing.BRACKETED
    assert max(seen) == 1


def test_a_steady_drift_cancels_in_brackets(tmp_path):
    """A machine that loses a third of its speed during the trial still shows the planted factor."""
    trials = simulated_trials(
        faster_by(jit_compile=1.3),
        drift=lambda seconds: math.exp(-0.03 * seconds),
        fits_together=only_one_fits,
    )
    run, beside = started(tmp_path, trials)
    _, record = measure(run, beside)
    assert record.speedup.value == pytest.approx(1.3, rel=0.02)


# -------------------------------------------------------------------------------------------- interruptions


def test_an_interrupted_trial_is_kept_as_such(tmp_path):
    """Its record says that it was stopped, its process is gone, and the search hears of it."""
    asked = []
    run, beside = started(tmp_path, simulated_trials(noise=0.3), interruptions=lambda: len(asked))
    run.observe = lambda event: asked.append(event)
    trial = run.new_trial(Phase.SEARCH, FAST)
    asked.clear()
    with pytest.raises(Interrupted):
        beside.measure(trial, a_plan(), incumbent_low=None)
    assert run.records[trial.number].outcome is Outcome.INTERRUPTED
    assert [each.configuration for each in run.trials.alive] == [BASELINE]


def test_interrupting_a_second_look_leaves_the_first(tmp_path):
    """A trial that was measured before stays what it was: it can still be confirmed."""
    asked = []
    run, beside = started(tmp_path, simulated_trials(TWICE), interruptions=lambda: len(asked))
    trial, record = measure(run, beside)
    asked.append("stop")
    with pytest.raises(Interrupted):
        measure(run, beside, trial=trial)
    assert run.records[trial.number].outcome is Outcome.OK
    assert run.records[trial.number].speedup == record.speedup


# ------------------------------------------------------------------------------------------------ the last moment


def last_moment(run, seconds):
    """A plan whose search is waited for so many seconds more."""
    return {"search_last": run.clock() + seconds, "import_seconds": 20.0}


def test_a_candidate_that_cannot_start_in_time_is_not_begun(tmp_path):
    """With less time than the baseline's start took, there is no process, and the record says why."""
    run, beside = started(tmp_path, simulated_trials(TWICE))
    trial = run.new_trial(Phase.SEARCH, FAST)
    with pytest.raises(TimeIsUp):
        measure(run, beside, trial=trial, **last_moment(run, 1.0))
    record = run.records[trial.number]
    assert (record.outcome, record.instances) == (Outcome.INTERRUPTED, 0)
    assert record.reason == "the search's time was over"


def test_a_second_look_that_cannot_start_in_time_leaves_the_record(tmp_path):
    """Of a trial that an earlier invocation measured nothing but its record is known: no figure of it is lost."""
    run, beside = started(tmp_path, simulated_trials(TWICE))
    trial, record = measure(run, beside)
    trial._warm.clear()  # as in a run that is resumed
    with pytest.raises(TimeIsUp):
        measure(run, beside, trial=trial, **last_moment(run, 1.0))
    assert run.records[trial.number] == record


def test_an_import_that_cannot_end_in_time_is_not_begun(tmp_path):
    """Other environment variables mean another template: its import counts before the trial's own start."""
    run, beside = started(tmp_path, simulated_trials(TWICE))
    other, plan = run.baseline.replace(onednn=False), a_plan(import_seconds=20.0)
    assert beside.import_seconds(other, plan) == 20.0
    assert beside.import_seconds(FAST, plan) == 0.0
    with pytest.raises(TimeIsUp):
        measure(run, beside, other, **last_moment(run, 19.0))
    measure(run, beside, other, **last_moment(run, 60.0))
    assert beside.import_seconds(other, plan) == 0.0


def test_what_was_measured_when_the_time_is_up_counts(tmp_path):
    """A trial that has pairs by then has ended well; the search hears that its time is over."""
    run, beside = started(tmp_path, simulated_trials(TWICE, noise=0.3))
    trial = run.new_trial(Phase.SEARCH, FAST)
    with pytest.raises(TimeIsUp):
        measure(run, beside, trial=trial, measured=30.0, **last_moment(run, 8.0))
    record = run.records[trial.number]
    assert (record.outcome, record.stopped_by) == (Outcome.OK, "time")
    assert len(record.pairs) >= 2


@pytest.mark.parametrize("bracketed", [False, True])
def test_a_machine_that_stands_still_is_not_waited_for_beyond_the_last_moment(tmp_path, bracketed):
    """Neither the baseline nor the candidate is blamed, and no wait is longer than the time there is."""
    trials = simulated_trials(TWICE)
    run, beside = started(tmp_path, trials, bracketed=bracketed)
    trials.drift = lambda seconds: 1e-6
    last = run.clock() + 3.0
    with pytest.raises(TimeIsUp):
        measure(run, beside, search_last=last)
    assert run.clock() <= last
    beside.end_baseline()
    assert trials.alive == []


def test_the_baseline_is_timed_in_fewer_slices_where_its_epochs_are_long(tmp_path):
    """Three of half a second, one of eight seconds."""
    run, _ = started(tmp_path / "short", simulated_trials())
    assert len(run.records[0].slices) == BASELINE_SLICES
    run, _ = started(tmp_path / "long", simulated_trials(lambda each: 12.0, examples=96))
    assert len(run.records[0].slices) == 1


def test_an_epoch_that_is_quicker_than_usual_is_taken_once(tmp_path):
    """Long epochs, half of them quicker than usual: every slice of baseline and candidate is a single one."""
    run, beside = started(
        tmp_path, simulated_trials(noise=0.05, examples=96, samples_per_second=lambda _: 12.0)
    )
    _, record = measure(run, beside)
    slices = [each for pair in record.pairs for each in (pair.baseline, pair.candidate)]
    assert {each.epochs for each in slices} == {1}
