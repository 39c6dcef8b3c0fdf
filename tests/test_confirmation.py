"""The confirmation, on simulated trials."""

import collections
import dataclasses
import itertools
import math

import pytest
from simulated_runs import (
    BASELINE,
    LIMITS,
    Watcher,
    a_pair,
    a_plan,
    a_record,
    a_slice,
    faster_by,
    log_ratios_of,
    run_on,
    simulated_trials,
)

from autotune.measure.deciding import Shortfall, Verdict
from autotune.measure.disturbance import Disturbance
from autotune.measure.intervals import TEMPLATE_DEVIATION, instance_interval
from autotune.study import confirmation
from autotune.study.confirmation import GROUPS, Confirmer
from autotune.study.confirmed import Limits, stalls_of_baseline
from autotune.study.instances import Contender
from autotune.study.plan import (
    CONFIRMATION_SHARE,
    ENOUGH_INSTANCES,
    FEWEST_ROUNDS,
    INSTANCES_OF_SEVERAL,
    MOST_INSTANCES,
    OVERRUN_SHARE,
)
from autotune.study.progress import Notice, PhaseBegan, TrialBegan, TrialMeasured
from autotune.study.running import Trial
from autotune.study.side_by_side import SideBySide
from autotune.study.slicing import SHORT_SLICE_SECONDS, SLICE_SECONDS
from autotune.trial.live import TrialFailed
from autotune.trial.record import Outcome, Pairing, Phase
from autotune.trial.simulated import SimulatedTrial

FAST = BASELINE.replace(jit_compile=True)
LARGE = BASELINE.replace(batch_size=64)
LARGER = BASELINE.replace(batch_size=128)
APART = BASELINE.replace(onednn=False)
BUSY = BASELINE.replace(steps_per_execution=8)
SPEED = faster_by(jit_compile=1.5, batch_size=1.2, steps_per_execution=1.1)


class Bench:
    """A run whose search has ended, and its confirmer."""

    def __init__(
        self,
        tmp_path,
        trials,
        *,
        limits=LIMITS,
        min_gain=0.02,
        interruptions=lambda: 0,
        left=100.0,
        plain=None,
        **plan,
    ):
        trials.open()
        self.trials = trials
        self.watcher = Watcher()
        self.run = run_on(trials, tmp_path, observe=self.watcher, interruptions=interruptions)
        beside = SideBySide(self.run)
        beside.start_baseline(60.0)
        beside.end_baseline()
        trials.retire(0)
        self.before = len(trials.launched)
        self.plan = a_plan(**{"ends": trials.clock() + left, "finalists": 1, "soak": 0.0, **plan})
        self.confirmer = Confirmer(self.run, self.plan, limits, min_gain=min_gain, plain=plain)

    def confirm(self, *configurations, pairing=Pairing.ALTERNATING, slow_to_start=None, input_wait=0.0):
        """Confirm finalists that the search has left in this order; one of them took a minute to start."""
        left = []
        for configuration in configurations:
            trial = self.run.new_trial(Phase.SEARCH, configuration)
            record = a_record(
                configuration,
                trial=trial.number,
                speedup=1.5,
                pairing=pairing,
                first_step_seconds=60.0 if configuration == slow_to_start else 1.5,
                warmup_seconds=0.5,
                input_wait_fraction=input_wait,
            )
            left.append(self.run.keep(record))
        return self.confirmer.confirm(left)

    @property
    def launched(self):
        """The processes of the confirmation."""
        return self.trials.launched[self.before :]


def crash(configuration=FAST, outcome=Outcome.CRASHED, reason="as planned"):
    """One configuration ends badly."""
    return lambda each: TrialFailed(outcome, reason) if each == configuration else None


def after(moment, trials, failure):
    """What fails from some moment on only."""
    return lambda configuration: failure(configuration) if trials.clock() > moment else None


# -------------------------------------------------------------------------------------------------- figures


def test_a_faster_finalist_is_confirmed(tmp_path):
    """The planted speed-up is inside the interval, which lies above 1; all rules passed."""
    result = Bench(tmp_path, simulated_trials(SPEED, noise=0.05, instance_noise=0.01)).confirm(FAST)
    winner = result.winner
    assert winner.configuration == FAST
    assert winner.verdict is Verdict.FASTER
    assert 1 < winner.speedup.low < 1.5 < winner.speedup.high
    assert winner.stable
    memory = {"host_memory", "host_memory_growth"}
    rules = {"finite_loss", "loss_falls", "retracing", "step_tail", "hangs"} | memory
    assert {check.name for check in winner.checks} == rules
    assert result.baseline.throughput.value == pytest.approx(4000.0, rel=0.05)
    assert winner.record.throughput.value == pytest.approx(6000.0, rel=0.05)


def test_the_luck_of_templates_is_no_gain(tmp_path):
    """Sides with templates of their own: at least 90% of 60 intervals hold the truth, and at most 3 claim a gain."""
    found = []
    for seed in range(60):
        trials = simulated_trials(SPEED, noise=0.03, template_noise=TEMPLATE_DEVIATION, seed=seed)
        found.append(Bench(tmp_path / str(seed), trials, left=200.0).confirm(APART).confirmed[0])
    assert sum(each.ratio.low <= 0 <= each.ratio.high for each in found) >= 54
    assert sum(each.verdict is Verdict.FASTER for each in found) <= 3


def test_the_luck_of_a_template_that_both_sides_share_widens_nothing(tmp_path):
    """What all forks of a template have in common cancels out, and the interval is the instances'."""
    trials = simulated_trials(SPEED, noise=0.03, template_noise=0.2)
    winner = Bench(tmp_path, trials, left=200.0).confirm(FAST).winner
    assert math.exp(winner.ratio.value) == pytest.approx(1.5, rel=0.02)
    pairs = collections.defaultdict(list)
    for pair in winner.record.pairs:
        pairs[pair.instance].append(pair)
    assert winner.ratio.high == pytest.approx(instance_interval([*map(log_ratios_of, pairs.values())]).high)


def test_the_luck_of_templates_is_allowed_for_over_plain_as_well(tmp_path):
    """Plain has the baseline's templates: what has its own has a wider interval over either."""
    bench = beside_plain(tmp_path, noise=0.01, template_noise=0.02, left=200.0)
    found = bench.confirm(COMPILED.replace(onednn=False)).confirmed[0]
    least = 1.96 * TEMPLATE_DEVIATION  # of the mean of two templates on either side
    assert found.ratio.half_width > least
    assert found.over_plain.half_width > least


def test_the_luck_of_a_single_template_is_allowed_for_as_such(tmp_path):
    """Two instances of which one failed: those of the other are forks of one template on either side."""
    trials = simulated_trials(SPEED, noise=0.001, template_noise=0.02)
    bench = Bench(tmp_path, trials, left=26.0)
    single = bench.confirmer._over(
        Contender(
            trial=bench.run.new_trial(Phase.CONFIRM, APART),
            pairing=Pairing.ALTERNATING,
            in_search=a_record(),
            groups={1},
        ),
        [[0.0, 0.0]] * 8,
        BASELINE,
    )
    assert single.half_width > 1.96 * math.sqrt(2) * TEMPLATE_DEVIATION


