"""How a run's time is spent."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autotune.errors import ArgumentError, BudgetError
from autotune.study.plan import (
    CLOSING_SECONDS,
    CONFIRMATION_SHARE,
    ENOUGH_INSTANCES,
    FEWEST_INSTANCES,
    FINALISTS,
    LEAST_INSTANCE_SECONDS,
    LEAST_MEASURED,
    LONG_BUDGET,
    MANY_INSTANCES,
    MOST_INSTANCE_SECONDS,
    MOST_INSTANCES,
    MOST_MEASURED,
    NUMERICS_SHARE,
    OVERRUN_SHARE,
    PROBE_SHARE,
    SECOND_LOOK_SHARE,
    SETTING_UP_SECONDS,
    TRIALS_WORTH_HAVING,
    baseline_timeout,
    budget_to_confirm,
    parse_duration,
    plan_instances,
    plan_run,
    usual_trial,
)


def advised(error):
    """The budget that the hint of an error names, in seconds."""
    return float(re.search(r"--budget (\d+)s", error.hint).group(1))


def plan(budget, *, ready_at=8.0, first_step=2.0, trial_timeout=None):
    """A plan for a baseline that was warm after eight seconds."""
    return plan_run(budget, ready_at=ready_at, first_step=first_step, trial_timeout=trial_timeout)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("0.5s", 0.5),
        ("10m", 600),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("1h1m1s", 3661),
        (" 10M ", 600),
    ],
)
def test_durations_are_read_in_seconds(text, seconds):
    """Hours, minutes and seconds add up; a bare number is seconds; case and surrounding blanks do not count."""
    assert parse_duration(text, name="budget") == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "0m", "-5", "ten", "10x", "5m1h", "1e3", "nan", "inf", "m", "1 h", "9" * 400 + "s", "١٠x"],
)
def test_what_is_no_duration_is_refused(text):
    """Anything else is an argument error that shows what durations look like."""
    with pytest.raises(ArgumentError, match="not a duration") as caught:
        parse_duration(text, name="budget")
    assert "90s" in caught.value.hint


def test_the_confirmation_keeps_its_share_of_the_budget():
    """35% of the budget stay for the confirmation, and it ends in time to write the recipe."""
    made = plan(600.0)
    assert made.search_ends == pytest.approx(600.0 * (1 - CONFIRMATION_SHARE))
    assert CONFIRMATION_SHARE == 0.35
    assert made.ends == 600.0 - CLOSING_SECONDS


def test_several_finalists_only_when_there_is_time():
    """One finalist below five minutes, several at most from there on."""
    assert LONG_BUDGET == 5 * 60
    assert plan(LONG_BUDGET - 1).finalists == 1
    assert plan(LONG_BUDGET).finalists == FINALISTS > 1


@pytest.mark.parametrize(
    ("budget", "first_step", "limit"),
    [
        (3600.0, 1.0, 20.0),
        (3600.0, 30.0, 120.0),
        (600.0, 30.0, 60.0),
        (100.0, 1.0, 10.0),
    ],
)
def test_a_trial_may_take_four_times_the_baselines_first_step(budget, first_step, limit):
    """At least 20 s and four times the baseline's first step, but at most a tenth of the budget."""
    assert plan(budget, first_step=first_step).trial_timeout == pytest.approx(limit)


def test_a_trial_may_always_take_as_long_as_the_baseline_did():
    """A tenth of a small budget can be less than the first step takes: then every trial would time out."""
    assert plan(90.0, ready_at=15.0, first_step=9.0).trial_timeout > 9.0


@pytest.mark.parametrize("ready", [40.0, 90.0, 120.0])
def test_a_trial_may_compile_for_longer_than_the_baseline_did(ready):
    """Of a start that is mostly compilation, half as much again is no failure, however small the budget."""
    made = plan_run(900.0, ready_at=ready + 20.0, first_step=0.8 * ready, ready=ready, trial_timeout=None)
    assert made.trial_timeout >= 1.5 * ready + LEAST_MEASURED


def test_the_users_own_trial_timeout_counts():
    """A limit that the user gives is taken as it is."""
    assert plan(600.0, trial_timeout=7.5).trial_timeout == 7.5


