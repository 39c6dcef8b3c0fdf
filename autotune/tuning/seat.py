"""Search trials on one seat: candidates beside its live baseline, or between two blocks of it where memory is short."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.data.errors import MeasuringStoppedError
from autotune.data.figures import LogInterval
from autotune.data.record import Outcome, Pairing, Phase, TrialRecord
from autotune.recipe.apply import environment
from autotune.runtime.error_patterns import says_taken
from autotune.runtime.executor import IN_SEARCH, Data, DeviceUnavailable, SeatLost, TrialFailed, WarmUp
from autotune.space.configuration import Configuration, add_strategy_knobs, move_to_device, reset_idle
from autotune.space.knobs import KNOBS, Device
from autotune.stats.deciding import Stop, stop_measuring
from autotune.stats.intervals import Spread, mean_interval
from autotune.tuning.comparison import set_in_blocks, take_turns
from autotune.tuning.feasibility import fit_on_card
from autotune.tuning.live_baseline import Baseline, baseline_error
from autotune.tuning.run import Run, never_two_alive
from autotune.tuning.side import PATIENCE_SECONDS, Interrupted, Side
from autotune.tuning.slicing import (
    MUCH_WAITING,
    SLICE_SECONDS,
    is_busy,
    slice_seconds,
    taken_seconds,
    wanted_in_blocks,
    wanted_seconds,
)
from autotune.tuning.trial import Trial, rate_of
from autotune.tuning.waiting import GENEROUS, Deadline, TimeIsUp

INPUT_WAIT_SECONDS = 0.3  # of the baseline and of leaders, whose figures stand in the recipe
QUICK_INPUT_WAIT_SECONDS = 0.05  # the same for a trial of the search
BASELINE_SECONDS = 120.0  # until the baseline is warm: with less, a timeout is the budget's fault
BASELINE_SLICES, BASELINE_SLICES_SECONDS = 3, 12.0  # fewer slices where an epoch is long
BLOCK_SLICES = 3  # of the baseline before and after a candidate that runs alone; fewer where an epoch is long
SLICE_PATIENCE_SECONDS = 5.0  # beyond three times a slice's length when the trial's own time is over
MOST_DRIFT = 0.1  # share by which a seat's baseline may become slower, until it is measured again
SLICES_IN_A_TRIAL = 8  # where calls and epochs let them be so short


class SameInForce(Exception):
    """What is in force is a configuration that was tried before."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.configuration = configuration


class Drifted(Exception):
    """A seat's baseline is much slower than it was at the start."""


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """What a search trial may take."""

    timeout: float  # seconds from request to end
    measured: float  # seconds of slices, the baseline's turns included
    known: Callable[[Configuration], bool] = lambda configuration: False  # tried before: not measured again


