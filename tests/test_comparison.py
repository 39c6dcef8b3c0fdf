"""A comparison: in turns, in blocks, or in blocks after turns that memory did not hold; fresh or live reference."""

import itertools
import math
import threading

import pytest
from simulated import SimulatedTrial
from simulated_runs import BASELINE, FAST, Searching, a_pair, faster_by, lose, simulated_trials

from autotune.data.record import Outcome, Pairing, Phase
from autotune.runtime.executor import DeviceUnavailable, TrialFailed
from autotune.tuning.comparison import PATIENCE_SECONDS, Comparison, MeasuredProcess
from autotune.tuning.run import Deadline, DriverLock, Interrupted, TimeIsUp

LARGE = BASELINE.replace(batch_size=64)
SPEED = faster_by(jit_compile=1.5, batch_size=1.2)
ROUNDS = 4
TAKEN = TrialFailed(Outcome.OOM, "INTERNAL: all CUDA-capable devices are busy or unavailable")


class FixedRounds:
    """A schedule of so many rounds of slices of half a second."""

    def turn_seconds(self, processes):
        return 0.5

    def goes_on(self, rounds, length):
        return rounds < ROUNDS

    def block_seconds(self, process):
        return 0.5

    def block_rounds(self, length):
        return ROUNDS // 2

    def close(self, process):
        process.close(0.0)


class Sides:
    """A reference, live or fresh, and candidates; on a machine where so many fit in memory at once."""

    def __init__(self, path, *, is_live, fit=9, candidates=(FAST,), **settings):
        self.room, self.most_alive = fit, 0
        self.trials = simulated_trials(SPEED, fits_together=self.fits, **settings)
        searching = Searching(path, self.trials)
        self.run, self.taken = searching.run, []
        self.reference = searching.seat.baseline
        if not is_live:
            searching.seat.end_baseline()
            self.reference = self.process(BASELINE)
        self.candidates = [self.process(configuration) for configuration in candidates]
        self.most_alive = 0

    def fits(self, alive):
        """Note how many are alive, and whether memory holds them."""
        self.most_alive = max(self.most_alive, len(alive))
        return len(alive) <= self.room

    def process(self, configuration):
        """A process that is not started yet."""
        trial = self.run.new_trial(Phase.CONFIRM, configuration)
        return MeasuredProcess(run=self.run, trial=trial, seat="simulated", start_timeout=60.0)

    def compare(self, *, in_blocks=False):
        """Measure, and return the comparison."""
        comparison = Comparison(
            run=self.run,
            reference=self.reference,
            candidates=self.candidates,
            schedule=FixedRounds(),
            in_blocks=in_blocks,
        )
        comparison.measure()
        return comparison

    @property
    def alive(self):
        """The configurations that have a process."""
        return [trial.configuration for trial in self.trials.alive]


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("candidates", [(FAST,), (FAST, LARGE)], ids=["one", "two"])
@pytest.mark.parametrize(
    ("fit", "asked", "pairing"),
    [(9, False, "alternating"), (9, True, "bracketed"), (1, False, "bracketed")],
    ids=["turns", "blocks", "out of memory, then blocks"],
)
def test_all_sides_are_measured_however_they_fit(tmp_path, is_live, candidates, fit, asked, pairing):
    sides = Sides(tmp_path, is_live=is_live, fit=fit, candidates=candidates)
    comparison = sides.compare(in_blocks=asked)
    assert (comparison.out_of_memory is not None) is (fit == 1)
    for process, factor in zip(sides.candidates, (1.5, 1.2), strict=False):
        record = process.trial.record(Outcome.OK)
        assert record.pairing == pairing
        assert len(record.pairs) == ROUNDS
        assert {pair.in_blocks for pair in record.pairs} == {pairing == "bracketed"}
        assert record.speedup.value == pytest.approx(factor, rel=0.01)
        assert 0 < record.pairs[0].candidate.at < record.pairs[-1].candidate.at
        assert record.peak_host_bytes > 0, "it was not closed"
    assert sides.alive == ([BASELINE] if is_live else [])
    if asked:
        assert sides.most_alive == 1
    beside = sides.reference.trial.slices if not is_live else ()
    assert len(beside) == (0 if is_live else ROUNDS), "a fresh reference keeps its slices, a live one does not"


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_steady_drift_cancels(tmp_path, in_blocks):
    sides = Sides(tmp_path, is_live=True)
    sides.trials.drift = lambda seconds: math.exp(-0.03 * seconds)
    sides.compare(in_blocks=in_blocks)
    assert sides.candidates[0].trial.speedup.value == pytest.approx(1.5, rel=0.02)