def test_slices_get_longer_with_the_time_there_is():
    """A trial is measured for 3 to 10 seconds: so long that a number of trials worth having fits."""
    assert plan(60.0).measured == LEAST_MEASURED == 3.0
    assert plan(300.0, ready_at=10.0).measured == pytest.approx(185.0 / TRIALS_WORTH_HAVING)
    assert plan(7200.0).measured == MOST_MEASURED == 10.0


def test_the_searchs_time_is_shared_between_its_parts():
    """Probes get a share from its beginning, second looks one at its end, samples what lies between."""
    made = plan(600.0, ready_at=90.0)
    assert made.probes_end == pytest.approx(90.0 + 300.0 * PROBE_SHARE)
    assert made.sampling_ends == pytest.approx(390.0 - 300.0 * SECOND_LOOK_SHARE)


def test_a_budget_that_is_too_small_names_one_that_is_not():
    """What the hint of the error says to give is enough."""
    with pytest.raises(BudgetError, match="too small") as caught:
        plan(20.0, ready_at=11.0, first_step=4.0)
    budget = advised(caught.value)
    assert budget > 20.0
    plan(budget, ready_at=11.0, first_step=4.0)


TIMES = {
    "ready_at": st.floats(0.1, 1e4),
    "first_step": st.floats(0.01, 1e3),
    "ready": st.floats(0.01, 1e3),
    "import_seconds": st.floats(0.0, 1e3),
    "slice_seconds": st.floats(0.0, 100.0),
    "bracketed": st.booleans(),
    "numerics": st.booleans(),
}


@given(budget=st.floats(1.0, 1e4), times=st.fixed_dictionaries(TIMES))
def test_the_advised_budget_is_accepted(budget, times):
    """Whatever importing, starting and a slice take: the budget that a refusal names is not refused."""
    enough = budget
    try:
        plan_run(budget, trial_timeout=None, **times)
    except BudgetError as error:
        enough = advised(error)
    assert enough >= budget
    plan_run(enough, trial_timeout=None, **times)


@given(budget=st.floats(1.0, 1e4), times=st.fixed_dictionaries(TIMES))
def test_an_accepted_budget_holds_a_trial_and_two_instances(budget, times):
    """No budget is accepted in which nothing could ever be confirmed: imports and starts are counted."""
    try:
        made = plan_run(budget, trial_timeout=None, **times)
    except BudgetError:
        return
    start = max(times["first_step"], times["ready"])
    processes = 3 if times["bracketed"] else 2
    confirmation = times["import_seconds"] + FEWEST_INSTANCES * (
        processes * start + max(LEAST_INSTANCE_SECONDS, 4 * times["slice_seconds"])
    )
    assert made.ends - made.search_ends >= confirmation * (1 - 1e-9)
    trial = max(start + max(LEAST_MEASURED, 4 * times["slice_seconds"]), usual_trial(made.measured))
    assert made.search_ends - times["ready_at"] >= (SETTING_UP_SECONDS + trial) * (1 - 1e-9)


@pytest.mark.parametrize("numerics", [False, True])
def test_what_was_searched_before_needs_no_time_for_another_trial(numerics):
    """The baseline is warm again after the search's end: the confirmation has the rest, losses are compared first."""
    times = {"ready_at": 395.0, "first_step": 4.0, "ready": 8.0, "import_seconds": 6.0, "trial_timeout": None}
    with pytest.raises(BudgetError):
        plan_run(600.0, **times, numerics=numerics)
    made = plan_run(600.0, **times, numerics=numerics, searched=True)
    assert made.search_ends == made.sampling_ends == made.probes_end == 395.0
    assert made.numerics_ends == (395.0 + NUMERICS_SHARE * 600.0 if numerics else 395.0)
    assert made.ends > 590.0
    assert plan_run(600.0, **{**times, "ready_at": 100.0}, searched=True) == plan_run(
        600.0, **{**times, "ready_at": 100.0}
    ), "what has time for a search has one"
    with pytest.raises(BudgetError):
        plan_run(600.0, **{**times, "ready_at": 585.0}, numerics=numerics, searched=True)


