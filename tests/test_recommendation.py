"""From what was confirmed to the recipe."""

import dataclasses
import math

import pytest
from simulated_runs import BASELINE, MACHINE, a_pair, a_record, a_slice

from autotune.measure.continuous import Soaked
from autotune.measure.deciding import Shortfall, Verdict
from autotune.measure.growth import NOT_TOLD
from autotune.measure.intervals import LogInterval
from autotune.measure.stability import Check, device_memory
from autotune.recipe.recipe import Confirmation, RecipeWorkload
from autotune.study.confirmed import Confirmed, Plain, Result
from autotune.study.recommendation import break_even, recommend
from autotune.trial.record import Interval, Outcome, Pairing, Phase

FAST = BASELINE.replace(batch_size=128, jit_compile=True)
LARGE = BASELINE.replace(batch_size=64)
SEARCHED = a_record(
    trial=0,
    phase=Phase.BASELINE,
    throughput=Interval(value=3900.0, low=3800.0, high=4000.0),
    compile_seconds=0.5,
    peak_host_bytes=1000,
    input_wait_fraction=0.25,
)
REFERENCE = a_record(
    trial=8,
    phase=Phase.CONFIRM,
    throughput=Interval(value=4000.0, low=3950.0, high=4050.0),
    compile_seconds=0.5,
    peak_host_bytes=1100,
)
PASSED = Check(name="host_memory", passed=True, value=1.0, limit=2.0, detail="fits")


def confirmed(
    configuration=FAST,
    *,
    speedup=1.5,
    verdict=Verdict.FASTER,
    outcome=Outcome.OK,
    count=5,
    **fields,
):
    """A finalist whose confirmation has ended, after so many fresh processes of two templates."""
    bounds = None
    if speedup is not None:
        bounds = LogInterval(value=speedup - 1, low=speedup - 1.1, high=speedup - 0.9, count=count)
    record = a_record(
        configuration,
        phase=Phase.CONFIRM,
        outcome=outcome,
        throughput=Interval(value=6000.0, low=5900.0, high=6100.0),
        compile_seconds=2.5,
        pairing=Pairing.ALTERNATING,
        **fields,
    )
    return Confirmed(
        configuration=configuration,
        ratio=bounds,
        verdict=verdict,
        checks=(PASSED,),
        record=record,
        templates=min(2, count),
    )


def recipe_of(
    *finalists,
    result=True,
    reference=REFERENCE,
    instances=5,
    searched=(),
    baseline_rate=None,
    baseline=BASELINE,
    **ended,
):
    """The recipe of a run that confirmed these finalists, the fastest first."""
    found = Result(confirmed=finalists, baseline=reference, instances=instances, **ended) if result else None
    first = SEARCHED if baseline_rate is None else SEARCHED.model_copy(update={"throughput": baseline_rate})
    return recommend(
        result=found,
        search_records=[first, *searched],
        baseline=baseline,
        machine=MACHINE,
        workload=RecipeWorkload(name="digits", fingerprint="sha256:00", examples=1437),
        provenance={
            "run": "20261120-191001-1a2b3c",
            "search_space": "quick.toml",
            "trials": 9,
            "seed": 0,
            "budget_seconds": 60.0,
            "spent_seconds": 58.5,
        },
        min_gain=0.02,
    )


def test_the_winner_is_recommended():
    """Its configuration, its confirmed figures, the baseline's beside them."""
    winner = confirmed()
    recipe = recipe_of(winner)
    evidence = recipe.evidence
    assert recipe.configuration == dict(FAST)
    assert recipe.baseline == dict(BASELINE)
    assert evidence.verdict is Verdict.FASTER
    assert evidence.speedup.value == winner.speedup.value
    assert evidence.speedup.ci95 == (winner.speedup.low, winner.speedup.high)
    assert evidence.throughput.value == 6000.0
    assert evidence.baseline_throughput.value == 4000.0, "of the confirmation, not of the search"
    assert evidence.best_candidate is None
    assert [check.name for check in evidence.stability.checks] == ["host_memory"]


