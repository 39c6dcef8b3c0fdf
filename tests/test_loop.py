"""Leaders of a run: when and how they are confirmed, judged, replaced and refused; whole runs on simulated trials."""

import itertools
import signal

import pytest
from simulated import SimulatedTrial
from simulated_runs import (
    BASELINE,
    FAST,
    LIMITS,
    DirectoryWithoutStudy,
    Watcher,
    faster_by,
    go_on,
    leaders_of,
    lose,
    on_disk,
    quick_tune,
    simulated_trials,
    space,
    tune_simulated,
)

from autotune.data.record import Outcome, Phase, Standing
from autotune.data.run_directory import RunDirectory
from autotune.runtime.executor import TrialFailed
from autotune.space.configuration import Configuration, read_trials
from autotune.stats.deciding import EndedBy, Verdict
from autotune.tuning.events import Began, Notice, PairMeasured, TrialBegan, TrialEnded

ONE = space(jit_compile=[False, True])
TWO = space(jit_compile=[False, True], batch_size=[32, 64])
PRECISION = space(precision=["float32", "mixed_bfloat16"])
WIDE = space(
    jit_compile=[False, True], prefetch=[0, 2, 8, "autotune"], num_parallel_calls=[0, 2, 4, 8], data_threads=[0, 4, 16]
)
SPEED = faster_by(jit_compile=1.5, batch_size=1.2)


def run(tmp_path, trials, **options):
    """The recipe and the records of a run of 200 s in a space of one knob, and who watched it."""
    watcher = options.pop("observe", Watcher())
    options = {"space": ONE, "budget": 200.0, **options}
    recipe, directory = quick_tune(trials, tmp_path, observe=watcher, **options)
    assert trials.clock() <= 1.1 * options["budget"]
    assert trials.alive == []
    return recipe, list(directory.trials.values()), watcher


def in_confirmation(watcher):
    """Whether the last trial that began is of a confirmation."""
    began = watcher.of(TrialBegan)
    return bool(began) and began[-1].phase is Phase.CONFIRM


# ----------------------------------------------------------------------------------------------- the claim


def test_clear_gain_is_claimed_after_two_processes_per_side(tmp_path):
    """The confidence of the claim is corrected for its look."""
    recipe, records, watcher = run(tmp_path, simulated_trials(faster_by(jit_compile=3.0), noise=0.01), budget=400.0)
    (looks,) = leaders_of(records)[0].looks
    assert (looks.leader, looks.standing) == (1, Standing.CONFIRMED)
    assert looks.confidence == recipe.evidence.confirmation.confidence == pytest.approx(1 - 0.2 * 0.025)
    assert [event.processes for event in watcher.of(PairMeasured)] == [1], "each pair that decides nothing is told"


def test_a_claim_that_further_pairs_do_not_bear_out_is_withdrawn(tmp_path):
    watcher, trials = Watcher(), simulated_trials(noise=0.12)

    def speed(configuration):
        pairs = [event for event in watcher.events if is_of_confirmation(event)]
        return 4000.0 * (1.0 if configuration != FAST or len(pairs) > 5 else 1.6)

    def is_of_confirmation(event):
        return isinstance(event, TrialBegan) and event.phase is Phase.CONFIRM and event.configuration == FAST

    trials.samples_per_second = speed
    recipe, *_ = run(tmp_path, trials, observe=watcher, budget=110.0)
    stood = [event.record.looks[-1].standing for event in watcher.of(TrialEnded) if event.record.looks]
    assert Standing.CONFIRMED in stood
    assert recipe.configuration == recipe.baseline


@pytest.mark.parametrize(("min_gain", "verdict"), [(0.02, "no_significant_gain"), (0.005, "faster")])
def test_the_smallest_gain_that_counts_is_the_users(tmp_path, min_gain, verdict):
    trials = simulated_trials(faster_by(jit_compile=1.03 if min_gain == 0.005 else 1.01))
    recipe, *_ = run(tmp_path, trials, min_gain=min_gain, budget=600.0)
    assert (recipe.evidence.verdict, recipe.evidence.min_gain) == (verdict, min_gain)


