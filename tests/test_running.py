"""What a trial's slices say of its speed."""

import pytest
from simulated_runs import a_slice

from autotune.space.configuration import Configuration
from autotune.study.running import Trial, throughput_interval
from autotune.trial.messages import Finished
from autotune.trial.record import Pair, Phase


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
    trial = Trial(1, Phase.SEARCH, Configuration({}))
    trial.instances = 1
    for rate in (8000.0, 4000.0) * 3:
        seconds = 2000 / rate
        pair = Pair(baseline_first=True, baseline=a_slice(), candidate=a_slice(rate, seconds=seconds))
        trial.restore_pair(pair, baseline_rate=4000.0, candidate_rate=rate)
    assert trial.speedup.value == pytest.approx(16000 / 3 / 4000)


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
