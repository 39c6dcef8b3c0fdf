"""The rules a configuration must pass before it may be recommended."""

from dataclasses import replace

import pytest
from simulated_runs import LIMITS, a_slice

from autotune.data.record import Phase, StepSeconds
from autotune.data.run_directory import RunDirectory
from autotune.space.configuration import read_trials
from autotune.stats.stability import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    LOSS_RISE,
    MOST_HANGS,
    CallSeconds,
    EpochWork,
    check_constant_work,
    check_epoch_work,
    check_falling_loss,
    check_finite_loss,
    check_hangs,
    check_loss_scale,
    check_peak_memory,
    check_retracing,
    check_slow_calls,
    check_throttling,
)
from autotune.tuning.rules import call_seconds, checks_of

LIMIT = 10 << 30


@pytest.mark.parametrize("name", [HOST_MEMORY, DEVICE_MEMORY])
def test_a_tenth_of_the_memory_stays_free(name):
    allowed = int(LIMIT * 0.9)
    fits, too_much = check_peak_memory(name, allowed, LIMIT), check_peak_memory(name, allowed + 1, LIMIT)
    assert fits.passed
    assert not too_much.passed
    assert (fits.name, fits.value, fits.limit) == (name, allowed, LIMIT * 0.9)


def test_the_memory_rule_says_how_much_there_was():
    assert check_peak_memory(HOST_MEMORY, 5 << 30, LIMIT).detail == "peak 5.00 GiB of 10.00 GiB, 10% kept free"


def test_the_margin_can_be_another():
    assert not check_peak_memory(HOST_MEMORY, 6 << 30, LIMIT, margin=0.5).passed


def test_looks_at_the_loss_are_counted():
    assert check_finite_loss([2.0, None, 1.0]).value == 2
    assert check_finite_loss([2.0, None, 1.0]).conclusive
    assert "no loss" in check_finite_loss([None]).detail
    assert not check_finite_loss([None]).conclusive


def rising(first, last, *, baseline_first=2.3, baseline_last=1.5):
    """The loss rule, beside a baseline whose loss falls."""
    return check_falling_loss(first, last, baseline_first=baseline_first, baseline_last=baseline_last)


@pytest.mark.parametrize(
    ("first", "last", "passed"),
    [
        (2.3, 1.0, True),
        (2.3, 2.3 * (1 + LOSS_RISE) - 1e-9, True),
        (2.3, 2.3 * (1 + LOSS_RISE) + 1e-9, False),
        (2.3, 9.0, False),
        (-1.0, -2.0, True),
        (-1.0, -0.5, False),
    ],
)
def test_a_loss_that_rises_fails(first, last, passed):
    assert rising(first, last, baseline_first=first, baseline_last=first - 1.0).passed is passed


@pytest.mark.parametrize(
    ("first", "last", "passed"), [(0.5, 1.0, True), (0.5, 1.2, False), (1.5, 1.6, True), (1.5, 1.7, False)]
)
def test_a_lucky_first_batch_does_not_make_a_loss_rise(first, last, passed):
    assert rising(first, last, baseline_first=1.0, baseline_last=0.9).passed is passed


def test_nothing_is_held_against_a_baseline_that_does_not_fall():
    found = rising(2.3, 9.0, baseline_last=2.3)
    assert found.passed
    assert not found.conclusive
    assert "baseline" in found.detail


@pytest.mark.parametrize("missing", range(4))
def test_a_model_without_a_loss_is_not_checked(missing):
    losses = [2.3, 9.0, 2.3, 1.5]
    losses[missing] = None
    first, last, baseline_first, baseline_last = losses
    found = rising(first, last, baseline_first=baseline_first, baseline_last=baseline_last)
    assert found.passed
    assert not found.conclusive
    assert "no loss" in found.detail


# ---------------------------------------------------------------------------------------------------- retracing


@pytest.mark.parametrize(
    ("own", "baseline", "passed"),
    [
        ([0, 0, 0], [0, 0, 0], True),
        ([1, 1, 1], [0, 0, 0], True),
        ([2, 2, 2], [0, 0, 0], False),
        ([9, 0, 0], [0, 0, 0], True),
        ([0, 2], [0, 0], False),
        ([8, 8, 8], [4, 4, 4], True),
        ([9, 9, 9], [4, 4, 4], False),
    ],
)
def test_retracing_is_refused_where_the_baseline_does_not(own, baseline, passed):
    assert check_retracing(own, baseline).passed is passed