class Seat:
    """The live baseline of a seat, and candidates beside it."""

    def __init__(self, run: Run, deadline: Deadline, *, name: str, bracketed: bool = False) -> None:
        self._run, self._deadline, self.bracketed = run, deadline, bracketed
        self.name = name
        self.is_open = False
        self.baseline = Baseline(run, deadline, name)
        self._imported: set[tuple[tuple[str, str], ...]] = set()
        self._wanted = SLICE_SECONDS
        self._before = 0  # slices of the baseline in earlier invocations, on another seat or another day

    # ------------------------------------------------------------------------------------------- baseline

    def start_baseline(self, timeout: float, earlier: Trial | None = None) -> WarmUp:
        """Run the baseline until it is warm, find out what the workload is, and time it alone."""
        # Raises WorkloadError, BudgetError, NoStableConfigurationError. An `earlier` record stays as it is until
        # `keep_baseline`, because this may turn out to be another training.
        run = self._run
        self.baseline.trial = trial = earlier or run.new_trial(Phase.BASELINE, run.baseline)
        self._before = len(trial.slices)
        self.is_open = True
        if earlier is not None:
            run.announce(trial)
        hurried, warm, deaths = timeout < BASELINE_SECONDS, None, 0
        while warm is None:
            try:
                warm = self.baseline.launch(usual=0.0, at_most=timeout)
                self._note_workload(trial, warm)
                length = slice_seconds(warm)
                most = max(1, min(BASELINE_SLICES, int(BASELINE_SLICES_SECONDS / length)))
                assert self.baseline.side is not None
                for place in range(most):
                    left = self._deadline.left()
                    if place and (run.interrupted() or left < taken_seconds(length, warm)):
                        break
                    hurried = left < 3 * length + PATIENCE_SECONDS + GENEROUS * warm.ready.uncounted_seconds
                    trial.add_slices([self.baseline.side.slice(length)])
            except SeatLost as lost:
                run.keep(trial.record(Outcome.INTERRUPTED, reason=lost.whole))
                raise
            except (TrialFailed, TimeIsUp) as error:
                failure = error if isinstance(error, TrialFailed) else TrialFailed(Outcome.TIMEOUT, "no time is left")
                self.baseline.stop()
                warm, deaths = None, deaths + 1
                if self.baseline.starts_again(failure, deaths):
                    continue
                if earlier is None:  # else what it gave then stands
                    run.keep(trial.record(Outcome.ERROR, failure=failure))
                raise baseline_error(run, trial, failure, hurried=hurried) from error
        self._wanted = wanted_seconds(0.0 if is_busy(trial.slices) else MUCH_WAITING, objective=run.objective)
        if earlier is None:
            self.keep_baseline()
        return warm

    def _note_workload(self, trial: Trial, warm: WarmUp) -> None:
        """Keep what the baseline's process found out, for all that come after it."""
        run, started = self._run, warm.started
        self._imported.add(_variables(trial.configuration))
        if run.data is not None:
            return  # another seat's has told
        run.data, run.gpus = Data.found_by(started), started.gpus
        run.boundary = warm.ready.boundary
        run.device_limit_bytes = started.device_limit_bytes
        run.baseline = move_to_device(run.baseline, Device.GPU if started.gpus else Device.CPU).replace(
            jit_compile=started.jit_compile, **started.set_by_dataset
        )
        if started.devices > 1 and not run.not_reached.keys() & {"strategy"} and "global_batch" not in run.baseline:
            run.baseline = add_strategy_knobs(run.baseline)
        trial.configuration = trial.asked = run.baseline

    def keep_baseline(self) -> None:
        """Write the baseline's record, and announce it."""
        self._run.keep(self.baseline.trial.record(Outcome.OK))

    def abandon(self) -> None:
        """Its processes are gone, or are to go."""
        self.baseline.stop()
        self.is_open = False

    def rate(self) -> float:
        """Samples per second of the baseline in one more slice."""
        own = self.baseline.slice(slice_seconds(self.baseline.ensure().warm))
        return rate_of(self.baseline.trial, own)

    def _refuse_drift(self, trial: Trial) -> None:
        """Measure the baseline again where it was slow beside a trial. Raises Drifted, and what a slice raises."""
        # Ratios of this seat stay good: both sides were slow. What comes after may not be.
        own = self.baseline.trial
        usual = [rate_of(own, each) for each in own.slices[self._before :][:BASELINE_SLICES]]
        beside = [rate_of(own, pair.baseline) for pair in trial.pairs if not pair.disturbed]
        if not beside or statistics.median(beside) > (1 - MOST_DRIFT) * statistics.median(usual):
            return
        again = [self.rate() for _ in range(BASELINE_SLICES)]
        bounds = mean_interval([math.log(each) for each in usual]) if len(usual) > 1 else None
        now = statistics.fmean(map(math.log, again))
        slower = 1 - math.exp(now) / statistics.median(usual)
        if slower > MOST_DRIFT and (bounds is None or now < bounds.low):
            raise Drifted(f"its baseline became {slower:.0%} slower since the start")

    def end_baseline(self, *, examine: bool = True) -> None:
        """Take the baseline's closing figures, and end it; with `examine` also those that take time."""
        # Raises NoStableConfigurationError.
        side = self.baseline.side
        if side is None:
            return
        self.baseline.side, trial = None, self.baseline.trial
        examine = examine and (trial.finished is None or trial.finished.ceilings is None)
        try:
            side.close(INPUT_WAIT_SECONDS if examine else QUICK_INPUT_WAIT_SECONDS, thorough=examine)
        except TrialFailed as failure:
            raise baseline_error(self._run, trial, failure) from failure
        finally:
            self._run.keep(trial.record(Outcome.OK), announce=False)

    # ----------------------------------------------------------------------------------------- candidates

    def imports_first(self, configuration: Configuration) -> bool:
        """Whether a configuration needs a template that has not imported yet."""
        return _variables(configuration) not in self._imported

    def measure(
        self, trial: Trial, limits: TrialLimits, *, leader: LogInterval | None, others: Spread | None = None
    ) -> TrialRecord:
        """Run a trial beside the baseline in one more process, and keep its record."""
        # Raises Interrupted, TimeIsUp, SameInForce, NoStableConfigurationError; the record is kept in any case.
        # Called again for a trial that ran before, it adds to what was measured.
        run, before, known = self._run, len(trial.rated), trial.number in self._run.records
        ended: Exception | None = None
        outcome, reason, log_tail = Outcome.OK, "", ""
        trial.others = others

        def enough() -> Stop | None:
            return stop_measuring(trial.log_ratios, leader=leader, others=others)

        try:
            self._measure_or_bracket(trial, limits, enough)
            if trial.stopped_by == Stop.CANNOT_WIN:
                outcome, reason = Outcome.PRUNED, "its interval lies below the leader's"
        except SameInForce as same:
            ended, outcome = same, Outcome.PRUNED
            reason = f"the same as a trial before: {run.changes(same.configuration)} is in force"
        except SeatLost as lost:
            ended = lost
            if not known:  # else what an earlier process gave stands
                outcome, reason = Outcome.INTERRUPTED, f"{lost.reason}; it is run again on another seat"
        except DeviceUnavailable as failure:
            # It says nothing about this configuration, and the next would fare alike.
            if not known:
                outcome, reason, log_tail = Outcome.INTERRUPTED, failure.whole, failure.log_tail
            ended = MeasuringStoppedError(
                f"the device is not available any more: {failure.reason}",
                hint=f"{failure.hint} Then --resume {run.directory.path} goes on with what was found.",
                detail=failure.detail,
            )
        except TrialFailed as failure:
            if failure.outcome is not Outcome.TIMEOUT or not (known and run.records[trial.number].outcome.measured):
                outcome, reason, log_tail = failure.outcome, failure.whole, failure.log_tail
        except (Interrupted, TimeIsUp) as why:
            ended = why
            if isinstance(why, TimeIsUp) and len(trial.log_ratios) > 1:
                trial.stopped_by = Stop.TIME
            elif not known:
                outcome = Outcome.INTERRUPTED
                reason = "stopped by the user" if isinstance(why, Interrupted) else "the time was over"
        record = trial.record(outcome, reason=reason, log_tail=log_tail)
        if ended is not None and len(trial.rated) == before:
            record = run.records.get(trial.number, record)
        record = run.keep(record)
        if ended is not None:
            raise ended
        if run.several and len(run.executor.seats) > 1:
            self._refuse_drift(trial)
        return record

    def _measure_or_bracket(self, trial: Trial, limits: TrialLimits, enough: Callable[[], Stop | None]) -> None:
        """In turns where both fit in memory, else in blocks."""
        # All replicas of MirroredStrategy are threads of one process, so a freeze stops them together. A training of
        # several processes must be set in blocks: a freeze of one rank would hang the others' collectives.
        pairs_before, out_of_memory = len(trial.rated), None
        alone = self.bracketed or trial.pairing is Pairing.BRACKETED
        if not alone and fit_on_card(self.baseline.trial.slices, [trial.configuration], self._run.records.values()):
            try:
                self._alternate(trial, limits, enough)
            except TrialFailed as failure:
                if failure.outcome is not Outcome.OOM:
                    raise
                out_of_memory = failure  # perhaps only the two together do not fit
                self.bracketed = says_taken(failure.reason)  # then no later one fits beside the baseline either
            else:
                return
        try:
            with never_two_alive():
                self._bracket(trial, limits)
        except TimeIsUp:
            if out_of_memory is None or len(trial.rated) == pairs_before:
                raise
            trial.pairing = Pairing.ALTERNATING
            raise out_of_memory from None  # what it gave before it failed makes it no success

    def _alternate(self, trial: Trial, limits: TrialLimits, enough: Callable[[], Stop | None]) -> None:
        run, began = self._run, self._run.clock()
        reference = self.baseline.ensure()
        trial.pairing = Pairing.ALTERNATING
        self.baseline.beside, side = True, None
        try:
            side = self._start(trial, limits)
            length = slice_seconds(side.warm, reference.warm, wanted=self._wanted, most=self._most_seconds(limits))
            measuring_since = run.clock()

            def goes_on(done: int) -> bool:
                left = limits.timeout - (run.clock() - began)
                side.at_most = max(left - 3 * length, SLICE_PATIENCE_SECONDS)
                if not done:
                    return True
                run.measured(trial)
                trial.stopped_by = enough()
                spent = run.clock() - measuring_since - 2 * length * trial.repeats()
                over = spent + 2 * length > limits.measured or left < 2 * length
                if trial.stopped_by is None and done >= 2 and over:
                    trial.stopped_by = Stop.TIME
                return trial.stopped_by is None

            take_turns(run, self.baseline, [side], length, goes_on)
            side.close(QUICK_INPUT_WAIT_SECONDS)
        finally:
            if side is not None:
                side.kill()
            self.baseline.beside = False

    def _bracket(self, trial: Trial, limits: TrialLimits) -> None:
        run, trial.pairing = self._run, Pairing.BRACKETED
        reference = self.baseline.ensure().warm
        length = slice_seconds(reference, wanted=wanted_in_blocks(run.objective), most=self._most_seconds(limits))
        seconds = max(limits.measured, 4 * BLOCK_SLICES * SLICE_SECONDS)
        count = max(1, min(BLOCK_SLICES, int(seconds / (4 * length))))
        before = [self.baseline.slice(length) for _ in range(count)]
        self.baseline.stop()
        side = self._start(trial, limits)
        try:
            side.at_most = limits.timeout
            own = [side.slice(length) for _ in range(2 * count)]
            side.close(QUICK_INPUT_WAIT_SECONDS)
        finally:
            side.kill()
        after = [self.baseline.slice(length) for _ in range(count)]
        set_in_blocks(trial, own, before=before, after=after, reference=self.baseline.trial)
        run.measured(trial)
        trial.stopped_by = Stop.TIME

    def _most_seconds(self, limits: TrialLimits) -> float:
        """Of a slice, so that a trial has several; energy needs long ones all the same."""
        return math.inf if self._run.objective == "energy" else limits.measured / SLICES_IN_A_TRIAL

    def _start(self, trial: Trial, limits: TrialLimits) -> Side:
        """Start a candidate, and take what is in force for its configuration."""
        # Raises TrialFailed, SameInForce, TimeIsUp.
        reference = self.baseline.trial.warm
        assert reference is not None
        self._imported.add(_variables(trial.configuration))
        # The baseline's boundary of epochs is taken over, unless the pipeline is made of other parts.
        own = any(KNOBS[name].structural for name in trial.configuration.differences(self._run.baseline))
        side = Side.start(
            self._run,
            self._deadline,
            trial,
            seat=self.name,
            usual=reference.ready_seconds,
            at_most=limits.timeout,
            timing=IN_SEARCH if own else replace(IN_SEARCH, boundary=self._run.boundary),
        )
        started = side.warm.started
        try:
            if trial.configuration["jit_compile"] is True and not started.jit_compile:
                raise TrialFailed(
                    Outcome.ERROR, "Keras does not compile this model with XLA: jit_compile falls back to false"
                )
            resolved = trial.configuration.replace(**{"jit_compile": started.jit_compile, **started.in_force})
            in_force = reset_idle(resolved, self._run.baseline)
            if in_force != trial.configuration and limits.known(in_force):
                raise SameInForce(in_force)
        except BaseException:
            side.kill()
            raise
        trial.configuration = in_force
        return side


def _variables(configuration: Configuration) -> tuple[tuple[str, str], ...]:
    """What tells templates apart: the environment that TensorFlow reads when it is imported."""
    return tuple(sorted(environment(configuration).items()))