def test_the_confirmation_can_be_traced():
    """How many instances and finalists there were, and which trials hold the measurements."""
    first, second = confirmed(pairs=(a_pair(1.5),) * 3), confirmed(LARGE, verdict=Verdict.NO_SIGNIFICANT_GAIN)
    found = recipe_of(first, second).evidence.confirmation
    assert (found.instances, found.templates, found.finalists) == (5, 2, 2)
    assert (found.pairs, found.pairing) == (3, "alternating")
    assert found.trials == (REFERENCE.trial, first.record.trial, second.record.trial)


def test_without_a_winner_the_pairs_of_the_best_are_told():
    """Who is told "no gain" sees how much measuring that rests on."""
    best = confirmed(verdict=Verdict.NO_SIGNIFICANT_GAIN, pairs=(a_pair(),) * 2)
    assert recipe_of(best).evidence.confirmation.pairs == 2
    assert recipe_of().evidence.confirmation.pairs == 0
    assert recipe_of().evidence.confirmation.pairing is None


def test_the_processes_of_the_confirmation_are_the_winners_own():
    """A finalist that failed was measured in more of them, of one template: those say nothing of the winner."""
    failed = confirmed(LARGE, outcome=Outcome.CRASHED, count=9)
    found = recipe_of(failed, confirmed(count=3), instances=9).evidence.confirmation
    assert (found.instances, found.templates) == (3, 2)
    assert recipe_of(confirmed(count=1)).evidence.confirmation.templates == 1


@pytest.mark.parametrize(
    ("settled", "told"), [(True, None), (False, "still getting faster"), (None, "too few steps")]
)
@pytest.mark.parametrize("who", ["recommendation", "baseline"])
def test_a_steady_state_that_was_not_seen_is_not_called_a_check(who, settled, told):
    """Of either side: what had not settled, or had too few steps to tell, is named."""
    sides = {"recommendation": True, "baseline": True, who: settled}
    reference = REFERENCE.model_copy(update={"settled": sides["baseline"]})
    winner = confirmed(settled=sides["recommendation"])
    found = [
        each
        for each in recipe_of(winner, reference=reference).evidence.stability.not_checked
        if "steady" in each
    ]
    assert len(found) == (told is not None)
    assert all(told in each and who in each for each in found)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_confirmation_that_was_stopped_by_hand_says_so(stopped):
    """Who stopped it when the figures looked well has taken a look that no interval pays for."""
    not_checked = recipe_of(confirmed(), stopped=stopped).evidence.stability.not_checked
    assert any("the user stopped" in each for each in not_checked) is stopped


def test_the_fastest_that_is_stable_wins():
    """A faster finalist that broke a rule or failed does not stand in the way of a slower sound one."""
    unstable, sound = confirmed(outcome=Outcome.UNSTABLE), confirmed(LARGE, speedup=1.2)
    assert recipe_of(unstable, sound).configuration == dict(LARGE)


def test_what_was_not_checked_is_said():
    """Every recommendation lists the checks that nobody has made yet; the baseline needs none."""
    assert "parity" in " ".join(recipe_of(confirmed()).evidence.stability.not_checked)
    assert recipe_of(result=False).evidence.stability.not_checked == ()


@pytest.mark.parametrize("result", [True, False])
def test_without_a_winner_the_baseline_is_recommended(result):
    """No finalist at all, or none that is faster: no gain is claimed, and no rate of change."""
    recipe = recipe_of(*([confirmed(verdict=Verdict.NO_SIGNIFICANT_GAIN)] if result else []), result=result)
    evidence = recipe.evidence
    assert recipe.configuration == recipe.baseline == dict(BASELINE)
    assert evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
    assert (evidence.speedup.value, evidence.speedup.ci95) == (1.0, (1.0, 1.0))
    assert evidence.throughput == evidence.baseline_throughput
    assert evidence.break_even_samples == 0
    assert recipe.learning_rate is None


def test_without_a_confirmation_the_searchs_figures_stand():
    """The baseline's own slices are all there is; nothing was confirmed."""
    evidence = recipe_of(result=False).evidence
    assert evidence.throughput.value == 3900.0
    assert evidence.input_wait_fraction == 0.25
    assert evidence.confirmation == Confirmation(
        instances=0, templates=0, pairs=0, finalists=0, pairing=None, trials=()
    )
    assert evidence.best_candidate is None