@pytest.mark.parametrize(
    ("deviation", "standing", "verdict"),
    [(0.0, Standing.CONFIRMED, Verdict.FASTER), (0.8, Standing.OUT_OF_TIME, Verdict.UNDECIDED)],
    ids=["clear", "unclear"],
)
def test_what_the_time_did_not_decide_is_open(tmp_path, deviation, standing, verdict):
    trials = simulated_trials(SPEED, noise=0.005, examples=None, seed=1)

    def slow_down(event):
        if is_confirming(event):
            trials.start_seconds, trials.instance_noise = 9.0, deviation

    recipe, records, _ = run(tmp_path, trials, observe=Watcher(slow_down), budget=100.0)
    leader = leaders_of(records)[-1]
    assert (leader.looks[-1].standing, recipe.evidence.verdict) == (standing, verdict)


def is_confirming(event):
    """Whether a confirmation begins."""
    return isinstance(event, Began) and "confirm" in event.text


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMEOUT], ids=str)
def test_a_leader_that_fails_in_fresh_processes_makes_way(tmp_path, outcome):
    watcher = Watcher()
    fails = lambda configuration: configuration["jit_compile"] and in_confirmation(watcher)  # noqa: E731  # a word
    trials = simulated_trials(SPEED, noise=0.02)
    trials.failure = lambda configuration: TrialFailed(outcome, "late") if fails(configuration) else None
    recipe, records, _ = run(tmp_path, trials, observe=watcher, space=TWO, budget=500.0)
    assert recipe.changes == {"batch_size": 64}
    failed = [record for record in leaders_of(records) if record.configuration["jit_compile"]]
    assert {each.looks[-1].standing for each in failed} == {Standing.UNSTABLE}
    assert {each.outcome for each in failed} == {outcome}


def test_occasional_baseline_failure_is_reported_and_tolerated(tmp_path):
    watcher, starts = Watcher(), itertools.count()
    trials = simulated_trials(SPEED, noise=0.02)
    trials.failure = lambda configuration: (
        TrialFailed(Outcome.CRASHED, "now and then")
        if configuration == BASELINE and in_confirmation(watcher) and next(starts) % 3 == 0
        else None
    )
    recipe, _, _ = run(tmp_path, trials, observe=watcher, budget=400.0)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert any("now and then" in notice.text for notice in watcher.of(Notice))


@pytest.mark.parametrize("what", ["crashes", "no device"])
def test_a_baseline_that_keeps_failing_leaves_nothing_to_claim(tmp_path, what):
    watcher = Watcher()
    trials = simulated_trials(SPEED, noise=0.02, gpus=("H200",))
    device, is_baseline = space(jit_compile=[False, True]), lambda configuration: configuration["jit_compile"] is False

    def fail(event):
        if is_confirming(event):
            if what == "no device":
                trials.gpus = ()
            else:
                trials.failure = lambda each: TrialFailed(Outcome.CRASHED, "as planned") if is_baseline(each) else None

    watcher.react = fail
    recipe, records, _ = run(tmp_path, trials, observe=watcher, space=device)
    assert recipe.evidence.verdict is Verdict.UNDECIDED
    assert recipe.configuration == recipe.baseline
    assert all(record.outcome is Outcome.OK for record in leaders_of(records))
    assert len([notice for notice in watcher.of(Notice) if "confirmation" in notice.text]) >= 2


# ---------------------------------------------------------------------------------------------------- rules


def only(configuration, figure, usual):
    """What one configuration does at each slice, and what all others do."""
    return lambda each: figure if each == configuration else usual


def every(count, seconds):
    """A call that takes so much longer in each so-manieth slice of a configuration under XLA."""
    slices = itertools.count(1)
    return lambda configuration: seconds if configuration == FAST and next(slices) % count == 0 else 0.0


BROKEN = [
    ({"retraces": only(FAST, 1, 0)}, "retracing"),
    ({"slow_calls": only(FAST, 0.9, 0.0)}, "step_tail"),
    ({"slow_calls": every(4, 2.5)}, "hangs"),
    ({"skipped_share": only(FAST, 0.2, None)}, "loss_scale"),
    ({"leak": only(FAST, 4000.0, 0.0), "start_seconds": 10.0}, "host_memory_growth"),
]


