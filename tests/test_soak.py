"""The soak at the end of a confirmation, on simulated trials."""

import itertools
import statistics

import pytest
from simulated_runs import (
    BASELINE,
    LIMITS,
    a_pair,
    a_record,
    a_slice,
    quick_tune,
    simulated_trials,
)
from test_confirmation import FAST, SPEED, Bench, after, crash

from autotune.measure.deciding import Shortfall, Verdict
from autotune.study.confirmed import Limits, checks_of
from autotune.study.plan import ENOUGH_INSTANCES, FEWEST_INSTANCES, plan_run
from autotune.study.progress import PhaseBegan
from autotune.study.slicing import SHORT_SLICE_SECONDS, SLICE_SECONDS
from autotune.study.soak import ENOUGH_LEGS, FEWEST_LEGS, LEAST_LEG_SECONDS, plan_legs
from autotune.trial.live import TrialFailed
from autotune.trial.record import Leg, Outcome, Pairing, Phase

SOAK = 30.0
LARGE = BASELINE.replace(batch_size=64)


def soaked(tmp_path, trials, *finalists, soak=SOAK, pairing=Pairing.ALTERNATING, limits=LIMITS, **plan):
    """A confirmation with a soak; its result and bench."""
    bench = Bench(tmp_path, trials, soak=soak, limits=limits, **plan)
    return bench.confirm(*(finalists or (FAST,)), pairing=pairing), bench


def in_the_soak(tmp_path, failure, *, of):
    """`failure`, but only for the process of the soak: the one after as many instances as there are without it."""
    instances = soaked(tmp_path / "without", simulated_trials(SPEED, noise=0.02))[0].instances
    starts = itertools.count(1)
    return lambda each: failure(each) if each == of and next(starts) > instances else None


@pytest.mark.parametrize("pairing", list(Pairing))
def test_a_winner_that_holds_its_claim_keeps_it(tmp_path, pairing):
    """The continuous run agrees; the claim is the one of the slices, and both records keep the legs."""
    result, bench = soaked(tmp_path, simulated_trials(SPEED, noise=0.03, seed=2), pairing=pairing)
    winner = result.winner
    assert winner.soaked is not None
    assert not winner.replaced
    assert winner.soaked.pauses.low < 0 < winner.soaked.pauses.high
    assert winner.ratio == winner.in_slices
    assert len(winner.record.legs) == len(result.baseline.legs) >= FEWEST_LEGS / 2
    assert bench.trials.clock() <= bench.plan.ends + 1.0


def test_a_claim_that_lives_of_the_pauses_is_replaced(tmp_path):
    """Slices after a pause are 30% faster for one configuration: the continuous run's figure is claimed."""
    trials = simulated_trials(SPEED, noise=0.02, freeze_gain=lambda each: 1.3 if each == FAST else 1.0)
    result, _ = soaked(tmp_path, trials)
    (found,) = result.confirmed
    assert found.replaced
    assert found.speedup.low < 1.5 < found.speedup.high
    assert found.in_slices.value > found.ratio.value + 0.1
    assert found.soaked.slices[0][0][0] == pytest.approx(6000.0, rel=0.1)
    assert found.verdict is Verdict.FASTER


@pytest.mark.parametrize("seed", range(4))
def test_each_leg_has_a_pause_before_it(tmp_path, seed):
    """The first as well, whoever begins: where pauses give 30%, each leg's first slice has all of it."""
    trials = simulated_trials(SPEED, freeze_gain=lambda each: 1.3 if each == FAST else 1.0)
    bench = Bench(tmp_path, trials, soak=SOAK)
    bench.run.rng.seed(seed)
    found = bench.confirm(FAST).confirmed[0]
    legs = [[each.examples / each.seconds for each in leg.slices] for leg in found.record.legs]
    assert len(legs) >= FEWEST_LEGS / 2
    assert [first / rest[0] for first, *rest in legs] == pytest.approx([1.3] * len(legs), rel=1e-6)