NO_GAIN = Verdict.NO_SIGNIFICANT_GAIN
SLIGHTLY = LogInterval(value=0.0124, low=0.004, high=0.02, count=5)
UNSURE = LogInterval(value=0.05, low=-0.01, high=0.11, count=4)
TOO_FEW = dataclasses.replace(UNSURE, count=2)
ONE_INSTANCE = LogInterval(value=0.9, low=-math.inf, high=math.inf, count=1)
TOO_LARGE = Check(name="host_memory", passed=False, value=3.0, limit=2.0, detail="peak 3 of 2")


@pytest.mark.parametrize(
    ("changes", "shortfall", "reason"),
    [
        ({"ratio": UNSURE}, Shortfall.INTERVAL_INCLUDES_1, "0.990 to 1.116 over 4 fresh processes"),
        ({"ratio": SLIGHTLY}, Shortfall.BELOW_MIN_GAIN, "gain of 1.25% is below the 2.00%"),
        (
            {"ratio": TOO_FEW},
            Shortfall.NO_TIME,
            "over 2 fresh processes, does not lie above 1: they were too few",
        ),
        ({"ratio": None}, Shortfall.NO_TIME, "the budget ended"),
        ({"ratio": ONE_INSTANCE}, Shortfall.NO_TIME, "1 measured of at least 2"),
        ({"templates": 1}, Shortfall.NO_TIME, "(all 5 forks of one interpreter)"),
        ({"checks": (PASSED, TOO_LARGE)}, Shortfall.UNSTABLE, "host_memory: peak 3 of 2"),
        ({"outcome": Outcome.CRASHED, "reason": "killed\nframes"}, Shortfall.UNSTABLE, "(crashed): killed"),
    ],
    ids=[
        "interval",
        "min-gain",
        "few-instances",
        "no-instance",
        "one-instance",
        "one-template",
        "rule",
        "crash",
    ],
)
def test_the_rule_that_failed_is_named(changes, shortfall, reason):
    """Who gets the baseline back learns what was best, and which rule of the decision it failed, with the figure."""
    fields = {key: changes.pop(key) for key in ("outcome", "reason") if key in changes}
    finalist = dataclasses.replace(confirmed(verdict=NO_GAIN, **fields), **changes)
    evidence = recipe_of(finalist).evidence
    assert evidence.shortfall is shortfall
    assert evidence.best_candidate.configuration == dict(FAST)
    assert reason in evidence.best_candidate.reason
    assert (evidence.best_candidate.speedup is None) == (finalist.speedup is None)


def test_what_was_not_confirmed_comes_with_the_searchs_figure_and_a_budget():
    """For want of time: how fast it looked, which is no claim, and a budget with which it would be measured."""
    looked = Interval(value=2.4, low=2.2, high=2.6)
    finalist = dataclasses.replace(confirmed(speedup=None, verdict=NO_GAIN), in_search=looked)
    evidence = recipe_of(finalist, sufficient_budget=130.0).evidence
    assert evidence.best_candidate.search_speedup == 2.4
    assert evidence.best_candidate.speedup is None
    assert evidence.sufficient_budget_seconds == 130.0
    assert (evidence.speedup.value, evidence.verdict) == (1.0, NO_GAIN), "not a claim"


def test_no_budget_is_advised_where_time_was_not_lacking():
    """More time does not make an unstable configuration stable, nor a baseline run."""
    for finalist, cut_short in (
        (confirmed(outcome=Outcome.CRASHED), Shortfall.NO_TIME),
        (confirmed(speedup=None, verdict=NO_GAIN), Shortfall.BASELINE_FAILED),
        (confirmed(speedup=None, verdict=NO_GAIN), Shortfall.INTERRUPTED),
        (confirmed(), Shortfall.NO_TIME),
    ):
        evidence = recipe_of(finalist, sufficient_budget=130.0, cut_short=cut_short).evidence
        assert evidence.sufficient_budget_seconds is None