@pytest.mark.parametrize(
    ("behaviour", "rule"), BROKEN, ids=[f"{rule}-{number}" for number, (_, rule) in enumerate(BROKEN)]
)
def test_what_breaks_a_rule_is_not_recommended(tmp_path, behaviour, rule):
    trials = simulated_trials(SPEED, noise=0.005, examples=1_000_000, **behaviour)
    recipe, records, _ = run(tmp_path, trials, budget=800.0)
    assert recipe.evidence.verdict is Verdict.UNSTABLE
    assert recipe.configuration == recipe.baseline
    (leader,) = leaders_of(records)
    assert (leader.outcome, leader.looks[-1].standing) == (Outcome.UNSTABLE, Standing.UNSTABLE)
    assert leader.reason.startswith(rule)
    assert recipe.candidate.configuration == dict(FAST)
    assert rule in recipe.candidate.reason


@pytest.mark.parametrize("fit", [2, 1], ids=["beside the baseline", "alone"])
@pytest.mark.parametrize(("memory", "budget"), [("leak", 30.0), ("device_leak", 60.0)])
def test_a_leak_is_not_recommended_however_short_the_run(tmp_path, memory, budget, fit):
    leaks = {
        memory: lambda configuration: 40_000.0 * (configuration["jit_compile"] is True),
        "gpus": ("H200",),
        "device_limit_bytes": 64 << 30,
        "fits_together": lambda alive: len(alive) <= fit,
    }
    trials = simulated_trials(SPEED, noise=0.005, examples=1_000_000, start_seconds=0.5, **leaks)
    recipe, *_ = run(tmp_path, trials, budget=budget)
    assert recipe.configuration == recipe.baseline
    assert recipe.evidence.verdict in (Verdict.UNDECIDED, Verdict.UNSTABLE)


@pytest.mark.parametrize(
    "behaviour",
    [
        {"retraces": lambda configuration: 1},
        {"slow_calls": lambda configuration: 0.9},
        {"skipped_share": lambda configuration: 0.2},
        {"leak": lambda configuration: 4000.0, "start_seconds": 10.0},
    ],
)
def test_what_the_baseline_does_as_well_is_nobodys_fault(tmp_path, behaviour):
    trials = simulated_trials(SPEED, noise=0.01, examples=1_000_000, **behaviour)
    recipe, *_ = run(tmp_path, trials, budget=800.0)
    assert recipe.configuration == dict(FAST)


def test_one_odd_process_breaks_no_rule(tmp_path):
    watcher, first = Watcher(), []

    def retraces(each):
        if each != FAST or not in_confirmation(watcher):
            return 0
        first.append(trials.alive[-1])
        return int(first[-1] is first[0])

    trials = simulated_trials(SPEED, noise=0.02, retraces=retraces)
    recipe, records, _ = run(tmp_path, trials, observe=watcher)
    assert recipe.configuration == dict(FAST)
    assert leaders_of(records)[0].retraces > 2


def test_what_the_process_may_take_of_a_device_is_its_limit(tmp_path):
    assert LIMITS.device_bytes is None
    trials = simulated_trials(SPEED, noise=0.02, gpus=("H200",), device_limit_bytes=1 << 20)
    recipe, records, _ = run(tmp_path, trials)
    assert recipe.evidence.verdict is Verdict.UNSTABLE
    assert "device_memory" in leaders_of(records)[0].reason


# ------------------------------------------------------------------------------------------------- numerics


def precise(learns=lambda configuration: True, **gains):
    """Trials that are faster in bfloat16."""
    return simulated_trials(faster_by(**(gains or {"precision": 1.6})), noise=0.02, learns=learns)


def test_failed_loss_parity_rejects_all_similar_candidates(tmp_path):
    """The next candidate that passes is recommended."""
    trials = precise(lambda configuration: configuration["precision"] == "float32", precision=1.6, batch_size=1.2)
    both = space(precision=["float32", "mixed_bfloat16"], batch_size=[32, 64, 128])
    recipe, records, _ = run(tmp_path, trials, space=both, budget=500.0)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["precision"] == "float32"
    assert recipe.configuration["batch_size"] > 32
    refused = [record for record in records if record.outcome is Outcome.UNSTABLE]
    assert len(refused) >= 2
    assert {each.configuration["precision"] for each in refused} == {"mixed_bfloat16"}
    assert all("numerics_parity: after" in each.reason for each in refused)
    assert not any(each.looks for each in refused), "none of them was confirmed"