@pytest.mark.parametrize("left", [14.0 + 0.4 * step for step in range(12)])
def test_an_epoch_that_runs_in_is_waited_for(tmp_path, left):
    """Whenever the time is over, a slice that cannot end in it is no failure of the finalist."""
    speed = faster_by(jit_compile=1.05)
    bench = Bench(tmp_path, simulated_trials(speed, examples=5600, noise=0.02), left=left)
    (found,) = bench.confirm(FAST).confirmed
    assert found.record.outcome in (Outcome.OK, Outcome.INTERRUPTED)


def test_fewer_are_confirmed_where_slices_take_long(tmp_path):
    """Time that holds enough processes of each of three finalists does not where an epoch runs in before one counts."""

    def confirmed(name, examples, slice_seconds):
        trials = simulated_trials(SPEED, examples=examples)
        bench = Bench(tmp_path / name, trials, finalists=3, left=200.0, slice_seconds=slice_seconds)
        return bench.confirm(FAST, LARGE, LARGER)

    many, few = confirmed("steps", None, 0.5), confirmed("laps", 4000, 2.0)
    assert len(many.confirmed) == 3
    assert len(few.confirmed) < 3
    assert min(many.instances, few.instances) >= INSTANCES_OF_SEVERAL


def test_the_confirmation_times_longer_epochs_whole(tmp_path):
    """Epochs of two seconds, which the search times by steps: their ends are in the claim, and in the plan."""
    bench = Bench(tmp_path, simulated_trials(SPEED, examples=8000), finalists=3, left=170.0)
    assert bench.run.records[0].timed_by == "steps"
    result = bench.confirm(FAST, LARGE, LARGER)
    assert {each.record.timed_by for each in result.confirmed} == {result.baseline.timed_by} == {"epochs"}
    assert all(each.epochs >= 1 for each in result.baseline.slices)
    assert len(result.confirmed) < 3
    assert result.instances >= ENOUGH_INSTANCES


def test_longer_epochs_are_timed_by_steps_where_time_is_short(tmp_path):
    """Rather a claim without their ends than one of two processes, or none."""
    bench = Bench(tmp_path, simulated_trials(faster_by(jit_compile=1.05), examples=8000), left=35.0)
    (found,) = bench.confirm(FAST).confirmed
    assert found.record.timed_by == "steps"
    assert len(found.record.pairs) > 2


def test_a_bracketed_slice_is_of_as_many_epochs_as_was_planned(tmp_path):
    """Also where the baseline's epoch is longer than the finalist's, and one of them runs in."""
    bench = Bench(tmp_path, simulated_trials(faster_by(jit_compile=3.0), examples=5600), left=100.0)
    (found,) = bench.confirm(FAST, pairing=Pairing.BRACKETED).confirmed
    assert {pair.baseline.epochs for pair in found.record.pairs} == {1}
    assert found.speedup.value == pytest.approx(3.0)


def test_nothing_of_the_search_enters_the_claim(tmp_path):
    """The search saw 1.5 where there is nothing: the confirmation says what it measured itself."""
    result = Bench(tmp_path, simulated_trials(noise=0.05)).confirm(FAST)
    assert result.winner is None
    (found,) = result.confirmed
    assert found.speedup.low < 1 < found.speedup.high


def test_the_interval_is_the_one_over_instances(tmp_path):
    """It is what the instances' pairs give together, widened for the number of finalists."""
    trials = simulated_trials(SPEED, noise=0.1, instance_noise=0.05)
    result = Bench(tmp_path, trials, finalists=2, left=150.0).confirm(FAST, LARGE)
    for each in result.confirmed:
        by_instance = {}
        for pair in each.record.pairs:
            by_instance.setdefault(pair.instance, []).append(pair)
        expected = instance_interval([*map(log_ratios_of, by_instance.values())], comparisons=2)
        assert each.ratio.value == pytest.approx(expected.value)
        assert each.ratio.low == pytest.approx(expected.low)
        assert each.record.speedup.low == pytest.approx(math.exp(expected.low))
        assert result.instances == len(by_instance)


def test_a_gain_below_the_smallest_that_counts_is_none(tmp_path):
    """A sure gain of 10% where 20% are asked for is no winner."""
    result = Bench(tmp_path, simulated_trials(SPEED), min_gain=0.2).confirm(BUSY)
    assert result.confirmed[0].speedup.low > 1
    assert result.winner is None


def test_records_are_kept_of_all(tmp_path):
    """Baseline and finalists each leave one record of all their instances, with closing figures."""
    bench = Bench(tmp_path, simulated_trials(SPEED))
    result = bench.confirm(FAST)
    kept = bench.run.directory.trials
    assert kept[result.baseline.trial] == result.baseline
    assert kept[result.winner.record.trial] == result.winner.record
    for record in (result.baseline, result.winner.record):
        assert (record.phase, record.outcome) == (Phase.CONFIRM, Outcome.OK)
        assert record.instances == result.instances > 1
        assert record.peak_host_bytes > 0
        assert record.seconds >= 1.5 * result.instances, "the starts of all its processes"
    assert bench.watcher.of(TrialMeasured)


def test_what_was_measured_is_kept_when_the_run_ends_before_its_confirmation(tmp_path):
    """As at a second Ctrl-C: instances that were over, and what had been begun, are in the history, as interrupted."""
    bench = Bench(tmp_path, simulated_trials(SPEED))
    measured = []

    def stop(event):
        if isinstance(event, TrialMeasured):
            measured.append(event)
            if len(measured) == 3:
                raise KeyboardInterrupt

    bench.watcher.react = stop
    with pytest.raises(KeyboardInterrupt):
        bench.confirm(FAST)
    kept = [each for each in bench.run.directory.trials.values() if each.phase is Phase.CONFIRM]
    assert [each.outcome for each in kept] == [Outcome.INTERRUPTED] * 2
    assert all(each.reason == "the run ended before its confirmation did" for each in kept)
    (finalist,) = (each for each in kept if each.configuration == dict(FAST))
    assert len({each.instance for each in finalist.pairs}) == 3


def test_one_process_that_retraces_does_not_end_a_finalists_measuring(tmp_path):
    """Rules are medians of processes: one of two decides there, and with later ones it does not."""
    trials = simulated_trials(SPEED, noise=0.02)
    began = len(trials.launched)

    def retraces(configuration):
        of_it = [each for each in trials.launched[began:] if each.configuration == FAST]
        return int(configuration == FAST and len(of_it) == 1)

    trials.retraces = retraces
    (found,) = Bench(tmp_path, trials).confirm(FAST).confirmed
    assert len({pair.instance for pair in found.record.pairs}) > 4
    assert sum(pair.candidate.retraces for pair in found.record.pairs if pair.instance == 0) > 2
    assert found.stable


# ------------------------------------------------------------------------------------------------ instances


def test_instances_are_fresh_processes_of_two_fresh_templates(tmp_path):
    """None comes from the search's template, and both new ones are used in turn."""
    bench = Bench(tmp_path, simulated_trials(SPEED))
    result = bench.confirm(FAST)
    groups = [each.group for each in bench.launched if each.configuration == FAST]
    assert groups == [GROUPS[index % 2] for index in range(result.instances)]
    assert 0 not in GROUPS
    assert len([each for each in bench.launched if each.configuration == BASELINE]) == result.instances
    assert bench.trials.alive == []