def test_nothing_measured_is_told_from_nothing_faster():
    """An empty confirmation has one of two reasons; a winner has none."""
    slower = a_record(FAST, speedup=0.8)
    assert recipe_of(result=False).evidence.shortfall is Shortfall.NOTHING_MEASURED
    assert recipe_of(result=False, searched=[slower]).evidence.shortfall is Shortfall.NOTHING_FASTER
    assert recipe_of(confirmed()).evidence.shortfall is None


def test_peak_memory_falls_back_to_the_search():
    """Where the confirmation's process left no closing figures, the baseline's of the search are shown."""
    evidence = recipe_of(confirmed(peak_host_bytes=5000, peak_device_bytes=7)).evidence
    assert (evidence.peak_memory_bytes.host, evidence.peak_memory_bytes.device) == (5000, 7)
    assert evidence.baseline_peak_memory_bytes.host == 1100
    unknown = REFERENCE.model_copy(update={"peak_host_bytes": None})
    assert recipe_of(confirmed(), reference=unknown).evidence.baseline_peak_memory_bytes.host == 1000


def test_the_compile_times_are_set_against_the_gain():
    """Two seconds longer at 6,000 instead of 4,000 samples a second: earned back after 24,000."""
    evidence = recipe_of(confirmed()).evidence
    assert (evidence.compile_seconds, evidence.baseline_compile_seconds) == (2.5, 0.5)
    assert evidence.break_even_samples == 24000


def test_a_larger_batch_comes_with_the_learning_rate_note():
    """Four times the batch: linear and square-root scaling, neither applied."""
    note = recipe_of(confirmed()).learning_rate
    assert (note.batch_ratio, note.linear_scale, note.sqrt_scale) == (4.0, 4.0, 2.0)


@pytest.mark.parametrize(
    ("compile_seconds", "rate", "expected"),
    [
        (0.5, 6000.0, 0),
        (0.1, 6000.0, 0),
        (1.0, 8000.0, 4000),
        (2.5, 8000.0, 16000),
        (2.5, 4000.0, None),
        (2.5, 3000.0, None),
    ],
)
def test_a_longer_compile_time_is_earned_back(compile_seconds, rate, expected):
    """Two seconds more at twice the speed: after 16,000 samples; never, where it is not faster."""
    assert break_even(compile_seconds, 0.5, rate=rate, baseline_rate=4000.0) == expected


def test_an_unknown_compile_time_is_never_earned_back():
    """Where either time is not known there is nothing to tell."""
    assert break_even(None, 0.5, rate=8000.0, baseline_rate=4000.0) is None
    assert break_even(2.5, None, rate=8000.0, baseline_rate=4000.0) is None


# ---------------------------------------------------------------------------------------------------- plain

COMPILED = BASELINE.replace(jit_compile=True)
SLOWER = Plain(
    record=a_record(
        BASELINE, phase=Phase.CONFIRM, throughput=Interval(value=3000.0, low=2900.0, high=3100.0)
    ),
    ratio=LogInterval(value=-0.3, low=-0.4, high=-0.2, count=5),
)
OVER_PLAIN = LogInterval(value=0.8, low=0.7, high=0.9, count=5)


def plain_of(*finalists, baseline=COMPILED, **result):
    """What a run's evidence says of float32 without XLA; the baseline has XLA unless told otherwise."""
    return recipe_of(*finalists, baseline=baseline, **result).evidence.plain


def test_where_the_baseline_is_plain_its_figures_are_plains():
    """That the two are the same is said; the speed-up over the one is the speed-up over the other."""
    recipe = recipe_of(confirmed())
    plain = recipe.evidence.plain
    assert (plain.found, plain.configuration) == ("is_the_baseline", recipe.baseline)
    assert plain.throughput == recipe.evidence.baseline_throughput
    assert plain.speedup_over_plain == recipe.evidence.speedup
    assert plain.baseline_over_plain.value == 1.0