@example(share=0.75, budget=300.0, ready=5.0, numerics=True)
@example(share=0.7, budget=300.0, ready=3.0, numerics=False)
@given(
    share=st.floats(0.3, 0.99),
    budget=st.floats(60.0, 4000.0),
    ready=st.floats(0.5, 10.0),
    numerics=st.booleans(),
)
def test_a_soak_and_losses_get_what_enough_instances_leave_of_the_rest(share, budget, ready, numerics):
    """However late a run is gone on with: neither takes what four instances need, where there is time for those."""
    times = {"ready_at": share * budget, "first_step": ready / 2, "ready": ready, "import_seconds": 4.0}
    try:
        made = plan_run(budget, **times, numerics=numerics, searched=True, trial_timeout=None)
    except BudgetError:
        return
    if made.search_ends > times["ready_at"]:
        return
    instance = 2 * ready + LEAST_INSTANCE_SECONDS
    enough = 4.0 + ENOUGH_INSTANCES * instance
    spared = made.soak + made.numerics_ends - times["ready_at"]
    assert spared == 0 or made.ends - times["ready_at"] - spared >= enough - 1e-6


@pytest.mark.parametrize("numerics", [False, True])
@pytest.mark.parametrize("ready", [0.2, 3.0])
def test_the_least_budget_that_is_accepted_begins_a_trial(ready, numerics):
    """Right above the refusal, losses to be compared or not: the search has its first trial, and time to set it up."""
    for tenths in range(100, 1200):
        try:
            made = plan_run(
                tenths / 10,
                ready_at=12.0,
                first_step=0.1,
                ready=ready,
                import_seconds=8.0,
                numerics=numerics,
                trial_timeout=None,
            )
        except BudgetError:
            continue
        first = max(ready + LEAST_MEASURED + 2.0, usual_trial(made.measured))
        assert made.search_ends - 12.0 >= (SETTING_UP_SECONDS + first) * (1 - 1e-9)
        return
    pytest.fail("two minutes were refused")


def test_a_minute_is_enough_on_a_usual_machine():
    """Three seconds of import, one to the first step, two until ready: 60 s are searched and confirmed."""
    made = plan_run(60.0, ready_at=6.5, first_step=1.0, ready=2.0, import_seconds=3.0, trial_timeout=None)
    assert made.search_ends == pytest.approx(60.0 * (1 - CONFIRMATION_SHARE))


def test_a_small_budget_gives_the_confirmation_what_two_instances_need():
    """Where 35% would not hold two instances and the imports, the search has less."""
    made = plan_run(60.0, ready_at=14.0, first_step=1.0, ready=2.0, import_seconds=10.0, trial_timeout=None)
    assert made.search_ends < 60.0 * (1 - CONFIRMATION_SHARE)
    assert made.ends - made.search_ends == pytest.approx(10.0 + 2 * (2 * 2.0 + LEAST_INSTANCE_SECONDS))


@given(start=st.floats(0.1, 300.0), slice_seconds=st.floats(0.0, 30.0))
def test_the_budget_to_confirm_holds_enough_instances(start, slice_seconds):
    """The share that a confirmation has of the advised budget is planned as enough instances, or more."""
    made = plan(60.0)
    budget = budget_to_confirm(made, start=start, slice_seconds=slice_seconds)
    assert budget > made.budget
    available = CONFIRMATION_SHARE * budget - CLOSING_SECONDS
    assert plan_instances(available, start=start, slice_seconds=slice_seconds)[0] >= ENOUGH_INSTANCES


@given(
    budget=st.floats(1.0, 1e6),
    ready_at=st.floats(0.1, 1e5),
    first_step=st.floats(0.01, 1e4),
)
def test_the_parts_of_a_plan_follow_one_another(budget, ready_at, first_step):
    """Whatever the numbers: the phases are in order, within the budget, and each has time."""
    try:
        made = plan(budget, ready_at=ready_at, first_step=first_step)
    except BudgetError:
        return
    assert ready_at < made.probes_end < made.sampling_ends < made.search_ends < made.ends < budget
    assert made.trial_timeout > first_step
    assert made.search_ends - ready_at > made.measured


def test_the_baseline_may_not_take_the_whole_budget():
    """What the baseline may take to warm up leaves most of the budget to the rest."""
    assert 10.0 < baseline_timeout(60.0) < 60.0 * (1 - CONFIRMATION_SHARE)
    assert baseline_timeout(600.0) == pytest.approx(10 * baseline_timeout(60.0))
    assert baseline_timeout(0.001) == 1.0