def test_the_templates_import_side_by_side(tmp_path):
    """Both are started before either is waited for."""
    trials = simulated_trials(SPEED, import_seconds=30.0)
    bench = Bench(tmp_path, trials)
    began = trials.clock()
    bench.confirm(FAST)
    assert bench.launched[0]._requested - began == pytest.approx(30.0)


def test_the_time_is_used_and_kept(tmp_path):
    """More time means more instances, up to the largest number; the end is kept to a few percent."""
    counts = []
    for number, seconds in enumerate((20.0, 40.0, 120.0, 900.0)):
        trials = simulated_trials(SPEED, noise=0.1)
        bench = Bench(tmp_path / str(number), trials, ends=10.0 + seconds)
        counts.append(bench.confirm(FAST).instances)
        assert trials.clock() < 10.0 + seconds * 1.05
    assert counts == sorted(counts)
    assert counts[0] >= 2
    assert counts[-1] >= MOST_INSTANCES
    (record,) = (each for each in bench.run.records.values() if each.pairs)
    assert len(record.pairs) > 2 * FEWEST_ROUNDS * counts[-1]


def test_a_baseline_that_failed_once_is_not_why_there_was_too_little_time(tmp_path):
    """Its first process crashes and those after it do not; that the time then ends is told as such."""
    bench = Bench(tmp_path, simulated_trials(SPEED, import_seconds=1.0), left=14.0)
    starts = itertools.count()
    bench.trials.failure = lambda each: (
        TrialFailed(Outcome.CRASHED, "once") if each == BASELINE and next(starts) == 0 else None
    )
    result = bench.confirm(FAST)
    assert result.confirmed[0].ratio is not None
    assert result.cut_short is Shortfall.NO_TIME


@pytest.mark.parametrize("pairing", [Pairing.ALTERNATING, Pairing.BRACKETED])
def test_an_instance_that_cannot_end_in_time_is_not_begun(tmp_path, pairing):
    """With less time than the starts of one instance take, there is none, and no claim: a bracket starts three."""
    left = 2.0 if pairing is Pairing.ALTERNATING else 4.5
    bench = Bench(tmp_path, simulated_trials(SPEED, import_seconds=0.0), left=left)
    result = bench.confirm(FAST, pairing=pairing)
    assert bench.launched == []
    assert (result.instances, result.winner) == (0, None)


def test_the_luck_of_charged_stalls_is_in_the_claims_interval(tmp_path, monkeypatch):
    """Of either side, however well processes agree by chance."""
    trials = simulated_trials(SPEED, noise=0.001)
    monkeypatch.setattr(Trial, "variance_of_stalls", lambda trial, beside: 0.04)
    result = Bench(tmp_path, trials).confirm(FAST)
    expected = 1.96 * math.sqrt(2 * 0.04 / result.instances)
    assert result.confirmed[0].ratio.half_width == pytest.approx(expected, rel=0.2)


def test_processes_that_have_lost_the_card_claim_nothing(tmp_path):
    """Both sides would train on the processor, and their ratio be told as the card's."""
    trials = simulated_trials(SPEED, noise=0.02, gpus=("H200",))
    bench = Bench(tmp_path, trials)
    trials.gpus = ()
    result = bench.confirm(FAST)
    assert result.winner is None
    assert result.cut_short is Shortfall.BASELINE_FAILED
    assert result.baseline.outcome is Outcome.INTERRUPTED, "which is no failure of the baseline's"


def test_a_baseline_that_fails_now_and_then_is_told_of_and_ends_nothing(tmp_path):
    """Two failures in a row do: with processes between them that ran, the others are measured."""
    trials = simulated_trials(SPEED)
    bench = Bench(tmp_path, trials)
    starts = itertools.count(1)

    def failure(configuration):
        return crash(BASELINE)(configuration) if configuration == BASELINE and next(starts) % 3 == 0 else None

    trials.failure = failure
    result = bench.confirm(FAST)
    told = [each.text for each in bench.watcher.of(Notice) if "the baseline failed in a fresh" in each.text]
    assert len(told) >= 3
    assert result.instances >= 2 * len(told)
    assert result.winner is not None


def test_several_finalists_take_turns_in_one_round(tmp_path):
    """Every instance has one process of each, and the fastest comes first in the result."""
    bench = Bench(tmp_path, simulated_trials(SPEED, noise=0.02), finalists=3, left=200.0)
    result = bench.confirm(BUSY, LARGE, FAST)
    assert [each.configuration for each in result.confirmed] == [FAST, LARGE, BUSY]
    assert len({each.record.instances for each in result.confirmed}) == 1
    assert result.winner.configuration == FAST


def test_a_finalist_that_the_time_does_not_hold_is_passed_by(tmp_path):
    """What takes a minute to start cannot be confirmed in 80 s: the next one is, with all the time there is."""
    bench = Bench(tmp_path, simulated_trials(SPEED, noise=0.02), left=80.0)
    result = bench.confirm(FAST, LARGE, slow_to_start=FAST)
    assert result.winner.configuration == LARGE
    assert [each.configuration for each in result.confirmed] == [LARGE]
    enough = Bench(tmp_path, simulated_trials(SPEED, noise=0.02), left=400.0)
    assert enough.confirm(FAST, LARGE, slow_to_start=FAST).winner.configuration == FAST


def pairs_where_starts_take(path, usual, later, *, left):
    """The pairs of each instance where processes take `usual` seconds more to start, and those of the third `later`."""
    trials = simulated_trials(SPEED, noise=0.02)
    launch, numbers = trials.launch, itertools.count()

    def slowly(*arguments, **settings):
        trials.clock.advance(later if next(numbers) in (4, 5) else usual)
        return launch(*arguments, **settings)

    trials.launch = slowly
    (found,) = Bench(path, trials, left=left).confirm(FAST).confirmed
    return list(collections.Counter(pair.instance for pair in found.record.pairs).values())


@pytest.mark.parametrize(
    ("later", "least"), [(14.0, FEWEST_ROUNDS), (18.0, 1)]
)  # one that fits; one that nearly does
def test_a_process_that_starts_late_does_not_cost_an_instance(tmp_path, later, least):
    """Four of which the last has fewer slices say more than three: Student's t is 3.2 instead of 4.3."""
    *whole, last = pairs_where_starts_take(tmp_path, 8.0, later, left=150.0)
    assert len(whole) == ENOUGH_INSTANCES - 1
    assert least <= last < max(whole)


@pytest.mark.parametrize("later", [1.0, 4.0, 7.0, 10.0])
def test_beyond_enough_instances_none_is_begun_that_is_too_short(tmp_path, later):
    """All count alike, so one of few slices would add its noise to the claim."""
    *whole, last = pairs_where_starts_take(tmp_path, 1.0, later, left=90.0)
    assert len(whole) >= ENOUGH_INSTANCES
    assert last >= 0.4 * max(whole)


def test_what_is_found_does_not_change_how_much_is_measured(tmp_path):
    """As many instances for a winner as for what is not faster at all: the time alone decides."""
    counts = {
        speedup: Bench(
            tmp_path / str(speedup),
            simulated_trials(faster_by(jit_compile=speedup), examples=None),
            left=60.0,
        )
        .confirm(FAST)
        .instances
        for speedup in (0.5, 1.0, 3.0)
    }
    assert len(set(counts.values())) == 1