def test_a_champion_that_was_not_compared_falls_with_its_class(tmp_path):
    both = space(precision=["float32", "mixed_bfloat16"], batch_size=[32, 64])
    speeds = {(32, "mixed_bfloat16"): 1.6, (64, "mixed_bfloat16"): 2.4}
    trials = [
        simulated_trials(
            lambda configuration: 4000.0 * speeds.get((configuration["batch_size"], configuration["precision"]), 0.9),
            noise=0.001,
            learns=lambda configuration: configuration["precision"] == "float32",
            seed=seed,
        )
        for seed in (0, 1)
    ]

    def stand_still(event):
        if isinstance(event, TrialEnded) and event.record.trial == 2 and not event.record.looks:
            trials[0].clock.advance(max(0.0, 262.0 - trials[0].clock()))

    first = begun(tmp_path, trials[0], space=both, trials=2, budget=300.0, observe=Watcher(stand_still))
    assert first.configuration["precision"] == "mixed_bfloat16", "the case is another one"
    assert any("numerics" in each for each in first.evidence.stability.not_checked)
    second = go_on(trials[1], tmp_path / "run", space=both, budget=400.0, trials=9)
    assert second.configuration["precision"] == "float32"
    assert second.evidence.verdict is Verdict.UNSTABLE


def test_interrupted_loss_comparison_gives_no_verdict(tmp_path):
    """The resumed run compares again."""
    trials, compared = precise(), []

    def note(trial):
        compared.extend([] if trial.timed else [trial])
        if len(compared) == 2:  # float32 gave its losses
            signal.raise_signal(signal.SIGINT)

    trials.on_launch = note
    with on_disk(tmp_path / "run", DirectoryWithoutStudy) as directory:
        recipe = tune_simulated(trials, directory, space=PRECISION, budget=200.0)
    assert len(compared) == 2
    assert recipe.evidence.ended_by is EndedBy.INTERRUPTED
    assert (recipe.evidence.verdict, recipe.changes) == (Verdict.UNDECIDED, {})
    assert {record.outcome for record in records_of(tmp_path)} == {Outcome.OK}
    again = precise()
    recipe = go_on(again, tmp_path / "run", space=PRECISION, budget=200.0)
    assert len([trial for trial in again.launched if not trial.timed]) == 2, "they are compared again"
    assert recipe.configuration["precision"] == "mixed_bfloat16"
    assert [check.passed for check in recipe.evidence.stability.checks if check.name == "numerics_parity"] == [True]


class LossesUnseen(SimulatedTrial):
    """A trial of a model that reports no loss."""

    def loss_curves(self, *given):
        """See `LiveTrial`."""
        return super().loss_curves(*given).model_copy(update={"curves": ()})


def without_losses(**gains):
    """Trials that are faster by these, of a model that reports no loss."""
    trials = precise(**gains)
    trials.process = lambda configuration, **how: LossesUnseen(trials, configuration, **how)
    return trials


def test_uncomparable_numerics_win_only_if_nothing_else_does(tmp_path):
    alone, *_ = run(tmp_path / "alone", without_losses(), space=PRECISION)
    assert alone.configuration["precision"] == "mixed_bfloat16"
    unknown = "Its numerics could not be compared with float32 without XLA (the model reports no loss)."
    assert unknown in alone.answer.caveats
    both = space(precision=["float32", "mixed_bfloat16"], batch_size=[32, 64, 128])
    other, *_ = run(tmp_path / "both", without_losses(precision=1.6, batch_size=1.2), space=both, budget=500.0)
    assert other.evidence.verdict is Verdict.FASTER
    assert other.configuration["precision"] == "float32"
    assert other.configuration["batch_size"] > 32
    assert not any("numerics" in caveat for caveat in other.answer.caveats)


def test_nothing_is_compared_where_nothing_computes_otherwise(tmp_path):
    trials = simulated_trials(faster_by(prefetch=1.5), noise=0.02)
    recipe, *_ = run(tmp_path, trials, space=space(prefetch=[0, 2]))
    assert all(trial.timed for trial in trials.launched)
    assert not any("numerics" in each for each in recipe.evidence.stability.not_checked)


