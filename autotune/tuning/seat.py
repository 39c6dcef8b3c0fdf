"""Search trials on one seat: candidates beside its live baseline, or between two blocks of it where memory is short."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autotune.data.errors import MeasuringStoppedError
from autotune.data.figures import LogInterval
from autotune.data.record import Outcome, Pairing, Phase, TrialRecord
from autotune.recipe.apply import environment
from autotune.runtime.executor import DeviceUnavailable, SeatLost, TrialFailed, WarmUp
from autotune.runtime.logs import is_busy_gpu_error
from autotune.runtime.protocol import Data, Started
from autotune.space.configuration import Configuration, add_strategy_knobs, move_to_device, reset_idle
from autotune.space.knobs import KNOBS, Device
from autotune.stats.deciding import FEWEST_PAIRS, Stop, stop_measuring
from autotune.stats.intervals import Spread, mean_interval
from autotune.stats.stability import check_steady_work
from autotune.tuning import costs
from autotune.tuning.comparison import PATIENCE_SECONDS, Comparison, LiveBaseline, MeasuredProcess, baseline_error
from autotune.tuning.costs import MUCH_WAITING, SLICE_SECONDS, is_busy, is_slow, slice_length, taken_seconds
from autotune.tuning.events import Notice
from autotune.tuning.run import TIMEOUT_FACTOR, Interrupted, Run, TimeIsUp
from autotune.tuning.trial import Trial

INPUT_WAIT_SECONDS = 0.3  # of the baseline and of leaders, whose figures stand in the recipe
QUICK_INPUT_WAIT_SECONDS = 0.05  # the same for a trial of the search
BASELINE_SECONDS = 240.0  # until the baseline is warm: with less, a timeout is the budget's fault
BASELINE_SLICES, BASELINE_SLICES_SECONDS = 3, 12.0  # fewer slices where an epoch or a step is long
BLOCK_SLICES = 3  # of the baseline before and after a candidate that runs alone; fewer where an epoch is long
SLICE_PATIENCE_SECONDS = 5.0  # beyond three times a slice's length when the trial's own time is over
MUCH_CONTENTION = 0.05  # share of a baseline's rate that the other seats of its host may take unsaid
DRIFT, MUCH_DRIFT = 0.1, 0.25  # changes of the baseline's speed: one that is examined if it lasts, and one at once
DRIFT_PAIRS = 12  # of the live baseline and a fresh one, at most
FRESH_PROCESSES = 2  # that must agree
USUAL_SLICES = 12  # of the baseline, that tell its speed
SHORT_BOUNDARY = 0.05  # share of an epoch of slow steps: a search trial with another pipeline takes it over then


class SameInForce(Exception):
    """The configuration in force was tried before."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.configuration = configuration


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """The limits of a search trial."""

    timeout: float  # seconds from request to end
    measured: float  # seconds of slices, the baseline's turns included
    known: Callable[[Configuration], bool] = lambda configuration: False  # tried before: not measured again


@dataclass(kw_only=True)
class SearchSchedule:
    """The schedule of a search trial: until enough is known of the candidate, or its time is over."""

    process: MeasuredProcess  # the candidate's
    baseline: MeasuredProcess
    limits: TrialLimits
    usual_length: float  # seconds of a slice in turns
    enough: Callable[[], Stop | None]
    began: float = field(init=False)
    measuring_since: float = field(init=False)
    round_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.run, self.trial = self.process.run, self.process.trial
        self.began = self.measuring_since = self.run.clock()

    def turn_seconds(self, processes: Sequence[MeasuredProcess]) -> float:
        """See `Schedule`."""
        length = slice_length(*(process.warm for process in processes), wanted=self.usual_length, most=self._most)
        self.round_seconds = sum(taken_seconds(length, process.warm) for process in processes)
        return length

    def goes_on(self, rounds: int, length: float) -> bool:
        """See `Schedule`. Notes in the trial why it stops."""
        run, trial, limits = self.run, self.trial, self.limits
        left = limits.timeout - (run.clock() - self.began)
        self.process.slice_patience = max(left - 3 * length, SLICE_PATIENCE_SECONDS)
        if not rounds:
            self.measuring_since = run.clock()
            return True
        run.measured(trial)
        trial.stopped_by = self.enough()
        spent = run.clock() - self.measuring_since - self.round_seconds * trial.extra_pairs_allowed()
        over = spent + self.round_seconds > limits.measured or left < self.round_seconds
        if trial.stopped_by is None and rounds >= 2 and over:
            trial.stopped_by = Stop.TIME
        return trial.stopped_by is None

    def block_seconds(self, process: MeasuredProcess) -> float:
        """See `Schedule`. Those of a candidate are no longer, however many steps its calls have."""
        wanted = costs.length_in_blocks(self.run.options.objective)
        return slice_length(self.baseline.warm, wanted=wanted, most=self._most)

    def block_rounds(self, length: float) -> int:
        """See `Schedule`. A block has the trial's own time."""
        self.process.slice_patience = self.limits.timeout
        seconds = max(self.limits.measured, 4 * BLOCK_SLICES * SLICE_SECONDS)
        return max(1, min(BLOCK_SLICES, int(seconds / (4 * length))))

    def close(self, process: MeasuredProcess) -> None:
        """See `Schedule`."""
        process.close(0.0 if is_slow(process.warm) else QUICK_INPUT_WAIT_SECONDS)

    @property
    def _most(self) -> float:
        """Return the most seconds of a slice, so that a trial has several; energy needs long ones."""
        energy = self.run.options.objective == "energy"
        return math.inf if energy else self.limits.measured / costs.SLICES_IN_A_TRIAL