def test_what_was_not_confirmed_comes_with_the_reason_and_a_budget(tmp_path):
    """No time, a stop, a baseline that fails: each is told apart; the budget has room for the finalist's start."""
    short = Bench(tmp_path / "a", simulated_trials(SPEED), left=3.0).confirm(FAST)
    assert (short.instances, short.cut_short) == (0, Shortfall.NO_TIME)
    assert short.confirmed[0].in_search.value == 1.5
    slow = Bench(tmp_path / "b", simulated_trials(SPEED), left=80.0).confirm(FAST, slow_to_start=FAST)
    assert slow.sufficient_budget > short.sufficient_budget > 300.0
    assert slow.sufficient_budget > 4 * 60.0 / CONFIRMATION_SHARE
    failing = Bench(tmp_path / "c", simulated_trials(SPEED))
    failing.trials.failure = crash(BASELINE)
    assert failing.confirm(FAST).cut_short is Shortfall.BASELINE_FAILED
    asked = []
    stopped = Bench(tmp_path / "d", simulated_trials(SPEED), interruptions=lambda: len(asked))
    stopped.watcher.react = lambda event: asked.append(event) if isinstance(event, TrialMeasured) else None
    assert stopped.confirm(FAST).cut_short is Shortfall.INTERRUPTED


@pytest.mark.parametrize("pairing", [Pairing.ALTERNATING, Pairing.BRACKETED])
def test_a_machine_that_stands_still_is_not_waited_for_beyond_the_budget(tmp_path, pairing):
    """From some moment on no slice ends: nobody is blamed, and what was measured before stands."""
    trials = simulated_trials(SPEED, noise=0.02)
    bench = Bench(tmp_path, trials, left=100.0)
    moment = trials.clock() + 60.0
    trials.drift = lambda seconds: 1.0 if seconds < moment else 1e-6
    result = bench.confirm(FAST, pairing=pairing)
    assert trials.clock() <= bench.plan.ends + OVERRUN_SHARE * bench.plan.budget + 2.0
    assert result.instances >= 2
    assert bench.trials.alive == []


@pytest.mark.parametrize(("left", "start"), [(14.0, 2.0), (18.0, 3.0), (21.0, 3.0), (24.0, 3.0), (30.0, 6.0)])
def test_little_time_means_fewer_slices_and_not_shorter_ones(tmp_path, left, start):
    """Processes that start slower than they did in the search leave less: instances share it, and slices stay whole."""
    trials = simulated_trials(SPEED, noise=0.02, examples=None, import_seconds=0.0)
    bench = Bench(tmp_path, trials, left=left)
    trials.start_seconds = start
    result = bench.confirm(FAST)
    pairs = result.confirmed[0].record.pairs
    for pair in pairs:
        usual = SHORT_SLICE_SECONDS if pair.instance else SLICE_SECONDS
        assert min(pair.candidate.seconds, pair.baseline.seconds) > 0.8 * usual
    taken = [
        sum(pair.baseline.seconds + pair.candidate.seconds for pair in pairs if pair.instance == each)
        for each in range(result.instances)
    ]
    assert len(taken) >= 2
    assert max(taken) - min(taken) < 2.1 * (SLICE_SECONDS + SHORT_SLICE_SECONDS), "a round of each kind"
    assert trials.clock() <= bench.plan.ends + OVERRUN_SHARE * bench.plan.budget


# ------------------------------------------------------------------------------------------------- failures


def test_a_finalist_that_fails_makes_way_for_the_next(tmp_path):
    """With one finalist at a time, the second is confirmed when the first crashes; both count as compared."""
    bench = Bench(tmp_path, simulated_trials(SPEED, failure=crash()))
    result = bench.confirm(FAST, LARGE)
    assert result.winner.configuration == LARGE
    assert {each.record.outcome for each in result.confirmed} == {Outcome.OK, Outcome.CRASHED}
    (failed,) = (each for each in result.confirmed if each.configuration == FAST)
    said = bench.watcher.of(Notice)[0].text
    assert said.startswith(f"trial {failed.record.trial} failed in its confirmation (")
    assert said.endswith("; the next finalist takes its place")
    assert failed.speedup is None
    assert not failed.stable


def test_the_others_go_on_when_one_finalist_fails(tmp_path):
    """A crash in the third instance costs the crashed finalist its chance, and nobody else's."""
    trials = simulated_trials(SPEED)
    bench = Bench(tmp_path, trials, finalists=2)
    trials.failure = after(trials.clock() + 30.0, trials, crash())
    result = bench.confirm(FAST, LARGE)
    assert result.winner.configuration == LARGE
    failed = next(each for each in result.confirmed if each.configuration == FAST)
    assert failed.record.outcome is Outcome.CRASHED
    assert not failed.stable
    assert failed.record.pairs


def test_a_baseline_that_fails_in_one_template_is_tried_again_there(tmp_path):
    """Else both instances of a short confirmation would be of the other template."""
    trials = simulated_trials(SPEED)
    bench = Bench(tmp_path, trials, left=32.0)
    starts = itertools.count(1)
    trials.failure = lambda each: (
        TrialFailed(Outcome.CRASHED, "once") if each == BASELINE and next(starts) == 2 else None
    )
    result = bench.confirm(FAST)
    assert result.winner.templates == len(GROUPS)
    groups = [each.group for each in bench.launched if each.configuration == BASELINE]
    assert groups[:3] == [GROUPS[0], GROUPS[1], GROUPS[1]]


def test_a_finalist_of_one_process_is_of_one_template(tmp_path):
    """What failed in the second instance does not count that one's template."""
    trials = simulated_trials(SPEED)
    bench = Bench(tmp_path, trials)
    starts = itertools.count(1)
    trials.failure = lambda each: (
        TrialFailed(Outcome.CRASHED, "later") if each == FAST and next(starts) == 2 else None
    )
    (found,) = bench.confirm(FAST).confirmed
    assert (found.ratio.count, found.templates) == (1, 1)


def test_forks_of_one_template_prove_nothing(tmp_path, monkeypatch):
    """However many processes there are: what one interpreter gives to them would be in each."""
    monkeypatch.setattr(confirmation, "GROUPS", (1, 1))
    result = Bench(tmp_path, simulated_trials(SPEED)).confirm(FAST)
    (found,) = result.confirmed
    assert found.ratio.low > math.log(1.4)
    assert (found.templates, found.verdict, result.winner) == (1, Verdict.NO_SIGNIFICANT_GAIN, None)


