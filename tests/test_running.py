"""What a trial's slices say of its speed."""

import pytest
from simulated_runs import a_slice

from autotune.space.configuration import Configuration
from autotune.study.running import Trial, throughput_interval
from autotune.trial.messages import Finished
from autotune.trial.record import Pair, Pairing, Phase


def test_throughput_is_all_examples_over_all_the_time():
    """A second at 100 and a second at 300 a second are 400 in two, whatever the slices were cut into."""
    assert throughput_interval([100.0, 300.0], [100, 300]).value == pytest.approx(200.0)
    assert throughput_interval([100.0, 300.0], [100, 100]).value == pytest.approx(
        150.0
    )  # the slow one took longer


def test_the_interval_of_a_throughput_holds_it_and_narrows_with_more_slices():
    """By the spread of the slices' rates."""
    few = throughput_interval([90.0, 100.0, 110.0], [90, 100, 110])
    many = throughput_interval([90.0, 100.0, 110.0] * 5, [90, 100, 110] * 5)
    for each in (few, many):
        assert each.low < each.value < each.high
    assert many.high - many.low < few.high - few.low


def test_a_speed_up_is_that_of_a_long_training():
    """A trial that stalls in every other slice is credited with what is left over all its time, as its rate is."""
    trial = restless_trial(Phase.CONFIRM)
    assert trial.speedup.value == pytest.approx(16000 / 3 / 4000)


def restless_trial(phase, *, pairing=Pairing.ALTERNATING, epochs=0, baseline_rates=(4000.0, 4000.0)):
    """Every other slice of its own is half as fast as the others, and takes twice as long."""
    trial = Trial(1, phase, Configuration({}))
    trial.instances, trial.pairing = 1, pairing
    for rate, baseline_rate in zip((8000.0, 4000.0) * 3, baseline_rates * 3, strict=True):
        baseline = a_slice(baseline_rate)
        pair = Pair(
            baseline_first=True,
            baseline=baseline,
            candidate=a_slice(rate, seconds=2000 / rate, epochs=epochs),
        )
        trial.restore_pair(pair, baseline_rate=baseline_rate, candidate_rate=rate)
    return trial


@pytest.mark.parametrize(
    "trial",
    [
        restless_trial(Phase.CONFIRM, epochs=2, baseline_rates=(8000.0, 4000.0)),
        restless_trial(Phase.CONFIRM, pairing=Pairing.BRACKETED, baseline_rates=(8000.0, 4000.0)),
        restless_trial(Phase.SEARCH, baseline_rates=(8000.0, 4000.0)),
    ],
    ids=["epochs beside steps", "bracketed", "search"],
)
def test_a_machine_that_halves_its_speed_cancels_out_where_sides_are_timed_differently(trial):
    """Slices of equal work take longer, those of equal time do less: only between neighbours is that the same."""
    assert trial.speedup.value == pytest.approx(1.0)


def test_instances_keep_the_pairing_they_were_measured_in():
    """A contender that has to make room for others is bracketed from then on; what it showed before stands."""
    trial = restless_trial(Phase.CONFIRM)
    before = trial.log_ratios_by_instance()[0]
    trial.pairing = Pairing.BRACKETED
    assert trial.log_ratios_by_instance()[0] == before


def test_one_slice_has_no_interval_of_its_own():
    """Its bounds are the rate itself."""
    found = throughput_interval([4000.0], [2000])
    assert (found.low, found.value, found.high) == pytest.approx((4000.0,) * 3)


def test_closing_figures_of_several_processes_are_put_together():
    """The highest peaks whichever process had them, the last loss, and the input wait of the one that was asked."""
    trial = Trial(1, Phase.CONFIRM, Configuration({}))
    for host, device, waits, loss in [(5, None, 0.3, 2.0), (3, 9, None, 1.0), (4, 7, None, None)]:
        trial.note_closing(
            Finished(peak_host_bytes=host, peak_device_bytes=device, input_wait_fraction=waits, loss=loss)
        )
    assert trial.finished == Finished(
        peak_host_bytes=5, peak_device_bytes=9, input_wait_fraction=0.3, loss=1.0
    )