def test_turns_of_the_soak_alternate(tmp_path):
    """Else every second leg would have no pause to tell of, and half of what pauses give would stay in the claim."""
    result, _ = soaked(tmp_path, simulated_trials(SPEED, noise=0.02))
    sides = [
        (leg.slices[0].at, name)
        for name, record in (("baseline", result.baseline), ("winner", result.winner.record))
        for leg in record.legs
    ]
    names = [name for _, name in sorted(sides)]
    assert len(names) >= FEWEST_LEGS
    assert all(before != after for before, after in itertools.pairwise(names))


@pytest.mark.parametrize("pairing", list(Pairing))
def test_slices_of_the_soak_say_when_they_were_measured(tmp_path, pairing):
    """Each begins when the one before has ended, and the last one ends with its leg; so the history can plot them."""
    result, bench = soaked(tmp_path, simulated_trials(SPEED, noise=0.02), pairing=pairing)
    for leg in result.baseline.legs:
        for early, late in itertools.pairwise(leg.slices):
            assert late.at == pytest.approx(early.at + late.seconds)
        assert leg.slices[-1].at <= bench.trials.clock()
    begins = [leg.slices[0].at - leg.slices[0].seconds for leg in result.baseline.legs]
    assert max(pair.candidate.at for pair in result.winner.record.pairs) <= min(begins) < max(begins)


@pytest.mark.parametrize(("waiting", "expected"), [(None, SHORT_SLICE_SECONDS), (LARGE, SLICE_SECONDS)])
def test_slices_of_the_soak_are_as_long_as_those_of_the_claim(tmp_path, waiting, expected):
    """Where another finalist waits, all take turns in long slices, and a pause gives less to each of those."""
    trials = simulated_trials(
        SPEED, noise=0.02, examples=None, freeze_gain=lambda each: 1.2 if each == waiting else 1.0
    )
    result, _ = soaked(tmp_path, trials, FAST, LARGE, finalists=2, left=170.0)
    winner = result.winner
    assert winner.configuration == FAST
    claimed = [pair.candidate.seconds for pair in winner.record.pairs if pair.instance]
    legs = [each.seconds for leg in winner.record.legs for each in leg.slices]
    for seconds in (claimed, legs):
        assert seconds
        assert seconds == pytest.approx([expected] * len(seconds), rel=0.2)


def test_slices_of_slow_calls_are_as_long_in_the_soak(tmp_path):
    """Calls of half a second: the claim's slices hold as many as an instance has time for, and so do the soak's."""
    trials = simulated_trials(lambda each: SPEED(each) / 64, noise=0.005, examples=None)
    result, _ = soaked(tmp_path, trials, FAST, left=150.0)
    winner = result.winner
    assert winner.soaked is not None
    claimed = statistics.median(pair.candidate.seconds for pair in winner.record.pairs if pair.instance)
    legs = [each.seconds for leg in winner.record.legs for each in leg.slices]
    assert legs == pytest.approx([claimed] * len(legs), rel=0.1)


def test_a_soak_without_pauses_keeps_its_slices_short(tmp_path):
    """In brackets those of the claim are long, and a soak of such would hold few turns: there is no pause to match."""
    trials = simulated_trials(SPEED, noise=0.005, examples=None)
    result, _ = soaked(tmp_path, trials, FAST, left=600.0, soak=100.0, pairing=Pairing.BRACKETED)
    claimed = [pair.candidate.seconds for pair in result.winner.record.pairs]
    legs = [each.seconds for leg in result.winner.record.legs for each in leg.slices]
    assert max(legs) <= 1.1 * SLICE_SECONDS < statistics.median(claimed)


def test_the_one_that_takes_anothers_place_has_a_continuous_run_too(tmp_path):
    """The first finalist crashes: the time that was kept for a soak is there for the next."""
    trials = simulated_trials(SPEED, noise=0.02, failure=crash(FAST))
    result, _ = soaked(tmp_path, trials, FAST, LARGE, left=150.0)
    assert result.winner.configuration == LARGE
    assert result.winner.soaked is not None