@pytest.mark.parametrize("finalists", [(FAST,), (FAST, LARGE)])
def test_orders_are_drawn_and_turned_round(tmp_path, monkeypatch, finalists):
    """Every second round takes the order of the one before backwards: a drift favours nobody."""
    taken = []

    def measure(trial, seconds, timeout):
        taken.append((len(bench.launched), trial))
        return usual(trial, seconds, timeout)

    usual = SimulatedTrial.measure
    bench = Bench(tmp_path, simulated_trials(SPEED), finalists=len(finalists), left=200.0)
    monkeypatch.setattr(SimulatedTrial, "measure", measure)
    bench.confirm(*finalists)
    sides = 1 + len(finalists)
    drawn = []
    for _, group in itertools.groupby(taken, key=lambda each: each[0]):
        trials = [trial for _, trial in group]
        rounds = [trials[at : at + sides] for at in range(0, len(trials), sides)]
        assert len(rounds) > 2
        assert all(set(each) == set(trials) for each in rounds)
        assert all(after == before[::-1] for before, after in zip(rounds[::2], rounds[1::2], strict=False))
        drawn += [tuple(each.configuration for each in one) for one in rounds[::2]]
    assert set(drawn) == set(itertools.permutations({trial.configuration for _, trial in taken}))


def test_what_pauses_gave_is_taken_off_as_often_as_there_were_pauses(tmp_path):
    """Slices that follow on their own process's had none: with a gain of 30% a pause, claims have 20 and more of it."""
    values = []
    for seed in range(8):
        trials = simulated_trials(
            SPEED, noise=0.01, seed=seed, freeze_gain=lambda each: 1.3 if each == FAST else 1.0
        )
        bench = Bench(tmp_path / str(seed), trials, soak=30.0)
        (found,) = bench.confirm(FAST).confirmed
        assert found.replaced
        assert 1.5 * 1.1 < math.exp(found.in_slices.value) < 1.5 * 1.25
        values.append(found.ratio.value)
    assert math.exp(sum(values) / len(values)) == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize(("most", "finalists"), [(2, (FAST, LARGE)), (1, (FAST,))])
def test_a_baseline_that_finds_no_memory_beside_finalists_gets_room(tmp_path, most, finalists):
    """Where it runs out of memory in a slice, fewer are alive at once from then on, and nobody is blamed."""
    trials = simulated_trials(SPEED, noise=0.01)
    bench = Bench(tmp_path, trials, finalists=len(finalists), left=250.0)
    usual = SimulatedTrial.measure

    def measure(trial, seconds, timeout):
        if trial.configuration == BASELINE and len(trials.alive) > most:
            trial.kill()
            raise TrialFailed(Outcome.OOM, "killed by the kernel")
        return usual(trial, seconds, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedTrial, "measure", measure)
        result = bench.confirm(*finalists)
    assert result.winner.configuration == FAST
    assert all(each.record.outcome is Outcome.OK for each in result.confirmed)
    bracketed = result.winner.record.pairing is Pairing.BRACKETED
    assert bracketed == (most == 1)


def test_a_baseline_that_fails_once_costs_one_instance(tmp_path):
    """The finalists are not blamed for it."""
    trials = simulated_trials(SPEED)
    bench = Bench(tmp_path, trials)
    failures = [TrialFailed(Outcome.CRASHED, "once")]
    trials.failure = lambda each: failures.pop() if each == BASELINE and failures else None
    result = bench.confirm(FAST)
    assert result.winner.configuration == FAST
    assert result.baseline.outcome is Outcome.OK


def test_a_baseline_that_keeps_failing_leaves_nothing_to_claim(tmp_path):
    """Its record says what happened; no finalist is faster than nothing."""
    trials = simulated_trials(SPEED)
    bench = Bench(tmp_path, trials)
    trials.failure = crash(BASELINE)
    result = bench.confirm(FAST)
    assert result.winner is None
    assert result.baseline.outcome is Outcome.CRASHED
    assert result.confirmed[0].record.outcome is Outcome.INTERRUPTED
    assert result.confirmed[0].ratio is None


@pytest.mark.parametrize(
    ("limits", "gpus", "name"),
    [
        (dataclasses.replace(LIMITS, host_bytes=1 << 20), (), "host_memory"),
        (Limits(host_bytes=8 << 30, device_bytes=1 << 20), ("NVIDIA H200",), "device_memory"),
    ],
)
def test_a_rule_that_is_broken_makes_a_finalist_unstable(tmp_path, limits, gpus, name):
    """However fast it is: over the memory limit it is not recommended, and its record says why."""
    trials = simulated_trials(lambda each: 6000.0 if each["jit_compile"] else 4000.0, gpus=gpus)
    bench = Bench(tmp_path, trials, limits=limits)
    result = bench.confirm(bench.run.baseline.replace(jit_compile=True))
    (found,) = result.confirmed
    assert found.verdict is Verdict.FASTER
    assert result.winner is None
    assert found.record.outcome is Outcome.UNSTABLE
    assert name in found.record.reason


def test_what_the_process_may_take_is_the_limit(tmp_path):
    """A training on a part of a card, or one that limits itself, does not have all that the machine's card has."""
    trials = simulated_trials(SPEED, noise=0.02, gpus=("NVIDIA H200",), device_limit_bytes=1 << 20)
    limits = Limits(host_bytes=8 << 30, device_bytes=141 << 30)
    (found,) = Bench(tmp_path, trials, limits=limits).confirm(FAST).confirmed
    assert found.record.outcome is Outcome.UNSTABLE
    assert "device_memory" in found.record.reason


def only(configuration, figure, usual):
    """What one configuration does at each slice, and what all others do."""
    return lambda each: figure if each == configuration else usual


def every(count, seconds):
    """A call that takes so much longer in each so-manieth slice of a configuration under XLA."""
    slices = itertools.count(1)
    return lambda each: seconds if each == FAST and next(slices) % count == 0 else 0.0


@pytest.mark.parametrize(
    ("behaviour", "rule"),
    [
        ({"retraces": only(FAST, 1, 0)}, "retracing"),
        ({"slow_calls": only(FAST, 0.9, 0.0)}, "step_tail"),
        ({"slow_calls": every(4, 2.5)}, "hangs"),
        ({"skipped_share": only(FAST, 0.2, None)}, "loss_scale"),
    ],
)
@pytest.mark.parametrize("pairing", [Pairing.ALTERNATING, Pairing.BRACKETED])
def test_an_unstable_finalist_hands_over_to_the_next(tmp_path, behaviour, rule, pairing):
    """One that retraces, stalls, hangs or skips steps, where the baseline does not, makes way however fast it is."""
    bench = Bench(tmp_path, simulated_trials(SPEED, noise=0.005, **behaviour), left=600.0)
    result = bench.confirm(FAST, LARGE, pairing=pairing)
    assert result.winner.configuration == LARGE
    (refused,) = (each for each in result.confirmed if each.configuration == FAST)
    assert refused.verdict is Verdict.FASTER
    assert [check.name for check in refused.checks if not check.passed] == [rule]
    assert (refused.record.outcome, refused.record.reason[: len(rule)]) == (Outcome.UNSTABLE, rule)
    said = f"trial {refused.record.trial} broke a rule in its confirmation ({rule}); the next finalist takes its place"
    assert bench.watcher.of(Notice)[0].text == said


@pytest.mark.parametrize(
    "behaviour",
    [
        {"retraces": lambda each: 1},
        {"slow_calls": lambda each: 0.9},
        {"slow_calls": lambda each: 2.5},
        {"skipped_share": lambda each: 0.2},
    ],
)
def test_what_the_baseline_does_as_well_is_nobodys_fault(tmp_path, behaviour):
    """The workload itself retraces, stalls, hangs or skips steps: a faster configuration wins all the same."""
    bench = Bench(tmp_path, simulated_trials(SPEED, noise=0.02, **behaviour))
    assert bench.confirm(FAST).winner.configuration == FAST