def test_orders_are_random_and_every_second_one_is_reversed(tmp_path, monkeypatch):
    taken, measure = [], SimulatedTrial.measure
    monkeypatch.setattr(
        SimulatedTrial, "measure", lambda trial, *given: (taken.append(trial.configuration), measure(trial, *given))[1]
    )
    seen = set()
    for seed in range(12):
        sides = Sides(tmp_path / str(seed), is_live=False, candidates=(FAST, LARGE))
        sides.run.rng.seed(seed)
        taken.clear()
        sides.compare()
        orders = [tuple(taken[at : at + 3]) for at in range(0, len(taken), 3)]
        assert all(later == order[::-1] for order, later in zip(orders[::2], orders[1::2], strict=True))
        seen |= set(orders)
    assert seen == set(itertools.permutations((BASELINE, FAST, LARGE)))


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_failed_candidate_leaves_no_process_and_is_named(tmp_path, is_live, in_blocks):
    sides = Sides(tmp_path, is_live=is_live, candidates=(FAST, LARGE))
    sides.trials.failure = lambda each: TrialFailed(Outcome.CRASHED, "as planned") if each == LARGE else None
    with pytest.raises(TrialFailed, match="as planned") as failed:
        sides.compare(in_blocks=in_blocks)
    assert failed.value.trial == sides.candidates[1].trial.number
    assert set(sides.alive) <= ({BASELINE} if is_live else set())


@pytest.mark.parametrize("in_blocks", [False, True])
def test_busy_gpu_without_other_processes_is_unavailable(tmp_path, in_blocks):
    sides = Sides(tmp_path, is_live=False)
    sides.trials.failure = lambda configuration: TAKEN if configuration == FAST else None
    with pytest.raises(DeviceUnavailable):
        sides.compare(in_blocks=in_blocks)


def test_no_candidate_starts_if_the_reference_cannot(tmp_path):
    sides = Sides(tmp_path, is_live=False)
    sides.room = 0
    with pytest.raises(TrialFailed) as failed:
        sides.compare()
    assert failed.value.trial == sides.reference.trial.number
    assert len([live for live in sides.trials.launched if live.configuration == FAST]) == 0


@pytest.mark.parametrize("is_live", [False, True])
def test_whole_rounds_are_kept_when_it_is_stopped(tmp_path, is_live):
    sides = Sides(tmp_path, is_live=is_live)
    trial = sides.candidates[0].trial
    sides.run.interruptions = lambda: len(trial.pairs) > 1
    with pytest.raises(Interrupted):
        sides.compare()
    assert len(trial.pairs) == 2
    assert len(sides.reference.trial.slices) >= 2
    assert sides.alive == ([BASELINE] if is_live else [])


def test_nothing_is_begun_that_the_time_does_not_hold(tmp_path):
    sides = Sides(tmp_path, is_live=False)
    sides.compare()
    before = len(sides.trials.launched)
    sides.run.deadline = Deadline(clock=sides.trials.clock, at=sides.trials.clock() + 0.1)
    with pytest.raises(TimeIsUp):
        sides.compare()
    assert len(sides.trials.launched) == before


def test_only_a_live_reference_is_started_again_where_it_died(tmp_path):
    live, fresh = (Sides(tmp_path / str(is_live), is_live=is_live) for is_live in (True, False))
    lose(live.reference.live)
    live.compare()
    assert live.reference.trial.instances == 2
    fresh.reference.start()
    lose(fresh.reference.live)
    with pytest.raises(TrialFailed):
        fresh.compare()


def test_a_boundary_between_epochs_is_measured_once(tmp_path):
    sides = Sides(tmp_path, is_live=False, examples=1_000_000)
    sides.compare(in_blocks=True)
    first, again = [live.timing.boundary for live in sides.trials.launched if live.configuration == BASELINE][-2:]
    assert first is None
    assert again == sides.reference.boundary is not None


def test_block_pairs_stay_marked_after_alternating_pairs(tmp_path):
    sides = Sides(tmp_path, is_live=False)
    trial = sides.candidates[0].trial
    sides.compare(in_blocks=True)
    trial.pairing = Pairing.ALTERNATING
    sides.compare()
    assert [pair.in_blocks for pair in trial.pairs] == [True] * ROUNDS + [False] * ROUNDS
    assert a_pair().model_dump().get("in_blocks") is None, "files hold thousands of pairs"


def test_only_the_holder_releases_the_lock():
    lock, inside = DriverLock(), []
    lock.acquire()

    def wait_for_a_trial():
        with lock.released():  # it does not hold the lock
            inside.append(lock._lock.locked())

    thread = threading.Thread(target=wait_for_a_trial)
    thread.start()
    thread.join()
    assert inside == [True]
    with lock.released():
        assert not lock._lock.locked()
    assert lock._lock.locked()


def test_a_restart_is_waited_for_less_than_a_first_start(tmp_path, monkeypatch):
    sides, limits, time_limit = Sides(tmp_path, is_live=True), [], Deadline.time_limit

    def note(deadline, expected, *, cap, **more):
        limits.append(cap)
        return time_limit(deadline, expected, cap=cap, **more)

    monkeypatch.setattr(Deadline, "time_limit", note)
    sides.reference.start_timeout = 1000.0
    sides.reference.kill()
    sides.reference.ensure()
    assert limits == [3 * PATIENCE_SECONDS]