def test_what_to_do_about_retracing_is_said():
    refused, excused, fine = check_retracing([7], [0]), check_retracing([7], [7]), check_retracing([0], [0])
    assert "again 7 times after the warm-up (baseline: 0); give all batches one shape" in refused.detail
    assert "the configuration is not to blame; give all batches one shape" in excused.detail
    assert "one shape" not in fine.detail


# ------------------------------------------------------------------------------------------ tails and hangs


def calls(median, *, slow=None, longest=None):
    """One slice's calls; without more figures all take the same."""
    slow = median if slow is None else slow
    return CallSeconds(median=median, slow=slow, longest=slow if longest is None else longest)


STEADY = [calls(0.002)] * 12


@pytest.mark.parametrize(
    ("own", "baseline"),
    [
        ([calls(0.002, slow=0.040)] * 12, STEADY),  # p99/p50 of 20: noise of short steps
        ([calls(0.002, slow=0.080)] * 12, STEADY),  # fit's stall at a boundary, in each slice
        ([calls(0.002, slow=0.9)] * 5 + STEADY[:7], STEADY),  # a burst
        ([calls(0.1, slow=0.39)] * 12, [calls(0.1)] * 12),
        ([calls(0.002, slow=0.9)] * 12, [calls(0.002, slow=0.003, longest=0.31)] * 12),
        ([calls(30.0, slow=40.0)] * 6, [calls(4.0, slow=5.0)] * 6),
    ],
)
def test_an_innocent_tail_passes(own, baseline):
    assert check_slow_calls(own, baseline).passed
    assert check_hangs(own, baseline, boundary_seconds=0.0).passed


@pytest.mark.parametrize("slow", [0.3, 2.0])
def test_steps_that_alternate_wildly_are_refused(slow):
    own = [calls(0.003, slow=slow)] * 7 + [calls(0.003)] * 5
    found = check_slow_calls(own, STEADY)
    assert not found.passed
    assert (found.value, found.limit) == (pytest.approx(slow - 0.003), 0.25)


@pytest.mark.parametrize(
    ("epochs", "steps", "slow"),
    [(0, 100, 0.99), (1, 200, 0.99), (1, 100, 0.90), (2, 45, 0.90), (1, 10, 0.50), (3, 3, 0.50)],
)
def test_boundaries_between_epochs_are_no_tail(epochs, steps, slow):
    seconds = StepSeconds(p50=0.50, p90=0.90, p99=0.99, max=9.0)
    timed = a_slice(epochs=epochs).model_copy(update={"steps": 4 * steps, "step_seconds": seconds})
    of_calls = call_seconds(timed, 4)
    assert (of_calls.median, of_calls.slow, of_calls.longest) == (2.0, pytest.approx(4 * slow), 36.0)


def test_boundary_among_calls_of_large_batches_is_no_hang():
    own = [calls(0.1, longest=2.1)] * 8
    steps = [calls(0.01)] * 8
    assert check_hangs(own, steps, boundary_seconds=0.41).passed
    assert not check_hangs(own, steps, boundary_seconds=0.39).passed


@pytest.mark.parametrize(
    ("hanging", "beside", "passed"), [(MOST_HANGS, 0, True), (MOST_HANGS + 1, 0, False), (9, 3, True), (10, 3, False)]
)
def test_hanging_now_and_then_is_refused(hanging, beside, passed):
    hang = calls(0.003, longest=2.5)
    own = [hang] * hanging + [calls(0.003)] * (60 - hanging)
    baseline = [hang] * beside + [calls(0.003)] * (60 - beside)
    found = check_hangs(own, baseline, boundary_seconds=0.0)
    assert found.passed is passed
    assert f"{hanging} of 60 slices" in found.detail
    assert check_slow_calls(own, baseline).passed, "medians do not see it"


# ------------------------------------------------------------------------------------------------ loss scales