def test_records_count_what_was_seen(tmp_path):
    """Retraces and skipped steps of all slices are summed; what was not seen is None, and is no check."""
    trials = simulated_trials(SPEED, retraces=lambda each: 2, skipped_share=lambda each: 0.25)
    record = Bench(tmp_path / "seen", trials).confirm(FAST).confirmed[0].record
    assert record.retraces == 2 * len(record.pairs)
    assert record.skipped_steps == sum(pair.candidate.skipped_steps for pair in record.pairs) > 0
    unseen = Bench(tmp_path / "unseen", simulated_trials(SPEED, retraces=only(FAST, None, 0))).confirm(FAST)
    assert (unseen.winner.record.retraces, unseen.winner.record.skipped_steps) == (None, None)
    assert not {"retracing", "loss_scale"} & {check.name for check in unseen.winner.checks}


# ---------------------------------------------------------------------------------------------- bracketing


def test_how_long_it_waits_for_input_is_asked_of_one_process(tmp_path, monkeypatch):
    """The measurement is not repeated in each instance, and what it gave stands in the records."""
    asked, finish = [], SimulatedTrial.finish

    def finish_noted(trial, input_wait_seconds, timeout_seconds):
        if input_wait_seconds:
            asked.append(trial.configuration)
        return finish(trial, input_wait_seconds, timeout_seconds)

    bench = Bench(tmp_path, simulated_trials(SPEED, noise=0.02))
    monkeypatch.setattr(SimulatedTrial, "finish", finish_noted)
    result = bench.confirm(FAST)
    assert result.instances > 2
    assert sorted(asked, key=str) == sorted([BASELINE, FAST], key=str)
    for record in (result.baseline, result.confirmed[0].record):
        assert record.input_wait_fraction is not None


def test_what_does_not_tell_how_long_it_waits_is_not_asked_for_ever(tmp_path, monkeypatch):
    """Where the answer does not come, a second process is asked, and no third."""
    asked, finish = [], SimulatedTrial.finish

    def finish_silently(trial, input_wait_seconds, timeout_seconds):
        if input_wait_seconds:
            asked.append(trial.configuration)
        return finish(trial, 0.0, timeout_seconds)

    bench = Bench(tmp_path, simulated_trials(SPEED, noise=0.02))
    monkeypatch.setattr(SimulatedTrial, "finish", finish_silently)
    assert bench.confirm(FAST).instances > 3
    assert asked.count(FAST) == 2
    assert asked.count(BASELINE) == 2


def test_what_was_bracketed_in_the_search_is_bracketed_again(tmp_path):
    """Never two alive, and the claim is the planted factor."""
    trials = simulated_trials(SPEED, fits_together=lambda alive: len(alive) == 1)
    result = Bench(tmp_path, trials).confirm(FAST, pairing=Pairing.BRACKETED)
    assert result.winner.configuration == FAST
    assert result.winner.record.pairing is Pairing.BRACKETED
    assert result.winner.speedup.value == pytest.approx(1.5, rel=0.01)
    assert result.instances >= 2


def test_finalists_that_do_not_all_fit_together_are_measured_in_twos(tmp_path):
    """Beside the baseline alone each does fit: from the next instance on, each has the baseline to itself."""
    trials = simulated_trials(SPEED, noise=0.02, fits_together=lambda alive: len(alive) <= 2)
    result = Bench(tmp_path, trials, finalists=2, ends=300.0).confirm(LARGE, FAST)
    assert result.winner.configuration == FAST
    assert {each.record.pairing for each in result.confirmed} == {Pairing.ALTERNATING}
    assert {each.record.outcome for each in result.confirmed} == {Outcome.OK}


def test_a_finalist_without_room_beside_the_baseline_is_bracketed(tmp_path):
    """What fits beside nothing is measured apart, not failed."""
    trials = simulated_trials(SPEED, noise=0.02, fits_together=lambda alive: len(alive) <= 1)
    result = Bench(tmp_path, trials, ends=300.0).confirm(FAST)
    assert result.winner.record.pairing is Pairing.BRACKETED


def test_a_bracketed_finalist_is_not_blamed_for_the_baseline(tmp_path):
    """When the baseline's process fails between brackets, the instance is lost and no more."""
    trials = simulated_trials(SPEED)
    bench = Bench(tmp_path, trials)
    failures = [TrialFailed(Outcome.CRASHED, "once")]
    trials.failure = lambda each: failures.pop() if each == BASELINE and failures else None
    result = bench.confirm(FAST, pairing=Pairing.BRACKETED)
    assert result.winner.configuration == FAST


@pytest.mark.parametrize("times", [1, 1000])
def test_a_card_that_another_process_holds_is_no_finalists_fault(tmp_path, times):
    """First it is tried with the baseline gone; then the instance has failed: once it is made up for, twice it ends."""
    trials = simulated_trials(SPEED, noise=0.02)
    bench = Bench(tmp_path, trials, left=300.0)
    taken = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")
    failures = [taken] * (1 + times)  # beside the baseline, and alone
    trials.failure = lambda each: failures.pop() if each == FAST and failures else None
    result = bench.confirm(FAST)
    (found,) = result.confirmed
    if times == 1:
        assert result.winner is found
    else:
        assert result.cut_short is Shortfall.BASELINE_FAILED
        assert found.record.outcome is Outcome.INTERRUPTED
        assert "nvidia-smi" in bench.watcher.of(Notice)[-1].text


@pytest.mark.parametrize("pairing", list(Pairing))
def test_a_card_that_is_gone_in_the_soak_takes_no_claim_away(tmp_path, pairing):
    """Its instances were measured; the continuous run is what is missing. Both sides' processes may find it so."""
    taken = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")
    trials = simulated_trials(SPEED, noise=0.02, gpus=("H200",))
    bench = Bench(tmp_path, trials, left=300.0, soak=100.0)

    def lose(event):
        if isinstance(event, PhaseBegan) and "continuous" in event.detail:
            if pairing is Pairing.BRACKETED:
                trials.failure = lambda each: taken if each == FAST else None
            else:
                trials.gpus = ()

    bench.watcher.react = lose
    result = bench.confirm(FAST, pairing=pairing)
    assert result.winner.configuration == FAST
    assert result.winner.soaked is None
    assert len(bench.watcher.of(PhaseBegan)) == 2