@pytest.mark.parametrize("baseline", [COMPILED, BASELINE.replace(precision="mixed_bfloat16")])
def test_the_recommendation_and_the_baseline_are_held_against_plain(baseline):
    """Each with its own interval; plain is the baseline's configuration in float32 without XLA."""
    winner = dataclasses.replace(confirmed(), over_plain=OVER_PLAIN)
    plain = plain_of(winner, plain=SLOWER, baseline=baseline)
    assert (plain.found, plain.reason, plain.configuration) == ("measured", "", dict(BASELINE))
    assert (plain.throughput.value, plain.trial) == (3000.0, SLOWER.record.trial)
    assert plain.speedup_over_plain.value == pytest.approx(math.exp(0.8))
    assert plain.speedup_over_plain.ci95 == pytest.approx((math.exp(0.7), math.exp(0.9)))
    assert plain.baseline_over_plain.value == pytest.approx(math.exp(0.3))
    assert plain.baseline_over_plain.ci95 == pytest.approx((math.exp(0.2), math.exp(0.4)))


def test_the_baseline_as_recommendation_is_as_much_over_plain_as_it_is():
    """Not as much as the finalist that did not win."""
    loser = dataclasses.replace(confirmed(verdict=Verdict.NO_SIGNIFICANT_GAIN), over_plain=OVER_PLAIN)
    plain = plain_of(loser, plain=SLOWER)
    assert plain.speedup_over_plain == plain.baseline_over_plain
    assert plain.baseline_over_plain.value == pytest.approx(math.exp(0.3))


def test_a_winner_that_was_not_beside_plain_has_no_figure_over_it():
    """It took the place of another, say; the baseline's figure stands."""
    plain = plain_of(confirmed(), plain=SLOWER)
    assert plain.found == "measured"
    assert plain.speedup_over_plain is None
    assert plain.baseline_over_plain is not None


def test_why_plain_was_not_measured_is_said():
    """The confirmation's reason; or that there was none."""
    left_out = plain_of(confirmed(), plain=Plain(left_out="no room"))
    assert (left_out.found, left_out.reason, left_out.throughput) == ("not_measured", "no room", None)
    failed = plain_of(confirmed(), plain=Plain(record=SLOWER.record, left_out="it failed"))
    assert (failed.throughput, failed.trial) == (None, SLOWER.record.trial)
    without = plain_of(result=False)
    assert (without.found, without.reason) == (
        "not_measured",
        "nothing was faster, so there was no confirmation",
    )


def soaked(*, pauses, half_width):
    """A continuous run of which this is known of what pauses give, as a logarithm."""

    def around(error):
        return LogInterval(value=pauses, low=pauses - error, high=pauses + error, count=6)

    return Soaked(
        pauses=around(half_width),
        surely=around(1.5 * half_width),
        slices=(((4900.0, 490), (5100.0, 510)), ((5000.0, 500), (5000.0, 500))),
        baseline_slices=(((3900.0, 390), (3900.0, 390)), ((4100.0, 410), (3700.0, 370))),
        seconds=10.0,
    )


@pytest.mark.parametrize(("half_width", "told"), [(0.05, False), (0.3, True)])
def test_a_continuous_run_that_was_too_short_to_tell_is_not_called_a_check(half_width, told):
    """What pauses gave stays open, and is listed so."""
    found = soaked(pauses=0.0, half_width=half_width)
    winner = dataclasses.replace(confirmed(), soaked=found, in_slices=confirmed().ratio)
    not_checked = recipe_of(winner).evidence.stability.not_checked
    assert any("too short to tell" in each for each in not_checked) is told
    assert "a continuous run" not in not_checked


@pytest.mark.parametrize("name", ["host_memory_growth", "device_memory_growth"])
@pytest.mark.parametrize(
    ("detail", "told"), [("no growth", False), (f"it grows; too little {NOT_TOLD}", True)]
)
def test_a_leak_of_nobody_knows_whom_is_not_called_a_check(name, detail, told):
    """Memory that may be the configuration's own leak is listed as not checked."""
    grown = Check(name=name, passed=True, value=1.0, limit=2.0, detail=detail)
    winner = dataclasses.replace(confirmed(), checks=(PASSED, grown))
    not_checked = recipe_of(winner).evidence.stability.not_checked
    told_of = [each for each in not_checked if "leaks memory" in each]
    assert [name.replace("_", " ") in each for each in told_of] == [True] * told