def test_the_one_that_takes_anothers_place_is_confirmed_rather_than_soaked(tmp_path):
    """Where the time does not hold both, as at the beginning."""
    trials = simulated_trials(SPEED, noise=0.02)
    trials.failure = after(20.0, trials, crash(FAST))
    result, _ = soaked(tmp_path, trials, FAST, LARGE, soak=20.0, left=50.0)
    assert result.confirmed[0].configuration == LARGE
    assert result.confirmed[0].ratio.count >= FEWEST_INSTANCES
    assert result.confirmed[0].soaked is None


@pytest.mark.parametrize("rule", ["step_tail", "hangs"])
def test_what_breaks_a_rule_in_the_soak_alone_is_refused(tmp_path, rule):
    """Slices with pauses between them were innocent; the continuous run is looked at as well, and is named."""
    bench, in_the_legs = bench_with_odd_soak(tmp_path)
    calls = itertools.count()

    def slow_calls(each):
        if not in_the_legs(each):
            return 0.0
        return 0.9 if rule == "step_tail" else 2.5 * (next(calls) % 4 == 0)

    bench.trials.slow_calls = slow_calls
    result = bench.confirm(FAST)
    (found,) = result.confirmed
    assert result.winner is None
    assert found.record.outcome is Outcome.UNSTABLE
    assert found.record.reason.startswith(f"{rule}: in the continuous run: ")


@pytest.mark.parametrize(
    "behaviour",
    [
        {"slow_calls": lambda nth: 2.5 * (nth < 8)},  # one burst, which reaches eight slices in a row
        {
            "retraces": lambda nth: int(nth < 3)
        },  # XLA compiles for the smaller batches of the first end of an epoch
        {"skipped_share": lambda nth: 0.2 * (nth < 3)},
    ],
    ids=["a burst", "smaller batches", "a scale that settles"],
)
def test_what_a_single_process_cannot_tell_is_not_held_against_it(tmp_path, behaviour):
    """In the soak there is one of each: a burst in one turn, or what happens once, refuses nobody."""
    bench, in_the_legs = bench_with_odd_soak(tmp_path)
    nth = itertools.count()
    for name, odd in behaviour.items():
        setattr(bench.trials, name, lambda each, odd=odd: odd(next(nth)) if in_the_legs(each) else 0)
    result = bench.confirm(FAST)
    assert next(nth) > 10, "nothing odd was asked for"
    assert result.winner.soaked is not None


@pytest.mark.parametrize(
    ("legs", "baseline_legs", "hanging", "passed"),
    [
        (1, 0, 1, True),
        (3, 0, 3, True),
        (3, 1, 3, True),
        (4, 4, 2, True),
        (4, 4, 3, False),
        (4, 3, 4, False),
    ],
)
def test_turns_that_hang_are_held_against_it_where_there_are_enough(legs, baseline_legs, hanging, passed):
    """Of fewer than two on either side nothing is said; else more than two of its own, and none of the baseline's."""

    def leg(*, hangs):
        seconds = a_slice().step_seconds.model_copy(update={"max": 2.5 if hangs else 0.01})
        odd = a_slice().model_copy(update={"step_seconds": seconds})
        return Leg(instance=9, slices=(a_slice(), odd, odd, a_slice()))

    record = a_record(FAST, pairs=(a_pair(),) * 4, legs=[leg(hangs=n < hanging) for n in range(legs)])
    baseline = a_record(legs=[leg(hangs=False)] * baseline_legs)
    checks = {each.name: each for each in checks_of(record, baseline, LIMITS)}
    assert checks["hangs"].passed is passed
    assert ("in the continuous run: 3 of 4 turns had" in checks["hangs"].detail) is (
        hanging == 3 and not passed
    )


def bench_with_odd_soak(tmp_path):
    """A bench, and `in_the_legs(configuration)`: whether it is the winner, and its soak has begun."""
    trials = simulated_trials(SPEED, noise=0.005)
    bench = Bench(tmp_path, trials, soak=60.0, left=200.0)
    soaking = []
    bench.watcher.react = lambda event: (
        soaking.append(event) if isinstance(event, PhaseBegan) and "continuous" in event.detail else None
    )
    return bench, lambda each: bool(soaking) and each == FAST


