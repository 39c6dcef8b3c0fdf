"""What a trial's slices say of its speed."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from simulated_runs import a_slice, a_warm_up

from autotune.data.record import Outcome, Pair, Pairing, Phase
from autotune.runtime.protocol import Finished
from autotune.space.configuration import Configuration
from autotune.stats.ratios import recorded_rate, throughput_interval
from autotune.tuning.earlier_runs import Earlier
from autotune.tuning.trial import Trial


def test_throughput_is_all_examples_over_all_the_time():
    assert throughput_interval([100.0, 300.0], [100, 300]).value == pytest.approx(200.0)
    assert throughput_interval([100.0, 300.0], [100, 100]).value == pytest.approx(150.0)  # the slow one took longer


def test_throughput_interval_narrows_with_more_slices():
    few = throughput_interval([90.0, 100.0, 110.0], [90, 100, 110])
    many = throughput_interval([90.0, 100.0, 110.0] * 5, [90, 100, 110] * 5)
    for each in (few, many):
        assert each.low < each.value < each.high
    assert many.high - many.low < few.high - few.low


def test_a_speed_up_is_that_of_a_long_training():
    trial = restless_trial(Phase.CONFIRM)
    assert trial.speedup.value == pytest.approx(16000 / 3 / 4000)


def restless_trial(phase, *, pairing=Pairing.ALTERNATING, epochs=0, baseline_rates=(4000.0, 4000.0)):
    """Every other slice of its own is half as fast as the others, and takes twice as long."""
    trial = Trial(1, phase, Configuration({}))
    trial.instances, trial.pairing = 1, pairing
    for rate, baseline_rate in zip((8000.0, 4000.0) * 3, baseline_rates * 3, strict=True):
        baseline = a_slice(baseline_rate)
        own = a_slice(rate, seconds=2000 / rate, epochs=epochs)
        in_blocks = pairing is Pairing.BRACKETED
        trial.pairs += (Pair(baseline_first=True, baseline=baseline, candidate=own, in_blocks=in_blocks),)
    return trial


def beside_another(marks, *, own_marked=False):
    """A trial and another one in the same rounds of an instance; a pair of either is disturbed where marked."""
    own, other = (Trial(number, Phase.CONFIRM, Configuration({})) for number in (1, 2))
    for index, marked in enumerate(marks):
        baseline = a_slice().model_copy(update={"at": float(index)})
        for trial, rate in ((own, 6000.0 + 600.0 * index), (other, 4000.0)):
            disturbed = marked and (trial is own) == own_marked
            pair = Pair(baseline_first=True, baseline=baseline, candidate=a_slice(rate), disturbed=disturbed)
            trial.pairs += (pair,)
    return own, other


@pytest.mark.parametrize("own_marked", [False, True])
def test_over_another_trial_disturbed_rounds_are_left_out(own_marked):
    own, other = beside_another([False, False, True], own_marked=own_marked)
    assert own.log_ratios_over(other)[0] == pytest.approx(
        [math.log(6300 / 4000) + each for each in (-300 / 6300, 300 / 6300)], abs=1e-3
    )


def test_over_another_trial_what_is_left_must_be_enough():
    own, other = beside_another([True, False, True, True])
    assert len(own.log_ratios_over(other)[0]) == 4


@pytest.mark.parametrize(
    "trial",
    [
        restless_trial(Phase.CONFIRM, epochs=2, baseline_rates=(8000.0, 4000.0)),
        restless_trial(Phase.CONFIRM, pairing=Pairing.BRACKETED, baseline_rates=(8000.0, 4000.0)),
        restless_trial(Phase.SEARCH, baseline_rates=(8000.0, 4000.0)),
    ],
    ids=["epochs beside steps", "bracketed", "search"],
)
def test_machine_slowdown_cancels_out_if_sides_are_timed_unlike(trial):
    assert trial.speedup.value == pytest.approx(1.0)


def test_instances_keep_the_pairing_they_were_measured_in():
    trial = restless_trial(Phase.CONFIRM)
    before = trial.log_ratios_by_instance()[0]
    trial.pairing = Pairing.BRACKETED
    assert trial.log_ratios_by_instance()[0] == before


def test_processes_that_differ_widen_a_confirmed_throughput():
    rates = ([3800.0] * 10 + [4200.0] * 10) * 2
    processes = [place // 10 for place in range(40)]
    found, by_slices = (throughput_interval(rates, [2000] * 40, processes), throughput_interval(rates, [2000] * 40))
    assert found.value == pytest.approx(by_slices.value)
    assert found.high / found.low > 1.15 > by_slices.high / by_slices.low
    assert throughput_interval(rates[:20], [2000] * 20, processes[:20]) == throughput_interval(rates[:20])


@pytest.mark.parametrize(("phase", "wide"), [(Phase.CONFIRM, True), (Phase.SEARCH, False)])
@pytest.mark.parametrize("alone", [True, False])
def test_a_confirmation_tells_its_throughput_over_processes(phase, wide, alone):
    trial = Trial(1, phase, Configuration({}))
    trial.pairing = Pairing.ALTERNATING
    trial.note_warm(replace(warm(0.0), started=warm(0.0).started.model_copy(update={"examples": None})))
    for speed in (3800.0, 4200.0) * 2:
        trial.instances += 1
        if alone:
            trial.add_slices([a_slice(speed)] * 20)
        for _ in range(0 if alone else 20):
            trial.add_pair(baseline_first=True, baseline=a_slice(), candidate=a_slice(speed), reference=trial)
    found = trial.record(Outcome.OK).throughput
    assert (found.high / found.low > 1.15) is wide


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((True, True, False), True),
        ((False, True, True), True),
        ((True, False), False),
        ((None, False), False),
        ((None, True), True),
        ((None, None), None),
        ((), None),
    ],
)
def test_a_trial_has_settled_where_most_of_its_processes_had(told, expected):
    trial = Trial(1, Phase.CONFIRM, Configuration({}))
    for each in told:
        trial.note_warm(replace(warm(1.0), ready=warm(1.0).ready.model_copy(update={"settled": each})))
    assert trial.record(Outcome.OK).settled is expected


def test_one_slice_has_no_interval_of_its_own():
    found = throughput_interval([4000.0], [2000])
    assert (found.low, found.value, found.high) == pytest.approx((4000.0,) * 3)


def test_closing_figures_of_several_processes_are_put_together():
    trial = Trial(1, Phase.CONFIRM, Configuration({}))
    for host, device, waits in [(5, None, 0.3), (3, 9, None), (4, 7, None)]:
        trial.note_warm(warm(0.0))
        trial.note_closing(Finished(peak_host_bytes=host, peak_device_bytes=device, input_wait_fraction=waits))
    record = trial.record(Outcome.OK)
    assert (record.peak_host_bytes, record.peak_device_bytes, record.input_wait_fraction) == (5, 9, 0.3)


def warm(overhead):
    """What a process told whose epochs of a thousand examples are timed by steps."""
    return a_warm_up(examples=1000, call_seconds=0.1, epoch_seconds=None, overhead=overhead)


@pytest.mark.parametrize("uncounted", [False, True])
def test_a_record_says_whether_its_validation_was_counted(uncounted):
    trial, told = Trial(1, Phase.CONFIRM, Configuration({})), warm(1.0)
    trial.note_warm(replace(told, started=told.started.model_copy(update={"validation_uncounted": uncounted})))
    assert trial.record(Outcome.OK).validation_uncounted is uncounted


def test_what_processes_saw_of_boundaries_is_averaged():
    trial = Trial(1, Phase.CONFIRM, Configuration({}))
    for overhead in (1.0, 3.0, 2.0):
        trial.note_warm(warm(overhead))
    trial.add_slices([a_slice(100, seconds=1.0, epochs=0)])
    record = trial.record(Outcome.OK)
    assert record.epoch_overhead_seconds == 2.0
    assert record.throughput.value == pytest.approx(1000 / 12.0)


@pytest.mark.parametrize("of_baseline", [False, True])
def test_losses_are_medians_of_processes(of_baseline):
    trial, told = Trial(1, Phase.CONFIRM, Configuration({})), warm(1.0)
    for first, losses in [(2.0, (5.0, 1.0)), (9.0, (5.0, 1.5)), (2.5, (1.0, 8.0))]:
        trial.instances += 1
        trial.note_warm(replace(told, first_loss=first))
        for loss in losses:
            each = a_slice(100, seconds=1.0, epochs=0).model_copy(update={"loss": loss})
            if of_baseline:
                trial.add_slices([each])
            else:
                trial.add_pair(baseline_first=True, baseline=each, candidate=each, reference=trial)
    record = trial.record(Outcome.OK)
    assert (record.first_loss, record.last_loss) == (2.5, 1.5)


def test_what_an_epoch_costs_is_borne_by_what_it_trains_on():
    told = warm(1.0)
    dropping = replace(told, started=told.started.model_copy(update={"examples_per_epoch": 900}))
    reference = Trial(0, Phase.BASELINE, Configuration({}))
    reference.note_warm(told)
    trial = Trial(1, Phase.SEARCH, Configuration({}))
    trial.note_warm(dropping)
    each = a_slice(100, seconds=1.0, epochs=0)
    trial.add_slices([each])
    trial.add_pair(baseline_first=True, baseline=each, candidate=each, reference=reference)
    record = trial.record(Outcome.OK)
    assert record.examples_per_epoch == 900
    assert record.throughput.value == pytest.approx(90.0)
    assert trial.log_ratios == [pytest.approx(math.log(90 / (1000 / 11)))]
    records = {0: reference.record(Outcome.OK), 1: record}
    earlier = Earlier(run=SimpleNamespace(arguments={}), records=records, next_number=2)
    assert earlier.trials()[1].log_ratios == trial.log_ratios


def test_what_no_process_told_is_not_in_the_record():
    trial = Trial(1, Phase.CONFIRM, Configuration({}))
    for _ in range(2):
        assert trial.record(Outcome.CRASHED).epoch_overhead_seconds is None
        trial.note_warm(warm(None))


def test_recorded_slice_keeps_the_rate_it_was_measured_with():
    trial = Trial(1, Phase.SEARCH, Configuration({}))
    trial.note_warm(warm(2.0))
    each = a_slice(100)
    assert recorded_rate(each, trial.record(Outcome.OK)) == pytest.approx(1000 / 12.0)


def test_restored_trial_without_new_runs_keeps_its_record():
    baseline, trial = (Trial(number, Phase.CONFIRM, Configuration({})) for number in (0, 3))
    trial.instances = 1
    trial.note_warm(replace(warm(2.0), first_loss=2.5))
    trial.add_slices([a_slice(100)])
    for rate in (100, 110, 120):
        trial.add_pair(baseline_first=True, baseline=a_slice(), candidate=a_slice(rate), reference=baseline)
    trial.pairs = (trial.pairs[0].model_copy(update={"disturbed": True, "disturbed_by": "others"}), *trial.pairs[1:])
    record = trial.record(Outcome.OK)
    assert None not in (record.throughput, record.speedup)
    again = Trial.from_record(record).record(Outcome.OK)
    assert again == record


def test_restored_trial_averages_over_all_its_processes():
    trial = Trial(3, Phase.CONFIRM, Configuration({}))
    for overhead in (1.0, 2.0):
        trial.instances += 1
        trial.note_warm(warm(overhead))
    restored = Trial.from_record(trial.record(Outcome.OK))
    restored.instances += 1
    restored.note_warm(warm(6.0))
    assert restored.record(Outcome.OK).epoch_overhead_seconds == pytest.approx(3.0)