@pytest.mark.parametrize("checks", [(PASSED,), (PASSED, device_memory(1 << 30, 1 << 34))])
@pytest.mark.parametrize("peak", [None, 1 << 30])
def test_what_nobody_looked_at_on_a_device_is_said(checks, peak):
    """Where one was used: throttling; and its memory, where nobody knows how much it has."""
    winner = dataclasses.replace(confirmed(peak_device_bytes=peak), checks=checks)
    not_checked = recipe_of(winner).evidence.stability.not_checked
    told = {each for each in not_checked if "device" in each}
    assert len(told) == (0 if peak is None else 3 - len(checks))
    assert any("could not be read" in each for each in told) is (peak is not None and len(checks) == 1)


def test_a_larger_batch_of_which_no_loss_was_measured_is_said():
    """There was no time for it: then the training loss is as unknown as the held-out one."""
    not_checked = recipe_of(confirmed(LARGE)).evidence.stability.not_checked
    assert any(each.startswith("training and held-out loss after") for each in not_checked)


@pytest.mark.parametrize(
    ("timed_by", "examples", "told"),
    [("steps", None, True), ("steps", 10**6, False), ("epochs", None, False)],
)
def test_epochs_of_unknown_length_are_not_called_a_check(timed_by, examples, told):
    """Steps alone were timed, and what lies between epochs could be charged to none of them."""
    winner = confirmed(timed_by=timed_by, examples_per_epoch=examples)
    not_checked = recipe_of(winner).evidence.stability.not_checked
    assert any("between epochs" in each for each in not_checked) is told


@pytest.mark.parametrize(("timed_by", "told"), [("steps", True), ("epochs", False)])
def test_validation_of_unknown_length_is_not_called_a_check(timed_by, told):
    """Its beginning alone is charged where epochs are timed by steps; whole epochs hold it all."""
    winner = confirmed(timed_by=timed_by, examples_per_epoch=10**6, validation_uncounted=True)
    not_checked = recipe_of(winner).evidence.stability.not_checked
    assert any("validation costs" in each for each in not_checked) is told


@pytest.mark.parametrize("who", ["recommendation", "baseline"])
@pytest.mark.parametrize(
    ("timed_by", "stalled", "examples", "told"),
    [
        ("steps", None, 10**6, True),
        ("steps", 0.0, 10**6, False),
        ("epochs", None, 1437, False),
        ("steps", None, None, False),
    ],
)
def test_stalls_that_nobody_could_tell_are_not_called_checked(who, timed_by, stalled, examples, told):
    """Where epochs are timed by steps, and short ones were too slow to show their stalls, neither side is charged."""
    timing = {"timed_by": timed_by, "stalled_ends": stalled, "examples_per_epoch": examples}
    winner = confirmed(**(timing if who == "recommendation" else {}))
    reference = REFERENCE.model_copy(update=timing) if who == "baseline" else REFERENCE
    not_checked = recipe_of(winner, reference=reference).evidence.stability.not_checked
    assert (f"stalls at ends of epochs (short epochs did not tell those of the {who})" in not_checked) is told


@pytest.mark.parametrize(("untold", "told"), [(0, False), (2, True)])
def test_stalls_that_only_some_processes_could_tell_are_not_called_checked(untold, told):
    """Those charge their epochs for them, and the others do not: what is claimed is between both."""
    winner = confirmed(timed_by="steps", stalled_ends=0.3, examples_per_epoch=10**6, stalls_untold=untold)
    not_checked = recipe_of(winner).evidence.stability.not_checked
    assert any("recommendation in some processes only" in each for each in not_checked) is told