def test_a_gain_that_is_nothing_but_pauses_is_no_gain(tmp_path):
    """What is as fast as the baseline in a continuous run is not recommended, whatever slices say."""
    trials = simulated_trials(noise=0.02, freeze_gain=lambda each: 1.0 + 0.3 * bool(each["jit_compile"]))
    recipe, _ = quick_tune(trials, tmp_path / "run", budget=280.0)
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
    assert recipe.evidence.shortfall in (Shortfall.INTERVAL_INCLUDES_1, Shortfall.BELOW_MIN_GAIN)
    assert "continuous run" in recipe.evidence.best_candidate.reason


def test_a_finalist_that_could_not_be_soaked_does_not_win_after_one_was_refuted(tmp_path):
    """Three finalists that all live of the pauses: none is recommended, soaked or not."""
    trials = simulated_trials(noise=0.02, freeze_gain=lambda each: 1.0 + 0.3 * bool(each["jit_compile"]))
    recipe, _ = quick_tune(trials, tmp_path / "run", budget=900.0)
    assert recipe.evidence.confirmation.finalists > 1, "the case is another one"
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
    assert recipe.evidence.shortfall is Shortfall.NO_TIME


def test_a_winner_that_leaks_hands_over_to_the_next(tmp_path):
    """Memory that grows by half a MiB with each thousand examples fails it; the other finalist is recommended."""
    trials = simulated_trials(SPEED, noise=0.02, leak=lambda each: 2000.0 if each == FAST else 0.0)
    limits = Limits(host_bytes=8 << 30, device_bytes=None)
    result, _ = soaked(tmp_path, trials, FAST, LARGE, limits=limits, left=200.0)
    assert result.winner.configuration == LARGE
    leaking = next(each for each in result.confirmed if each.configuration == FAST)
    assert leaking.record.outcome is Outcome.UNSTABLE
    assert "memory is full after" in leaking.record.reason


def test_a_winner_that_leaks_on_the_device_hands_over_to_the_next(tmp_path):
    """As one that leaks on the host: the rule is the same, and the device's own limit counts."""
    leak = {"gpus": ("NVIDIA H200",), "device_leak": lambda each: 2000.0 if each == FAST else 0.0}
    limits = Limits(host_bytes=8 << 30, device_bytes=80 << 30)
    result, _ = soaked(
        tmp_path, simulated_trials(SPEED, noise=0.02, **leak), FAST, LARGE, limits=limits, left=200.0
    )
    assert result.winner.configuration == LARGE
    leaking = next(each for each in result.confirmed if each.configuration == FAST)
    assert leaking.record.outcome is Outcome.UNSTABLE
    growth = {check.name: check.passed for check in leaking.checks if check.name.endswith("growth")}
    assert growth == {"host_memory_growth": True, "device_memory_growth": False}


@pytest.mark.parametrize("pairing", list(Pairing))
def test_a_leak_of_the_workloads_own_refuses_nobody(tmp_path, pairing):
    """The baseline loses as much with each example: the winner stays one, whichever way the two were measured."""
    trials = simulated_trials(SPEED, noise=0.02, leak=lambda each: 2000.0)
    result, _ = soaked(tmp_path, trials, soak=60.0, left=200.0, pairing=pairing)
    growth = next(each for each in result.winner.checks if each.name == "host_memory_growth")
    assert "the workload that leaks" in growth.detail


def test_growth_is_by_every_example_that_was_trained_on(tmp_path):
    """Those that count in no slice leak as well: half of all here, where an epoch runs in before each slice of one."""
    trials = simulated_trials(SPEED, noise=0.02, leak=lambda each: 2000.0, examples=4000)
    result, _ = soaked(tmp_path, trials, soak=60.0, left=200.0)
    growth = next(each for each in result.winner.checks if each.name == "host_memory_growth")
    a_day = 24 * 3600 * result.winner.record.throughput.value
    assert growth.value == pytest.approx(2000.0 * a_day, rel=0.02)