def test_comparing_losses_takes_a_tenth_of_the_budget_at_most(tmp_path):
    speed = faster_by(precision=1.6, jit_compile=1.4)
    classes = space(precision=["float32", "mixed_bfloat16", "mixed_float16"], jit_compile=[False, True])
    spent = []

    def note_seconds(trial):
        began, curves = trials.clock(), trial.loss_curves

        def take_time(*given):
            try:
                return curves(*given)
            finally:
                spent.append(trials.clock() - began)

        trial.loss_curves = take_time

    trials = simulated_trials(
        lambda configuration: speed(configuration) / 10,
        noise=0.02,
        learns=lambda configuration: configuration["precision"] == "float32" and not configuration["jit_compile"],
        on_launch=note_seconds,
    )
    run(tmp_path, trials, space=classes, budget=400.0)
    assert len(spent) > 2
    assert sum(spent) <= 40.0 + 1.0


# ------------------------------------------------------------------------------------------- leader by leader


def begun(tmp_path, trials, /, **options):
    """A run in which two candidates were to be tried, on disk; returns its recipe."""
    with on_disk(tmp_path / "run", DirectoryWithoutStudy) as directory:
        return tune_simulated(trials, directory, **{"space": TWO, "budget": 200.0, "trials": 1, **options})


def records_of(tmp_path):
    """The records of the run on disk."""
    return list(read_trials(RunDirectory(tmp_path / "run")))


@pytest.mark.parametrize("fit", [3, 1], ids=["beside the baseline", "alone"])
def test_better_leader_replaces_champion_after_a_head_to_head(tmp_path, fit):
    memory = {"fits_together": lambda alive: len(alive) <= fit}
    first = begun(tmp_path, simulated_trials(SPEED, noise=0.02, **memory), budget=300.0)
    assert first.changes == {"batch_size": 64}
    trials = simulated_trials(SPEED, noise=0.02, seed=1, **memory)
    second = go_on(trials, tmp_path / "run", space=TWO, budget=500.0, trials=9)
    assert second.changes == {"batch_size": 64, "jit_compile": True}
    champion, leader = leaders_of(records_of(tmp_path))
    (looks,) = leader.looks
    assert (looks.leader, looks.standing, looks.error) == (2, Standing.CONFIRMED, pytest.approx(0.05 / 6))
    assert champion.looks[-1].standing is Standing.CONFIRMED
    beside = next(record for record in records_of(tmp_path) if record.trial == looks.champion)
    assert beside.configuration == champion.configuration
    assert len(beside.pairs) == len(leader.pairs)
    assert second.evidence.confirmation.leaders == 2
    assert second.evidence.speedup.value == pytest.approx(1.8, rel=0.03)


def test_leader_not_faster_than_the_champion_does_not_replace_it(tmp_path):
    begun(tmp_path, simulated_trials(SPEED, noise=0.02))
    watcher = Watcher()
    trials = simulated_trials(noise=0.02, seed=1)
    trials.samples_per_second = lambda configuration: (
        SPEED(configuration) if configuration["jit_compile"] is False or not in_confirmation(watcher) else 4800.0
    )
    recipe = go_on(trials, tmp_path / "run", space=TWO, budget=400.0, trials=9, observe=watcher)
    assert recipe.changes == {"batch_size": 64}
    champion, *others = leaders_of(records_of(tmp_path))
    assert others
    assert {each.looks[-1].standing for each in others} == {Standing.NOT_SHOWN}
    assert recipe.evidence.confirmation.trials[1] == champion.trial


def test_a_champion_stands_when_the_device_is_lost_later(tmp_path):
    watcher = Watcher()
    trials = simulated_trials(faster_by(jit_compile=1.5), noise=0.02, gpus=("H200",))
    confirmed = []

    def lose(event):
        if is_confirming(event):
            confirmed.append(True)
        if confirmed and isinstance(event, TrialBegan) and event.phase is Phase.SEARCH:
            trials.gpus = ()

    watcher.react = lose
    recipe, *_ = run(tmp_path, trials, observe=watcher, space=WIDE, budget=900.0)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert any("the search ends here" in notice.text for notice in watcher.of(Notice))