@pytest.mark.parametrize(
    ("skipped", "steps", "beside", "passed"),
    [
        ([0, 0], [400, 400], 0.0, True),
        ([20, 20], [400, 400], 0.0, True),
        ([21, 20], [400, 400], 0.0, False),
        ([2, 2], [10, 10], 0.0, True),
        ([3, 3], [10, 10], 0.0, False),
        ([100, 100], [400, 400], 0.25, True),
        ([105, 100], [400, 400], 0.25, True),
        ([130, 120], [400, 400], 0.25, False),
        ([450, 450], [400, 400], 0.0, False),
    ],
)
def test_a_loss_scale_may_skip_few_steps(skipped, steps, beside, passed):
    found = check_loss_scale(skipped, steps, baseline_share=beside)
    assert found.passed is passed
    assert f"baseline: {beside:.1%}" in found.detail
    assert found.value <= 1.0


@pytest.mark.parametrize(
    ("own", "baseline", "passed", "said"),
    [
        ([False] * 8, [False] * 8, True, "in 0% of the slices"),
        ([True] * 2 + [False] * 6, [False] * 8, True, "cool the GPU"),
        ([True] * 3 + [False] * 5, [False] * 8, False, "in 38% of the slices (baseline: 0%); cool the GPU"),
        ([True] * 8, [True] * 8, True, "in 100% of the slices (baseline: 100%); cool the GPU"),
    ],
)
def test_winner_that_throttles_the_gpu_more_is_refused(own, baseline, passed, said):
    check = check_throttling(own, baseline)
    assert (check.passed, check.conclusive) == (passed, True)
    assert said in check.detail
    assert ("cool the GPU" in check.detail) == any(own)


def test_gain_within_the_baselines_variation_is_not_claimed():
    assert check_constant_work([30.0, 16.0], [20.0, 10.0]).passed is False
    assert check_constant_work([45.0, 48.0], [20.0, 18.0]).passed is True


def work(examples=None, calls=None, batch=32, steps=1):
    """An epoch's."""
    return EpochWork(examples=examples, calls=calls, examples_per_call=steps * batch, batch_size=batch)


@pytest.mark.parametrize(
    ("own", "baseline", "passed"),
    [
        (work(examples=1000, calls=32), work(examples=1000, calls=32), True),
        (work(examples=1000, calls=4, batch=256), work(examples=1000, calls=32), True),
        (work(examples=768, batch=256), work(examples=992), True),  # both drop what is left of 1,000 examples
        (work(examples=700, batch=256), work(examples=992), False),
        (work(examples=1000, calls=4, steps=8), work(examples=1000, calls=32), True),
        (work(calls=100, batch=256), work(calls=100), False),  # the script counts its steps
        (work(examples=51200, calls=100, batch=256), work(examples=51200, calls=100), False),
        (work(examples=1000), work(calls=32), None),
        (work(), work(examples=1000, calls=32), None),
    ],
)
def test_an_epoch_of_other_work_is_refused(own, baseline, passed):
    check = check_epoch_work(own, baseline)
    assert (check and check.passed) is passed
    if passed is False:
        assert "the batch size does not explain that" in check.detail


@pytest.fixture
def sides(finished):
    """The records of a confirmed leader, of another batch size, and of the baseline."""
    baseline, *others = read_trials(RunDirectory(finished))
    return next(each for each in others if each.phase is Phase.CONFIRM and each.pairs), baseline


def test_calls_per_epoch_come_from_the_last_process_with_any(sides):
    seen = [
        record.model_copy(
            update={"processes": tuple(log.model_copy(update={"calls_per_epoch": 45}) for log in record.processes)}
        )
        for record in sides
    ]
    assert all(check.passed for check in checks_of(*sides, LIMITS) if check.name == "epoch_work")
    (check,) = (check for check in checks_of(*seen, LIMITS) if check.name == "epoch_work")
    assert not check.passed
    assert "45 calls of" in check.detail


def test_constant_work_is_checked_only_if_updates_vary(sides):
    varying = replace(LIMITS, work_varies=True)
    usual, more = ({check.name for check in checks_of(*sides, each)} for each in (LIMITS, varying))
    assert more - usual == {"constant_work"}