def test_a_winner_that_dies_in_the_soak_is_not_recommended(tmp_path):
    """It ran out of memory after a while: that is its failure, and the baseline's record stands."""
    trials = simulated_trials(SPEED, noise=0.02)
    bench = Bench(tmp_path, trials, soak=SOAK)
    trials.failure = in_the_soak(
        tmp_path, lambda each: TrialFailed(Outcome.OOM, "as planned") if each == FAST else None, of=FAST
    )
    result = bench.confirm(FAST)
    assert result.winner is None
    assert result.confirmed[0].record.outcome is Outcome.OOM
    assert result.baseline.outcome is Outcome.OK


def test_a_baseline_that_dies_in_the_soak_takes_nothing_away(tmp_path):
    """The claim stands as the slices gave it, and the recipe will say that no continuous run was had."""
    trials = simulated_trials(SPEED, noise=0.02)
    bench = Bench(tmp_path, trials, soak=SOAK)
    trials.failure = in_the_soak(tmp_path, crash(BASELINE), of=BASELINE)
    result = bench.confirm(FAST)
    assert result.winner.soaked is None
    assert not result.winner.replaced


def test_what_is_not_faster_is_not_soaked(tmp_path):
    """There is no claim to hold anything against."""
    result, _ = soaked(tmp_path, simulated_trials(noise=0.03))
    assert result.winner is None
    assert result.confirmed[0].soaked is None


def test_the_recipe_says_what_the_soak_was(tmp_path):
    """Seconds, both figures, and nothing about long runs among what was not checked."""
    recipe, _ = quick_tune(simulated_trials(SPEED, noise=0.01), tmp_path / "run", budget=300.0)
    continuous = recipe.evidence.continuous
    assert continuous.seconds > 5
    assert continuous.tells
    assert continuous.pauses.ci95[0] < 1 < continuous.pauses.ci95[1]
    assert not continuous.replaces_slices
    assert continuous.slices == recipe.evidence.speedup
    assert "host_memory_growth" in {check.name for check in recipe.evidence.stability.checks}
    assert "a continuous run" not in recipe.evidence.stability.not_checked


def test_no_soak_is_told(tmp_path):
    """With soak=0 the recipe lists a continuous run as not checked."""
    recipe, _ = quick_tune(simulated_trials(SPEED, noise=0.02), tmp_path / "run", budget=300.0, soak=0.0)
    assert recipe.evidence.continuous is None
    assert "a continuous run" in recipe.evidence.stability.not_checked


@pytest.mark.parametrize("seconds", [5.0, 6.0, 11.0, 12.0, 25.0, 41.0, 100.0, 1000.0])
@pytest.mark.parametrize("slice_length", [0.5, 2.0])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_legs_fill_the_time_and_no_more(seconds, slice_length, start):
    """Fours of legs, none too short; nothing where the fewest do not fit."""
    legs, slices = plan_legs(seconds, slice_length=slice_length, start=start)
    assert legs % 4 == 0
    assert legs * (slices * slice_length + start) <= seconds
    shortest = max(LEAST_LEG_SECONDS, 3 * slice_length)
    assert (legs == 0) == (seconds < FEWEST_LEGS * (shortest + start))
    if legs > ENOUGH_LEGS:
        assert slices * slice_length >= 2 * LEAST_LEG_SECONDS


def test_a_soak_is_planned_where_it_leaves_enough():
    """A tenth of the budget; none in a short one; what is asked for in any case."""
    times = {"ready_at": 5.0, "first_step": 1.0, "import_seconds": 5.0, "trial_timeout": None}
    assert plan_run(300.0, **times).soak == pytest.approx(30.0)
    assert plan_run(60.0, **times).soak == 0.0
    assert plan_run(300.0, **times, soak=0.0).soak == 0.0
    asked = plan_run(120.0, **times, soak=20.0)
    assert asked.soak == pytest.approx(22.0)
    assert asked.ends - asked.search_last >= 22.0