class Seat:
    """The live baseline of a seat, and candidates beside it."""

    def __init__(self, run: Run, *, name: str, bracketed: bool = False) -> None:
        self.run, self.name, self.bracketed = run, name, bracketed
        self.is_open = False
        self._live: LiveBaseline | None = None
        self._imported: set[tuple[tuple[str, str], ...]] = set()
        self._usual_length = SLICE_SECONDS
        self._before = 0  # slices of the baseline in earlier invocations, on another seat or another day
        self._reported_contention = False
        self._rates: list[float] = []  # of the baseline, as logarithms, before they changed
        self._changed = 0.0  # by how much they did beside the last trial

    @property
    def baseline(self) -> LiveBaseline:
        """The live baseline, once it was started."""
        assert self._live is not None
        return self._live

    # ------------------------------------------------------------------------------------------- baseline

    def start_baseline(self, timeout: float, earlier: Trial | None = None) -> WarmUp:
        """Run the baseline until it is warm, find out what the workload is, and time it alone."""
        # Raises WorkloadError, BudgetError, NoStableConfigurationError. An `earlier` record stays as it is until
        # `keep_baseline`, because this may turn out to be another training.
        run = self.run
        trial = earlier or run.new_trial(Phase.BASELINE, run.baseline)
        # A run that was killed may have left a part of its state.
        is_saved = run.state_file is not None and run.state_file.exists() and 0 in run.records
        baseline = LiveBaseline(
            run=run,
            trial=trial,
            seat=self.name,
            start_timeout=timeout,
            shares_compilations=True,
            save_state="" if run.state_file is None or is_saved else str(run.state_file),
        )
        self._live, self._before, self.is_open = baseline, len(trial.slices), True
        if earlier is not None:
            run.announce(trial)
        budget_limited, deaths = timeout < BASELINE_SECONDS, 0
        while True:
            try:
                baseline.start()
                baseline.save_state = ""  # the first one's: a later process may not have trained as far
                self._note_workload(trial, baseline.warm)
                length = slice_length(baseline.warm)
                most = max(1, min(BASELINE_SLICES, int(BASELINE_SLICES_SECONDS / length)))
                for place in range(most):
                    left = self.run.deadline.left()
                    if place and (run.interrupted() or left < taken_seconds(length, baseline.warm)):
                        break
                    patience = PATIENCE_SECONDS + TIMEOUT_FACTOR * baseline.warm.ready.uncounted_seconds
                    budget_limited = left < 3 * length + patience
                    trial.add_slices([MeasuredProcess.slice(baseline, length)])
                break
            except SeatLost as lost:
                if earlier is None:  # else what it gave then stands
                    run.save_record(trial.record(Outcome.INTERRUPTED, reason=lost.whole))
                raise
            except (TrialFailed, TimeIsUp) as error:
                failure = error if isinstance(error, TrialFailed) else TrialFailed(Outcome.TIMEOUT, "no time is left")
                baseline.kill()
                deaths += 1
                if baseline.should_restart(failure, deaths) or self._retry_in_fresh_interpreter(
                    failure, budget_limited=budget_limited
                ):
                    continue
                if earlier is None:  # else what it gave then stands
                    run.save_record(trial.record(Outcome.ERROR, failure=failure))
                raise baseline_error(run, trial, failure, budget_limited=budget_limited) from error
        waiting = 0.0 if is_busy(trial.slices) else MUCH_WAITING
        self._usual_length = costs.length_in_turns(waiting, objective=run.options.objective)
        if earlier is None:
            self.keep_baseline()
        return baseline.warm

    def _retry_in_fresh_interpreter(self, failure: TrialFailed, *, budget_limited: bool) -> bool:
        """Give a baseline that never trains in a fork a fresh interpreter, once; return whether it starts again."""
        run, trial = self.run, self.baseline.trial
        has_trained = bool(trial.slices or trial.processes)
        has_time = self.run.deadline.left() > 0 and not (budget_limited and failure.outcome is Outcome.TIMEOUT)
        may_be_the_fork = failure.outcome in (Outcome.TIMEOUT, Outcome.CRASHED) and not has_trained and run.data is None
        if run.executor.isolation == "spawn" or not may_be_the_fork or not has_time:
            return False
        text = f"the baseline does not train in a fork ({failure.reason}); it starts once more in a fresh interpreter"
        run.observe(Notice(text=text))
        run.executor.use_fresh_interpreters()
        self.baseline.start_timeout = min(self.baseline.start_timeout, self.run.deadline.left())
        return True

    def _note_workload(self, trial: Trial, warm: WarmUp) -> None:
        """Keep what the baseline's process found out, for all that come after it."""
        run, started = self.run, warm.started
        self._imported.add(_variables(trial.configuration))
        if run.data is not None:
            return  # another seat's process reported it
        run.data, run.gpus = Data.from_started(started), started.gpus
        run.boundary = warm.ready.boundary
        run.device_limit_bytes = started.device_limit_bytes
        run.baseline = move_to_device(run.baseline, Device.GPU if started.gpus else Device.CPU).replace(
            jit_compile=started.jit_compile, **started.set_by_dataset
        )
        if started.devices > 1 and not run.not_reached.keys() & {"strategy"} and "global_batch" not in run.baseline:
            run.baseline = add_strategy_knobs(run.baseline)
        trial.configuration = trial.requested = run.baseline

    def keep_baseline(self) -> None:
        """Write the baseline's record, and announce it."""
        self.run.save_record(self.baseline.trial.record(Outcome.OK))

    def abandon(self) -> None:
        """End its processes."""
        if self._live is not None:
            self._live.kill()
        self.is_open = False

    def _report_contention(self, trial: Trial) -> None:
        """Say once if the baseline is slower beside a trial than at its start, before the other seats began."""
        executor, own = self.run.executor, self.baseline.trial
        host = executor.place(self.name).host
        shared = sum(executor.place(name).host == host for name in executor.seats) > 1
        usual = [own.rate_of(measured) for measured in own.slices[self._before :][:BASELINE_SLICES]]
        rates = [own.rate_of(pair.baseline) for pair in trial.pairs if not pair.disturbed]
        others = sum(record.phase is Phase.BASELINE for record in self.run.records.values()) > 1
        is_first = executor.seats[:1] == (self.name,)  # the others' baselines have never been alone
        if not (shared and others and is_first and usual and rates) or self._reported_contention:
            return
        if (cost := 1 - statistics.median(rates) / statistics.median(usual)) >= MUCH_CONTENTION:
            self._reported_contention = True
            text = f"seat {self.name} trains {cost:.0%} slower since other seats of {host} began: they share its cores"
            self.run.observe(Notice(text=text))

    def end_baseline(self, *, examine: bool = True) -> None:
        """Take the baseline's closing figures, and end it; with `examine` also those that take time."""
        # Raises NoStableConfigurationError.
        if self._live is None or self._live.live is None:
            return
        trial = self._live.trial
        examine = examine and trial.latest("ceilings") is None
        try:
            self._live.close(INPUT_WAIT_SECONDS if examine else QUICK_INPUT_WAIT_SECONDS, thorough=examine)
        except TrialFailed as failure:
            raise baseline_error(self.run, trial, failure) from failure
        finally:
            self.run.save_record(trial.record(Outcome.OK), announce=False)

    # ----------------------------------------------------------------------------------------- candidates

    def imports_first(self, configuration: Configuration) -> bool:
        """Return whether a configuration needs a template that has not imported yet."""
        return _variables(configuration) not in self._imported

    def measure(
        self, trial: Trial, limits: TrialLimits, *, leader: LogInterval | None, pooled_spread: Spread | None = None
    ) -> TrialRecord:
        """Run a trial beside the baseline in one more process, and keep its record."""
        # Raises Interrupted, TimeIsUp, SameInForce, NoStableConfigurationError; the record is kept in any case.
        # Called again for a trial that ran before, it adds to what was measured.
        run, before, known = self.run, len(trial.pairs), trial.number in self.run.records
        ended: Exception | None = None
        outcome, reason, log_tail = Outcome.OK, "", ""
        trial.pooled_spread = pooled_spread

        def enough() -> Stop | None:
            return stop_measuring(trial.log_ratios, leader=leader, pooled_spread=pooled_spread)

        try:
            self._compare(trial, limits, enough)
            if trial.stopped_by == Stop.CANNOT_WIN:
                outcome, reason = Outcome.PRUNED, "its interval lies below the leader's"
        except SameInForce as same:
            ended, outcome = same, Outcome.PRUNED
            reason = f"equivalent to an earlier trial: {run.changes(same.configuration)} is in force"
        except SeatLost as lost:
            ended = lost
            if not known:  # else what an earlier process gave stands
                outcome, reason = Outcome.INTERRUPTED, f"{lost.reason}; it is run again on another seat"
        except DeviceUnavailable as failure:
            # It says nothing about this configuration, and the next would fail too.
            if not known:
                outcome, reason, log_tail = Outcome.INTERRUPTED, failure.whole, failure.log_tail
            ended = MeasuringStoppedError(
                f"the device is no longer available: {failure.reason}",
                hint=f"{failure.hint} Then --resume {run.directory.path} continues the run.",
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
        if ended is not None and len(trial.pairs) == before:
            record = run.records.get(trial.number, record)
        record = run.save_record(record, announce=not isinstance(ended, SameInForce))
        if ended is not None:
            raise ended
        self._report_contention(trial)
        self._examine_progress(trial, limits)
        return record

    def _examine_progress(self, trial: Trial, limits: TrialLimits) -> None:
        """Find out whether the live baseline is faster or slower than a fresh one, and note it in its trial.

        A busy machine changes its speed, too. So where it has changed, two fresh processes take turns with it.
        """
        run, own = self.run, self.baseline.trial
        last_pairs = [pair for pair in trial.pairs if pair.instance == trial.instances - 1 and not pair.in_blocks]
        rates = [math.log(own.rate_of(pair.baseline)) for pair in last_pairs if not pair.disturbed]
        if not self._rates:
            self._rates = [math.log(own.rate_of(alone)) for alone in own.slices[self._before :][:BASELINE_SLICES]]
        usual, self._rates = self._rates, [*self._rates, *rates][:USUAL_SLICES]
        if self.baseline.live is None or not rates or len(usual) < 2:
            return
        before, self._changed = self._changed, statistics.fmean(rates) - statistics.fmean(usual)
        lasts = before * self._changed > 0 and min(abs(before), abs(self._changed)) > math.log1p(DRIFT)
        is_chance = abs(self._changed) < 2 * statistics.stdev(usual) * math.sqrt(1 / len(rates) + 1 / len(usual))
        if is_chance or (not lasts and abs(self._changed) < math.log1p(MUCH_DRIFT)):
            return
        self._rates, self._changed = rates, 0.0
        found = [self._measure_fresh(limits)]
        found += [self._measure_fresh(limits)] if found[0] is not None else []  # one process may differ by chance
        gains = [gain for gain in found if gain is not None]
        if len(gains) == FRESH_PROCESSES and gains[0] * gains[1] > 0:
            trained = max(pair.baseline.trained_examples or 0 for pair in trial.pairs)
            own.checks = (check_steady_work(math.exp(-statistics.fmean(gains)), examples=trained),)
            run.save_record(own.record(Outcome.OK), announce=False)

    def _measure_fresh(self, limits: TrialLimits) -> float | None:
        """Return the log speed-up of a fresh baseline over the live one; None where they do not surely differ."""
        run = self.run
        fresh, own_limits = run.new_trial(Phase.BASELINE, run.baseline), replace(limits, measured=limits.timeout)

        def enough() -> Stop | None:
            pairs, gain = len(fresh.log_ratios), mean_interval(fresh.log_ratios, confidence=0.99)
            tells = pairs >= FEWEST_PAIRS and (_differs(gain) or gain.half_width < math.log1p(DRIFT / 2))
            return Stop.TIME if tells or pairs >= DRIFT_PAIRS else None

        try:
            self._compare(fresh, own_limits, enough)
        except TrialFailed:
            return None
        finally:
            del run.trials[fresh.number]
        gain = mean_interval(fresh.log_ratios, confidence=0.99)
        return gain.value if len(fresh.log_ratios) >= FEWEST_PAIRS and _differs(gain) else None

    def _compare(self, trial: Trial, limits: TrialLimits, enough: Callable[[], Stop | None]) -> None:
        """Compare a candidate with the live baseline: in turns where both fit in memory, else in blocks."""
        run, pairs_before = self.run, len(trial.pairs)
        self.baseline.ensure()
        self._imported.add(_variables(trial.configuration))
        # The baseline's boundary of epochs is taken over, unless the pipeline is made of other parts.
        changed = trial.configuration.differences(run.baseline)
        own = any(KNOBS[name].structural for name in changed) and not self._has_short_boundary()
        process = MeasuredProcess(
            run=run,
            trial=trial,
            seat=self.name,
            start_timeout=limits.timeout,
            usual_start=costs.start_seconds(self.baseline.trial.record(Outcome.OK)),
            boundary=None if own else run.boundary,
            shares_compilations=True,
            on_started=lambda started: self._note_in_force(trial, started, limits),
        )
        comparison = Comparison(
            run=run,
            reference=self.baseline,
            candidates=[process],
            schedule=SearchSchedule(
                process=process, baseline=self.baseline, limits=limits, usual_length=self._usual_length, enough=enough
            ),
            in_blocks=self.bracketed or trial.pairing is Pairing.BRACKETED,
            reference_alone=self.baseline.trial.slices,
        )
        try:
            comparison.measure()
        except TimeIsUp:
            if comparison.out_of_memory is None or len(trial.pairs) == pairs_before:
                raise
            trial.pairing = Pairing.ALTERNATING
            raise comparison.out_of_memory from None  # what it gave before it failed makes it no success
        finally:
            if comparison.out_of_memory is not None and is_busy_gpu_error(comparison.out_of_memory.reason):
                self.bracketed = True  # no later one fits beside the baseline either
        if trial.pairing is Pairing.BRACKETED:
            run.measured(trial)
            trial.stopped_by = Stop.TIME

    def _has_short_boundary(self) -> bool:
        """Return whether epochs of slow steps are so long that no pipeline can gain much between two of them."""
        record, boundary = self.baseline.trial.record(Outcome.OK), self.run.boundary
        if boundary is None or record.throughput is None or not record.examples_per_epoch:
            return False
        epoch_seconds = record.examples_per_epoch / record.throughput.value
        return costs.slow_call_seconds(record) > 0 and boundary.seconds < SHORT_BOUNDARY * epoch_seconds

    def _note_in_force(self, trial: Trial, started: Started, limits: TrialLimits) -> None:
        """Take the values in force as a candidate's configuration. Raises SameInForce."""
        in_force = find_in_force(trial.configuration, started, self.run.baseline)
        is_known = in_force != trial.configuration and limits.known(in_force)  # before this trial is of it
        trial.configuration = in_force
        if is_known:
            raise SameInForce(in_force)


def find_in_force(requested: Configuration, started: Started, baseline: Configuration) -> Configuration:
    """Return the configuration that a process trains, by its first report."""
    return reset_idle(requested.replace(**{"jit_compile": started.jit_compile, **started.in_force}), baseline)


def _differs(gain: LogInterval) -> bool:
    """Return whether two processes of one configuration surely differ in speed."""
    return abs(gain.value) > math.log1p(DRIFT) and abs(gain.value) - gain.half_width > math.log1p(DRIFT / 2)


def _variables(configuration: Configuration) -> tuple[tuple[str, str], ...]:
    """Return the environment that TensorFlow reads at import, which tells templates apart."""
    return tuple(sorted(environment(configuration).items()))