def test_a_card_that_is_taken_before_an_instance_makes_no_room(tmp_path):
    """The baseline starts alone: that it cannot is no want of memory, and the next instance measures side by side."""
    trials = simulated_trials(SPEED, noise=0.02)
    bench = Bench(tmp_path, trials)
    failures = [TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")]
    trials.failure = lambda each: failures.pop() if each == BASELINE and failures else None
    result = bench.confirm(FAST)
    assert result.winner.record.pairing is Pairing.ALTERNATING


# -------------------------------------------------------------------------------------------- interruptions


def test_an_interruption_ends_the_confirmation_after_the_instance(tmp_path):
    """What was measured by then is what there is, and known to be less than there was time for; processes are gone."""
    asked = []
    bench = Bench(tmp_path, simulated_trials(SPEED), interruptions=lambda: len(asked))
    bench.watcher.react = lambda event: asked.append(event) if isinstance(event, TrialMeasured) else None
    result = bench.confirm(FAST, LARGE)
    assert (result.instances, result.stopped) == (1, True)
    assert [each.configuration for each in result.confirmed] == [FAST]
    assert result.winner is None
    assert bench.trials.alive == []


def test_an_interruption_of_the_search_does_not_end_the_confirmation(tmp_path):
    """Who stopped the search wants an answer: only another interruption stops this."""
    bench = Bench(tmp_path, simulated_trials(SPEED), interruptions=lambda: 1)
    assert bench.confirm(FAST).winner.configuration == FAST


def test_a_records_seconds_hold_its_slices(tmp_path):
    """What a finalist and the baseline took is starting and being measured, not starting alone."""
    result = Bench(tmp_path, simulated_trials(SPEED)).confirm(FAST)
    for record in (result.baseline, result.confirmed[0].record):
        assert record.seconds > record.measured_seconds > 0


@pytest.mark.parametrize(("margin", "stable"), [(0.1, True), (0.5, False)])
def test_the_memory_margin_is_the_users(tmp_path, margin, stable):
    """A peak of two thirds of the memory is fine with a tenth to be kept free, and not with half."""
    limits = Limits(host_bytes=800 << 20, device_bytes=None, margin=margin)
    result = Bench(tmp_path, simulated_trials(SPEED), limits=limits).confirm(FAST)
    assert result.confirmed[0].stable is stable


def test_a_finalist_that_breaks_a_rule_hands_over(tmp_path):
    """Too large for the machine, however fast: the next one is confirmed in its place, and the first is `unstable`."""
    limits = Limits(host_bytes=int(515 / 0.9) << 20, device_bytes=None)  # 514 MiB for 32 examples, 516 for 64
    bench = Bench(tmp_path, simulated_trials(SPEED), limits=limits, left=900.0)
    result = bench.confirm(LARGE, FAST)
    by_configuration = {each.configuration: each for each in result.confirmed}
    assert by_configuration[LARGE].record.outcome is Outcome.UNSTABLE
    assert result.winner is not None
    assert result.winner.configuration == FAST
    assert "broke a rule in its confirmation (host_memory)" in bench.watcher.of(Notice)[0].text


# ---------------------------------------------------------------------------------------------------- plain

COMPILED = BASELINE.replace(jit_compile=True)
FASTER = COMPILED.replace(steps_per_execution=8)


def beside_plain(tmp_path, *, left=120.0, speed=None, finalists=1, **settings):
    """A bench on which "auto" means XLA, a gain of 1.5, so that the baseline is not plain; 1.1 more is to be had."""
    trials = simulated_trials(speed or SPEED, jit_resolves_to=True, **settings)
    return Bench(tmp_path, trials, left=left, finalists=finalists, plain=BASELINE)


def test_plain_takes_turns_in_the_same_rounds(tmp_path):
    """A process of it in each instance, a slice in each round; the ratios over it are the planted ones."""
    bench = beside_plain(tmp_path, noise=0.05, instance_noise=0.005)
    result = bench.confirm(FASTER)
    assert result.plain.left_out == ""
    assert math.exp(result.plain.ratio.inverse.low) < 1.5 < math.exp(result.plain.ratio.inverse.high)
    assert math.exp(result.winner.over_plain.low) < 1.65 < math.exp(result.winner.over_plain.high)
    assert result.winner.over_plain.count == result.plain.ratio.count == result.instances >= 4
    assert len(result.plain.record.pairs) == len(result.winner.record.pairs)
    assert result.plain.record.throughput.value == pytest.approx(4000.0, rel=0.05)
    groups = [each.group for each in bench.launched if each.configuration == BASELINE]
    assert groups == [GROUPS[index % 2] for index in range(result.instances)]
    assert bench.run.directory.trials[result.plain.record.trial] == result.plain.record


def test_the_luck_of_charged_stalls_is_in_the_intervals_over_plain_as_well(tmp_path, monkeypatch):
    """The baseline's and the winner's."""
    monkeypatch.setattr(Trial, "variance_of_stalls", lambda trial, beside: 0.04)
    result = beside_plain(tmp_path, noise=0.001).confirm(FAST)
    least = 1.9 * math.sqrt(2 * 0.04 / result.instances)
    (found,) = result.confirmed
    assert min(found.over_plain.half_width, result.plain.ratio.half_width) > least


def test_the_ratio_over_plain_is_of_slices_of_the_same_round(tmp_path):
    """What the baseline's slices have of noise is in neither side: without noise of theirs, the interval is narrow."""
    bench = beside_plain(tmp_path, noise=0.0)
    trials, pace = bench.trials, bench.trials.samples_per_second
    trials.samples_per_second = lambda each: (
        pace(each) * (math.exp(trials.random.gauss(0.0, 0.3)) if each == COMPILED else 1.0)
    )
    winner = bench.confirm(FASTER).confirmed[0]
    assert winner.over_plain.half_width < 0.1 * winner.ratio.half_width
    assert winner.over_plain.value == pytest.approx(math.log(1.65), abs=0.001)


def test_an_instance_that_the_claim_drops_is_not_in_the_ratio_over_plain_either(tmp_path):
    """The baseline dies in an instance, after some rounds: neither figure has that process."""
    bench = beside_plain(tmp_path, noise=0.02)
    trials, took = bench.trials, itertools.count()
    pace = trials.samples_per_second

    def dies_once(each):
        if each == COMPILED and bench.launched and next(took) == 25:
            raise TrialFailed(Outcome.CRASHED, "in the midst of its slices")
        return pace(each)

    trials.samples_per_second = dies_once
    found = bench.confirm(FASTER).confirmed[0]
    instances = {pair.instance for pair in found.record.pairs}
    assert len(instances) == found.ratio.count + 1, "the case is another one"
    assert found.over_plain.count == found.ratio.count


def test_plain_is_no_contender(tmp_path):
    """Faster than all, it does not win, and widens nobody's interval."""
    found = beside_plain(
        tmp_path / "a", speed=faster_by(jit_compile=0.5, batch_size=1.2), noise=0.05
    ).confirm(COMPILED.replace(batch_size=64))
    assert found.winner.configuration == COMPILED.replace(batch_size=64)
    assert len(found.confirmed) == 1
    pairs = {}
    for pair in found.winner.record.pairs:
        pairs.setdefault(pair.instance, []).append(pair)
    expected = instance_interval([*map(log_ratios_of, pairs.values())], comparisons=1)
    assert found.winner.ratio.value == pytest.approx(expected.value)
    assert found.winner.ratio.low == pytest.approx(expected.low)
    nothing = beside_plain(tmp_path / "b", speed=faster_by(jit_compile=0.5), noise=0.02).confirm(FASTER)
    assert nothing.winner is None
    assert math.exp(nothing.plain.ratio.value) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("asked", [None, COMPILED])
def test_plain_that_is_the_baseline_is_not_measured_again(tmp_path, asked):
    """Nor where nobody asks for it."""
    bench = Bench(tmp_path, simulated_trials(SPEED, jit_resolves_to=True), plain=asked)
    result = bench.confirm(FASTER)
    assert result.plain is None
    assert {each.configuration for each in bench.launched} == {COMPILED, FASTER}


def test_plain_makes_way_where_time_is_short(tmp_path):
    """Where it would leave fewer than four instances, the finalist has all the time, as without it."""
    short = beside_plain(tmp_path / "a", left=30.0)
    alone = Bench(tmp_path / "b", simulated_trials(SPEED, jit_resolves_to=True), left=30.0)
    result = short.confirm(FASTER)
    assert "with it, the time would not have held 4 fresh processes of each" in result.plain.left_out
    assert result.plain.record is None
    assert result.instances == alone.confirm(FASTER).instances >= 2
    assert BASELINE not in {each.configuration for each in short.launched}


@pytest.mark.parametrize("finalists", [1, 2])
def test_plain_makes_way_where_memory_is_short(tmp_path, finalists):
    """Where one process less fits, the finalists stay side by side and are confirmed; plain is left out."""
    bench = beside_plain(
        tmp_path, left=250.0, finalists=finalists, fits_together=lambda alive: len(alive) <= finalists + 1
    )
    larger = COMPILED.replace(batch_size=64)
    result = bench.confirm(FASTER, larger)
    assert len(result.confirmed) == finalists
    assert result.winner.stable
    assert {each.record.pairing for each in result.confirmed} == {Pairing.ALTERNATING}
    assert "memory" in result.plain.left_out
    assert result.plain.ratio is None
    processes = [each.configuration for each in bench.launched]
    assert processes.count(BASELINE) == 1
    assert processes.count(COMPILED) == result.instances >= 4
    assert bench.trials.alive == []


@pytest.mark.parametrize("victim", [COMPILED, FASTER], ids=["baseline", "finalist"])
def test_memory_that_plain_takes_from_others_is_not_their_fault(tmp_path, victim):
    """When another one is out of memory while plain is alive, plain goes, and the other has its instances."""
    bench = beside_plain(tmp_path)
    trials = bench.trials
    launch, spoiled = trials.launch, []

    def and_spoil(configuration, **how):
        live = launch(configuration, **how)
        if configuration == BASELINE and not spoiled:
            spoiled.append(live)
            other = next(each for each in trials.alive if each.configuration == victim)
            other.measure = lambda *_: (_ for _ in ()).throw(
                other._ended(TrialFailed(Outcome.OOM, "as planned"))
            )
        return live

    trials.launch = and_spoil
    result = bench.confirm(FASTER)
    assert spoiled
    assert result.winner.configuration == FASTER
    assert result.winner.record.pairing is Pairing.ALTERNATING
    assert result.baseline.outcome is Outcome.OK
    assert result.instances >= 4
    assert "memory" in result.plain.left_out


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMEOUT, Outcome.NONFINITE])
@pytest.mark.parametrize("later", [0.0, 30.0])
def test_a_failure_of_plain_harms_nothing(tmp_path, outcome, later):
    """At once or after some instances: the finalist is confirmed, in as many instances as the time left holds."""
    bench = beside_plain(tmp_path)
    bench.trials.failure = after(bench.trials.clock() + later, bench.trials, crash(BASELINE, outcome))
    result = bench.confirm(FASTER)
    assert result.winner.configuration == FASTER
    assert result.instances >= 6
    assert result.plain.left_out == "as planned"
    assert result.plain.record.outcome is outcome
    assert bench.trials.clock() <= bench.plan.ends + OVERRUN_SHARE * bench.plan.budget
    assert bench.trials.alive == []