@given(
    available=st.floats(0.0, 1e5),
    start=st.floats(0.1, 1e3),
    finalists=st.integers(1, FINALISTS),
)
def test_planned_instances_fit_in_the_time_there_is(available, start, finalists):
    """As many as may be, which end in time; two where not even those can."""
    count, seconds = plan_instances(available, start=start, finalists=finalists)
    assert FEWEST_INSTANCES <= count <= MOST_INSTANCES
    if seconds == 0.0:
        assert count == FEWEST_INSTANCES
        assert available <= count * start * (1 + 1e-9)
    else:
        assert count * (start + seconds) <= available * (1 + 1e-9)


def test_more_time_means_more_instances_then_longer_ones_then_more_again():
    """Many short instances say more than few long ones; a claim gets narrower as long as there is time."""
    few, _ = plan_instances(20.0, start=2.0)
    more, short = plan_instances(45.0, start=2.0)
    many, longer = plan_instances(100.0, start=2.0)
    assert few < more < many == MANY_INSTANCES
    assert longer > short
    assert plan_instances(MANY_INSTANCES * 14.0, start=2.0) == (MANY_INSTANCES, MOST_INSTANCE_SECONDS)
    assert plan_instances(20 * 14.0, start=2.0) == (20, MOST_INSTANCE_SECONDS)
    assert plan_instances(1e6, start=2.0) == (MOST_INSTANCES, MOST_INSTANCE_SECONDS)


def test_many_instances_are_planned_alike_as_they_are_done():
    """What is left after some of them holds the others, each as long as it was to be."""
    for done in range(19):
        assert plan_instances((20 - done) * 14.0, start=2.0, done=done) == (20 - done, MOST_INSTANCE_SECONDS)


@given(start=st.floats(0.1, 100.0), finalists=st.integers(1, FINALISTS), slice_seconds=st.floats(0.0, 10.0))
def test_slices_take_as_long_as_the_start_before_them(start, finalists, slice_seconds):
    """Where there is time for enough instances: with a third of an instance in slices, chance in slices rules."""
    sides = {"finalists": finalists, "slice_seconds": slice_seconds}
    for count in range(ENOUGH_INSTANCES, MOST_INSTANCES + 4):
        available = count * 2 * start
        planned, seconds = plan_instances(available, start=start, **sides)
        if planned > ENOUGH_INSTANCES:
            assert seconds >= start * (1 - 1e-9)


def test_processes_that_start_slowly_are_enough_before_their_slices_are_long():
    """Of 120 s, where two processes take 18 s to start: four instances of 12 s, not three of 22; of 400 s, eleven."""
    slowly = {"start": 18.0, "slice_seconds": 1.1}
    assert plan_instances(120.0, **slowly) == (ENOUGH_INSTANCES, pytest.approx(12.0))
    count, seconds = plan_instances(400.0, **slowly)
    assert (count, seconds) == (11, 18.0)
    assert plan_instances(80.0, **slowly, done=8) == (2, 18.0)


def test_what_was_measured_is_not_planned_again():
    """After one instance of two the other has all that is left; after the most there may be, one at most is added."""
    assert plan_instances(8.0, start=4.0, done=1) == (1, 4.0)
    assert plan_instances(1e6, start=2.0, done=MOST_INSTANCES - 3)[0] == 3
    assert plan_instances(0.0, start=2.0, done=5) == (1, 0.0)


def test_more_finalists_need_longer_instances():
    """Each takes its turns beside the baseline's: three finalists take twice the time of one, and so fewer fit."""
    assert plan_instances(1e6, start=2.0, finalists=3) == (MOST_INSTANCES, 2 * MOST_INSTANCE_SECONDS)
    assert plan_instances(45.0, start=2.0, finalists=3)[0] < plan_instances(45.0, start=2.0)[0]


def test_long_slices_mean_fewer_instances():
    """Where a slice is a long epoch, an instance takes several of them, whatever its seconds were to be."""
    usual, _ = plan_instances(100.0, start=2.0)
    few, seconds = plan_instances(100.0, start=2.0, slice_seconds=8.0)
    assert few < usual
    assert seconds >= 4 * 8.0


def test_the_search_may_not_overrun_into_what_two_instances_need():
    """With a large budget there is some to spare; with a small one, where the confirmation has the least, none."""
    large = plan(600.0)
    assert large.search_last == pytest.approx(large.search_ends + OVERRUN_SHARE * 600.0)
    tight = plan_run(60.0, ready_at=14.0, first_step=1.0, ready=2.0, import_seconds=10.0, trial_timeout=None)
    assert tight.search_last == pytest.approx(tight.search_ends)