def test_a_lost_device_leaves_what_was_measured(tmp_path):
    trials = simulated_trials(noise=0.02, gpus=("H200",))

    def lose(event):
        if isinstance(event, TrialBegan) and event.trial == 2:
            trials.gpus = ()

    watcher = Watcher(lose)
    recipe, records, _ = run(tmp_path, trials, observe=watcher, space=WIDE)
    assert (recipe.evidence.verdict, recipe.evidence.ended_by) == (Verdict.UNDECIDED, EndedBy.FAILED)
    assert recipe.evidence.go_on_seconds
    assert "budget" not in recipe.answer.headline
    assert records[1].outcome is Outcome.OK
    assert any("no longer available" in notice.text for notice in watcher.of(Notice))


def dying(trials, *, times):
    """Kills the baseline's next processes as they start, so many times, and the live one now."""
    left = [TrialFailed(Outcome.CRASHED, "killed by SIGKILL")] * (times - 1)
    trials.failure = lambda configuration: left.pop() if configuration == BASELINE and left else None
    for live in trials.alive:
        lose(live)


@pytest.mark.parametrize("times", [3, 100])
def test_a_baseline_that_is_killed_from_outside_is_started_again(tmp_path, times):
    trials = simulated_trials(SPEED, noise=0.02)
    watcher = Watcher()

    def kill(event):
        if isinstance(event, TrialBegan) and event.trial == 3:
            dying(trials, times=times)

    watcher.react = kill
    recipe, records, _ = run(tmp_path, trials, observe=watcher, space=WIDE, budget=120.0)
    if times <= 3:
        assert recipe.evidence.verdict is Verdict.FASTER
        return
    assert (recipe.evidence.verdict, recipe.evidence.ended_by) == (Verdict.UNDECIDED, EndedBy.FAILED)
    assert recipe.evidence.go_on_seconds
    assert [record.outcome for record in records[:3]] == [Outcome.OK] * 3
    (notice,) = [notice.text for notice in watcher.of(Notice) if "search ends here" in notice.text]
    assert "the baseline was measured, but its process now fails (crashed): killed by SIGKILL" in notice


# ------------------------------------------------------------------------------------------ what stays known


def test_leader_that_failed_at_once_is_not_retried_on_resume(tmp_path):
    watcher = Watcher()
    fails = lambda configuration: in_confirmation(watcher) and configuration["jit_compile"]  # noqa: E731  # a word
    machines = [simulated_trials(SPEED, noise=0.02, seed=seed) for seed in (0, 1)]
    for machine in machines:
        machine.failure = lambda configuration: TrialFailed(Outcome.CRASHED, "late") if fails(configuration) else None
    with on_disk(tmp_path / "run", DirectoryWithoutStudy) as directory:
        tune_simulated(machines[0], directory, space=TWO, budget=60.0, observe=watcher)
    go_on(machines[1], tmp_path / "run", space=TWO, budget=100.0, observe=watcher)
    found = leaders_of(records_of(tmp_path))
    crashed = [each for each in found if each.outcome is Outcome.CRASHED]
    assert crashed
    assert len({tuple(each.configuration.items()) for each in crashed}) == len(crashed)
    numbers = [looks.leader for each in found for looks in each.looks]
    assert len(set(numbers)) == len(numbers)


def test_what_does_not_learn_is_not_tried_again(tmp_path):
    sizes = {"batch_size": [32, 64, 128, 256, 512], "steps_per_execution": [1, 2, 4, 8, 16]}
    many = space(**sizes, jit_compile=[False, True])
    trials = [
        simulated_trials(
            faster_by(jit_compile=1.5, batch_size=1.1, steps_per_execution=1.05),
            noise=0.03,
            seed=seed,
            learns=lambda configuration: configuration["jit_compile"] is not True,
        )
        for seed in (0, 1)
    ]
    with on_disk(tmp_path / "run", DirectoryWithoutStudy) as directory:
        tune_simulated(trials[0], directory, space=many, budget=150.0)
    refused = [record.trial for record in records_of(tmp_path) if record.reason.startswith("numerics_parity")]
    assert refused
    go_on(trials[1], tmp_path / "run", space=many, budget=60.0)
    later = [record for record in records_of(tmp_path) if record.trial > max(refused)]
    assert len(later) > 5
    assert not any(each.configuration["jit_compile"] for each in later)