def test_a_failure_of_plain_without_a_word_is_named_by_its_outcome(tmp_path):
    """An exception may have no message."""
    bench = beside_plain(tmp_path)
    bench.trials.failure = after(bench.trials.clock(), bench.trials, crash(BASELINE, Outcome.ERROR, ""))
    assert bench.confirm(FASTER).plain.left_out == "error"


def test_what_is_bracketed_is_not_held_against_plain(tmp_path):
    """Where two do not fit, three are not tried."""
    bench = beside_plain(tmp_path, fits_together=lambda alive: len(alive) == 1)
    result = bench.confirm(FASTER, pairing=Pairing.BRACKETED)
    assert result.winner.configuration == FASTER
    assert "memory" in result.plain.left_out
    assert BASELINE not in {each.configuration for each in bench.launched}


def test_the_next_finalist_is_held_against_plain_too(tmp_path):
    """The first fails; plain goes on beside the one that takes its place, and is not measured on its own before."""
    bench = beside_plain(tmp_path)
    bench.trials.failure = crash(FASTER)
    larger = COMPILED.replace(batch_size=64)
    result = bench.confirm(FASTER, larger)
    assert result.winner.configuration == larger
    assert math.exp(result.winner.over_plain.value) == pytest.approx(1.8, rel=0.01)
    assert len(result.plain.record.pairs) == len(result.winner.record.pairs)
    assert len(bench.watcher.of(TrialBegan)) == len(bench.run.records), "one trial of plain for all"


def test_stalls_are_told_by_undisturbed_slices_of_whole_epochs():
    """A burst of foreign load holds up an epoch's end as well, and says nothing of `tf.data`."""

    def pair(late, **fields):
        baseline = a_slice(2874.0, epochs=1)
        seconds = baseline.step_seconds.model_copy(update={"max": 0.01 + late})
        changed = {"seconds": 0.5 + late, "step_seconds": seconds, **fields}
        return a_pair().model_copy(update={"baseline": baseline.model_copy(update=changed)})

    steady, late = pair(0.0), pair(0.12)
    baseline = a_record()
    for pairs, expected in [
        ((steady, late), (1, 2)),
        ((steady, late.model_copy(update={"disturbed": Disturbance.LOAD})), (0, 1)),
        ((steady, late.model_copy(update={"baseline": a_slice()})), (0, 1)),
        ((steady, pair(0.12, epochs=2)), (0, 1)),
        ((steady, pair(0.12, steps=3)), (0, 1)),
    ]:
        stalls, epochs = stalls_of_baseline(a_record(FAST, pairs=pairs), baseline)
        assert (stalls.epochs, epochs) == expected
    untuned = a_record(BASELINE.replace(data_autotune=False))
    assert stalls_of_baseline(a_record(FAST, pairs=(steady, late)), untuned)[1] == 0


@pytest.mark.parametrize(
    ("late", "tuned", "told"), [(0.13, True, True), (0.13, False, False), (0.0, True, False)]
)
def test_a_baseline_whose_epochs_stall_is_told_of(tmp_path, late, tuned, told):
    """Two of three slices end as a stall of `tf.data`'s tuning would: the speed-up hangs on how many do."""
    nth = itertools.count()

    def slow_calls(configuration):
        return late if not configuration["jit_compile"] and next(nth) % 3 else 0.0

    trials = simulated_trials(lambda configuration: 1437 / 0.61, slow_calls=slow_calls)
    trials.set_by_dataset = {} if tuned else {"data_autotune": False}
    bench = Bench(tmp_path, trials)
    bench.confirm(FAST.replace(data_autotune=tuned))
    notices = [each.text for each in bench.watcher.of(Notice) if "ended as stalls" in each.text]
    assert bool(notices) is told
    if told:
        assert "epochs of the baseline ended" in notices[0]
        assert "data_autotune=false" in notices[0]