@pytest.mark.parametrize(
    ("own", "baselines", "told"),
    [
        (0.0, 0.05, ""),
        (0.34, 0.47, "(47% of the baseline's and 34% of the recommendation's, by"),
        (0.2, None, ""),  # then neither is charged
    ],
)
def test_a_speed_up_that_hangs_on_stalls_is_said_to(own, baselines, told):
    """How many epochs end in one is another number when the machine is faster or slower."""
    timing = {"timed_by": "steps", "examples_per_epoch": 10**6}
    reference = REFERENCE.model_copy(update={**timing, "stalled_ends": baselines})
    recipe = recipe_of(confirmed(**timing, stalled_ends=own), reference=reference)
    (found,) = [each for each in recipe.evidence.stability.not_checked if "tuning (" in each] or [""]
    assert told in found
    assert bool(found) is bool(told)


@pytest.mark.parametrize(("stalled", "told"), [(1, False), (6, True)])
def test_a_speed_up_over_stalled_epochs_is_said_to_be_one(stalled, told):
    """Where whole epochs show which of the baseline's ended in one, as `digits_cnn` does."""
    usual = a_slice().model_copy(update={"epochs": 1, "seconds": 0.61, "steps": 45, "examples": 1437})
    late = usual.model_copy(
        update={"seconds": 1.265, "step_seconds": usual.step_seconds.model_copy(update={"max": 0.64})}
    )
    pairs = tuple(
        a_pair().model_copy(update={"baseline": late if n < stalled else usual, "candidate": usual})
        for n in range(12)
    )
    not_checked = recipe_of(confirmed(pairs=pairs)).evidence.stability.not_checked
    assert any(f"{stalled} of 12 of the baseline's did" in each for each in not_checked) is told


def test_rates_of_a_continuous_run_are_all_examples_over_all_the_time():
    """Slices of equal time at 200 and 50 samples/s train 125 in a second; equal weights would say 80."""
    legs = (((200.0, 200), (50.0, 50)),) * 2
    found = dataclasses.replace(soaked(pauses=0.3, half_width=0.05), slices=legs, baseline_slices=legs)
    winner = dataclasses.replace(confirmed(), soaked=found, in_slices=confirmed().ratio)
    evidence = recipe_of(winner).evidence
    assert evidence.continuous.replaces_slices
    assert evidence.throughput.value == pytest.approx(125.0)
    assert evidence.baseline_throughput.value == pytest.approx(125.0)


def test_rates_that_pauses_have_raised_are_not_in_the_recipe():
    """Where the pauses' gain is taken off the claim, throughputs are those of slices without a pause.

    Of two legs' own means an interval would be as wide as nobody can use.
    """
    winner = dataclasses.replace(
        confirmed(), soaked=soaked(pauses=0.3, half_width=0.05), in_slices=confirmed().ratio
    )
    evidence = recipe_of(winner).evidence
    assert evidence.continuous.replaces_slices
    rates = evidence.throughput, evidence.baseline_throughput
    assert [each.value for each in rates] == pytest.approx([5000.0, 3900.0], rel=0.01)
    assert all(0.02 < each.ci95[1] / each.ci95[0] - 1 < 0.2 for each in rates)


def test_more_slices_of_the_same_turns_make_no_narrower_rate():
    """Four turns tell of their spread: what differs between them is no noise of their slices."""
    means = 4000.0, 6000.0, 4400.0, 5600.0

    def width(slices):
        found = dataclasses.replace(
            soaked(pauses=0.3, half_width=0.05), slices=tuple(((mean, 100),) * slices for mean in means)
        )
        winner = dataclasses.replace(confirmed(), soaked=found, in_slices=confirmed().ratio)
        low, high = recipe_of(winner).evidence.throughput.ci95
        return high / low

    assert width(20) == pytest.approx(width(2), rel=0.05)


def test_a_winner_that_never_told_its_memory_is_not_given_anothers():
    """No process of it has told what it held: the recipe says so, where the memory rules would have been."""
    told = confirmed(peak_host_bytes=1200)
    recipe = recipe_of(told)
    assert recipe.evidence.peak_memory_bytes.host == 1200
    assert not any("peak memory" in each for each in recipe.evidence.stability.not_checked)
    recipe = recipe_of(confirmed(peak_host_bytes=None))
    assert recipe.evidence.peak_memory_bytes.host is None
    assert any("peak memory" in each for each in recipe.evidence.stability.not_checked)