def test_a_champion_that_does_not_start_any_more_falls(tmp_path):
    begun(tmp_path, simulated_trials(SPEED, noise=0.02))
    watcher = Watcher()
    trials = simulated_trials(SPEED, noise=0.02, seed=1)
    trials.failure = lambda configuration: (
        TrialFailed(Outcome.CRASHED, "not any more")
        if in_confirmation(watcher) and configuration.batch_size == 64 and not configuration["jit_compile"]
        else None
    )
    recipe = go_on(trials, tmp_path / "run", space=TWO, budget=500.0, trials=9, observe=watcher)
    assert recipe.changes.get("jit_compile") is True
    champion, *_ = leaders_of(records_of(tmp_path))
    assert champion.looks[-1].standing is Standing.UNSTABLE


# ------------------------------------------------------------------------------- what one process may have

PORT = TrialFailed(Outcome.ERROR, "OSError: [Errno 98] Address already in use")


def waiting_for_a_lock(seconds):
    """A trial that waits for a lock until its time is over."""
    return TrialFailed(Outcome.TIMEOUT, f"timed out after {seconds:.1f} s while building the model and dataset")


@pytest.mark.parametrize("kind", ["port", "lock"])
def test_conflict_with_the_live_baseline_leads_to_bracketing(tmp_path, kind):
    trials, seconds = simulated_trials(SPEED, noise=0.02), itertools.count(10)

    def failure(each):
        others = len(trials.alive) > 1
        return None if not others else PORT if kind == "port" else waiting_for_a_lock(next(seconds) + 0.3)

    trials.failure = failure
    recipe, records, watcher = run(tmp_path, trials, space=WIDE, budget=300.0, trial_timeout=10.0)
    failed = [record for record in records if record.phase is Phase.SEARCH and not record.outcome.measured]
    assert len(failed) == 3
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["jit_compile"] is True
    again = [record.configuration for record in records if record.outcome.measured]
    assert all(each.configuration in again for each in failed)
    (notice,) = [notice.text for notice in watcher.of(Notice) if "failed with the same error" in notice.text]
    assert "while the baseline was running" in notice
    assert recipe.evidence.confirmation.pairing == "bracketed"


def test_search_ends_if_candidates_fail_alike_without_baseline(tmp_path):
    trials = simulated_trials(SPEED, failure=lambda configuration: None if configuration == BASELINE else PORT)
    recipe, records, watcher = run(tmp_path, trials, space=WIDE, budget=900.0)
    assert (recipe.evidence.verdict, recipe.evidence.ended_by) == (Verdict.UNDECIDED, EndedBy.FAILED)
    assert len(records) < 12
    (notice,) = [notice.text for notice in watcher.of(Notice) if "the search ends here" in notice.text]
    assert "Address already in use" in notice
    assert "log.txt" in notice


def test_failures_of_one_change_do_not_end_the_search(tmp_path):
    trials = simulated_trials(
        faster_by(prefetch=1.4),
        noise=0.02,
        failure=lambda each: TrialFailed(Outcome.ERROR, "no XLA") if each["jit_compile"] is True else None,
    )
    recipe, records, watcher = run(tmp_path, trials, space=WIDE, budget=300.0)
    assert recipe.configuration["prefetch"] != BASELINE["prefetch"]
    assert recipe.evidence.confirmation.pairing == "alternating"
    failed = [record for record in records if record.outcome is Outcome.ERROR]
    assert len(failed) <= 2, "what fails by itself is tried in one more combination at most"
    said = [notice.text for notice in watcher.of(Notice) if "is left out from now on" in notice.text]
    assert len(said) == (len(failed) == 2)
    assert all(text.startswith("jit_compile=true is left out") and "no XLA" in text for text in said)


def test_nothing_is_combined_with_what_was_far_slower_by_itself(tmp_path):
    trials = simulated_trials(faster_by(jit_compile=0.3, prefetch=1.2), noise=0.02)
    _, records, _ = run(tmp_path, trials, space=WIDE, budget=900.0)
    searched = [
        Configuration(record.configuration).differences(BASELINE) for record in records if record.phase is Phase.SEARCH
    ]
    alone = searched.index({"jit_compile": True})
    assert not any("jit_compile" in changes for changes in searched[alone + 1 :])