def test_a_first_interrupt_ends_the_soak_between_legs(tmp_path):
    """Who presses Ctrl-C meanwhile gets the claim as it is, soon."""
    trials = simulated_trials(SPEED, noise=0.02)
    asked = []
    bench = Bench(tmp_path, trials, soak=200.0, left=300.0, interruptions=lambda: len(asked))
    began = bench.plan.ends - 200.0

    def react(event):
        if isinstance(event, PhaseBegan) and event.detail.startswith("a continuous run"):
            asked.append(True)

    bench.watcher.react = react
    result = bench.confirm(FAST)
    assert asked
    assert not result.stopped, "all instances were measured"
    assert result.winner.configuration == FAST
    assert result.winner.soaked is None
    assert trials.clock() < began + 30.0


def test_legs_that_were_over_are_kept_when_the_run_ends_in_the_soak(tmp_path):
    """As at a second Ctrl-C in the continuous run: what both sides had measured of it is in the history."""
    bench, in_the_legs = bench_with_odd_soak(tmp_path)
    calls = itertools.count(1)

    def slow_calls(each):
        if in_the_legs(each) and next(calls) == 40:
            raise KeyboardInterrupt
        return 0.0

    bench.trials.slow_calls = slow_calls
    with pytest.raises(KeyboardInterrupt):
        bench.confirm(FAST)
    kept = [each for each in bench.run.directory.trials.values() if each.phase is Phase.CONFIRM]
    assert [each.outcome for each in kept] == [Outcome.INTERRUPTED] * 2
    assert all(each.legs for each in kept)


def test_a_soak_that_leaves_the_confirmation_no_time_makes_way(tmp_path):
    """Finalists that start more slowly than was planned for are confirmed, and not soaked."""
    trials = simulated_trials(SPEED, noise=0.02, start_seconds=8.0)
    result, _ = soaked(tmp_path, trials, soak=60.0, left=80.0)
    assert result.winner.configuration == FAST
    assert result.winner.soaked is None


def test_a_soak_that_was_asked_for_is_made_of_few_processes_too(tmp_path):
    """Its time is no process's then, as long as the fewest fit."""
    trials = simulated_trials(SPEED, noise=0.001, start_seconds=8.0)
    result, _ = soaked(tmp_path, trials, left=100.0, soak_wanted=True)
    assert result.instances == FEWEST_INSTANCES
    assert result.confirmed[0].soaked is not None
    assert plan_run(600.0, ready_at=10.0, first_step=2.0, trial_timeout=None, soak=60.0).soak_wanted
    assert not plan_run(600.0, ready_at=10.0, first_step=2.0, trial_timeout=None).soak_wanted


def test_too_few_processes_get_the_time_of_the_soak(tmp_path):
    """Where processes start more slowly than in the search, a continuous run of what nothing is known of is no use."""
    slow = {"start_seconds": 8.0}
    left = {True: 100.0, False: 300.0}
    few, enough = (
        soaked(tmp_path / str(short), simulated_trials(SPEED, noise=0.02, **slow), left=left[short])[
            0
        ].confirmed[0]
        for short in (True, False)
    )
    assert FEWEST_INSTANCES < few.record.instances <= ENOUGH_INSTANCES
    assert few.soaked is None
    assert enough.record.instances > ENOUGH_INSTANCES
    assert enough.soaked is not None


def test_what_broke_a_rule_leaves_its_time_to_the_next(tmp_path):
    """A finalist that retraces is measured in so many instances as tell; the rest is for the one that stands by."""
    trials = simulated_trials(SPEED, noise=0.02, retraces=lambda each: 5 if each == FAST else 0)
    result, _ = soaked(tmp_path, trials, FAST, LARGE, soak=0.0, left=120.0)
    assert result.winner.configuration == LARGE
    refused = next(each for each in result.confirmed if each.configuration == FAST)
    assert refused.record.instances == ENOUGH_INSTANCES < result.winner.record.instances
