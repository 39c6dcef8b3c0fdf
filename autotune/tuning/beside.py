"""Search trials: candidates run beside the live baseline. Two processes take turns in short slices, one always frozen.

Where both do not fit in memory, the candidate runs alone between two stretches of the baseline
(*bracketing*), and its record says so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autotune.errors import BudgetError, NoStableConfigurationError, WorkloadError
from autotune.executors.executor import (
    IN_SEARCH,
    Data,
    DeviceUnavailable,
    LiveTrial,
    TrialFailed,
    TrialTiming,
    WarmUp,
)
from autotune.recipe.apply import environment
from autotune.record import Outcome, Pairing, Phase, Slice, TrialRecord
from autotune.space.configuration import Configuration, on_device
from autotune.space.knobs import Device
from autotune.stats.deciding import Stop, stop_measuring
from autotune.stats.intervals import LogInterval, Spread
from autotune.tuning.run import Run, never_two_alive
from autotune.tuning.running import Trial
from autotune.tuning.slicing import (
    SHORT_SLICE_SECONDS,
    SLICE_SECONDS,
    is_busy,
    slice_seconds,
    slice_times,
    taken_seconds,
)
from autotune.tuning.waiting import GENEROUS, Deadline, TimeIsUp

INPUT_WAIT_SECONDS = 0.3
"""The counterfactual's time, for the baseline and what is confirmed: those figures stand in the recipe."""
QUICK_INPUT_WAIT_SECONDS = 0.05
"""The same for a trial of the search, where it would be most of what the tool itself costs."""
BASELINE_SECONDS = 120.0
"""What the baseline may take until it is warm: where it has less, a timeout is the budget's fault."""
BASELINE_SLICES = 3
BASELINE_SLICES_SECONDS = 12.0
"""For the baseline's own slices: fewer of them where an epoch is long."""
BRACKET_SLICES = 3
"""Slices of the baseline before, and as many after, a candidate that runs alone; fewer where an epoch is long."""
SLICE_PATIENCE_SECONDS = 5.0
"""How long a slice may take beyond three times its length when the trial's own time is over."""
PATIENCE_SECONDS = 30.0
"""How long the baseline, which has been warm before, may take over a slice beyond its length."""
SLICES_IN_A_TRIAL = 8
"""In the time that a search trial's slices may take, where calls and epochs let them be so short."""
STRUCTURE = ("persistent_iterator", "prefetch", "data_autotune", "data_threads", "num_parallel_calls")
"""Knobs that change what a pipeline is made of: a candidate that changes one measures its own boundary of epochs."""

Enough = Callable[[Sequence[float]], Stop | None]
"""Says of a trial's log-ratios why it has been measured enough, or None to go on."""


class Interrupted(Exception):
    """The user asked to stop."""


class SameInForce(Exception):
    """What is in force is a configuration that was tried before.

    Args:
        configuration: Which.
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.configuration = configuration


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """What a search trial may take.

    Args:
        timeout: Seconds from request to end.
        measured: Seconds of slices, the baseline's turns included.
    """

    timeout: float
    measured: float


class Beside:
    """The live baseline, and candidates run beside it.

    Args:
        run: What all parts share.
        deadline: When every wait has ended.
        bracketed: Never keep two processes alive at once.
    """

    def __init__(self, run: Run, deadline: Deadline, *, bracketed: bool = False) -> None:
        self._run = run
        self._bracketed = bracketed
        self._deadline = deadline
        self._imported: set[tuple[tuple[str, str], ...]] = set()
        self._wanted = SLICE_SECONDS
        self.baseline: Trial

    # ------------------------------------------------------------------------------------------- baseline

    def start_baseline(self, timeout: float, earlier: Trial | None = None) -> WarmUp:
        """Run trial 0 until it is warm, learn from it what the workload is, and time it alone.

        Args:
            timeout: Seconds until it must be warm.
            earlier: What an earlier invocation measured of it, to be added to; its record stays as it is until
                `keep_baseline`, for this may turn out to be another training.

        Raises:
            WorkloadError: The workload itself is at fault.
            BudgetError: It does not warm up in time, or the budget leaves no time for its slices.
            NoStableConfigurationError: The baseline fails.
        """
        run = self._run
        self.baseline = trial = earlier or run.new_trial(Phase.BASELINE, run.baseline)
        if earlier is not None:
            run.announce(trial)
        began, hurried = run.clock(), timeout < BASELINE_SECONDS
        try:
            with never_two_alive():
                warm = self._launch(trial, timeout)
            started = warm.started
            run.data, run.gpus = Data.found_by(started), started.gpus
            run.boundary = warm.ready.boundary
            run.device_limit_bytes = started.device_limit_bytes
            device = Device.GPU if started.gpus else Device.CPU
            run.baseline = on_device(run.baseline, device).replace(
                jit_compile=started.jit_compile, **started.set_by_dataset
            )
            trial.configuration = trial.asked = run.baseline
            length = slice_seconds(warm)
            patience = length * 20 + PATIENCE_SECONDS + GENEROUS * warm.ready.uncounted_seconds
            for place in range(_within(BASELINE_SLICES, BASELINE_SLICES_SECONDS / length)):
                left = self._deadline.left()
                if place and (run.interrupted() or left < taken_seconds(length, warm)):
                    break
                hurried = left < patience
                trial.add_slices([run.stamped(_live(trial).measure(length, max(1.0, min(patience, left))))])
            self._wanted = SHORT_SLICE_SECONDS if is_busy(trial.slices) else SLICE_SECONDS
        except TrialFailed as failure:
            trial.seconds += run.clock() - began
            if earlier is None:  # else what it gave then stands
                run.keep(trial.failed(failure))
            raise self._baseline_error(failure, hurried=hurried) from failure
        trial.seconds += run.clock() - began
        if earlier is None:
            self.keep_baseline()
        return warm

    def keep_baseline(self) -> None:
        """Write the baseline's record, and announce it."""
        self._run.keep(self.baseline.record(Outcome.OK))

    def _baseline_error(self, failure: TrialFailed, *, hurried: bool = False) -> Exception:
        """What to tell of a baseline that failed, `hurried` where the budget left it less time than it may take."""
        detail = failure.detail or failure.log_tail
        if failure.outcome is Outcome.TIMEOUT and hurried:
            return BudgetError(
                f"the budget ended after {self._run.clock():.0f} s, before the baseline was timed",
                hint=f"Give a larger --budget, such as {max(60, math.ceil(self._run.clock() / 6) * 60)}s.",
                detail=detail,
            )
        if failure.outcome is Outcome.TIMEOUT and not self.baseline.slices:
            return BudgetError(
                f"the baseline was not warm and timed in time: {failure.reason}",
                hint="If it never trains at all, try it on its own with model.fit first; if it does train there, try "
                "--isolation spawn: threads that a library has started at import do not survive a fork.",
                detail=detail,
            )
        if failure.input_error:
            return WorkloadError(failure.reason, hint=failure.hint, detail=failure.detail)
        log = self._run.log_of(self.baseline)
        return NoStableConfigurationError(
            f"the baseline itself fails ({failure.outcome}): {failure.reason}",
            hint=failure.hint or f"Nothing can be recommended before it runs. Its log is {log}.",
            detail=detail,
        )

    def end_baseline(self) -> None:
        """Take the baseline's closing figures, and end it."""
        trial, began = self.baseline, self._run.clock()
        if trial.live is None:
            return
        try:
            asked = INPUT_WAIT_SECONDS if trial.finished is None else 0.0
            trial.note_closing(trial.live.finish(asked, self._deadline.closing(PATIENCE_SECONDS)))
        except TrialFailed:
            pass  # its slices stand; only the closing figures are missing
        finally:
            self._stop_baseline()
        trial.seconds += self._run.clock() - began
        self._run.keep(trial.record(Outcome.OK), announce=False)

    def _stop_baseline(self) -> None:
        if self.baseline.live is not None:
            self.baseline.live.kill()
            self.baseline.live = None

    def _baseline_slice(self, length: float, *, beside: bool = False) -> Slice:
        """A slice of the baseline, restarted once if it died.

        For `beside` see `_live_baseline`: so it is, too, where the baseline runs out of memory in the slice once more.
        """
        for last_try in (False, True):
            live = self._live_baseline(beside=beside)
            patience = length * 20 + PATIENCE_SECONDS
            try:
                usual, beyond = slice_times(length, self.baseline.warm)
                with self._deadline.wait(
                    usual, at_most=patience, generous=math.inf, beyond=beyond
                ) as timeout:
                    return self._run.stamped(live.measure(length, timeout))
            except TimeIsUp as over:
                if over.begun:
                    self._stop_baseline()
                raise
            except TrialFailed as failure:
                self._stop_baseline()
                if last_try:
                    if beside and failure.outcome is Outcome.OOM:
                        raise
                    raise self._baseline_error(failure) from failure
        raise AssertionError("unreachable")

    def _live_baseline(self, *, beside: bool) -> LiveTrial:
        """The baseline's process, started again where it is gone.

        Args:
            beside: Whether a candidate is alive. Where the baseline finds no memory beside it, that is the
                candidate's failure: alone, the baseline has run before.
        """
        if self.baseline.live is None:
            usual = 0.0 if self.baseline.warm is None else self.baseline.warm.ready_seconds
            at_most = max(3 * PATIENCE_SECONDS, GENEROUS * usual)
            try:
                with (
                    contextlib.nullcontext() if beside else never_two_alive(),
                    self._deadline.wait(usual, at_most=at_most, generous=math.inf) as timeout,
                ):
                    self._launch(self.baseline, timeout, replace(IN_SEARCH, boundary=self._run.boundary))
            except TimeIsUp:
                self._stop_baseline()
                raise
            except TrialFailed as failure:
                self._stop_baseline()
                if beside and failure.outcome is Outcome.OOM:
                    raise
                raise self._baseline_error(failure) from failure
        return _live(self.baseline)

    def _launch(self, trial: Trial, timeout: float, timing: TrialTiming = IN_SEARCH) -> WarmUp:
        run = self._run
        trial.live = run.trials.launch(
            trial.configuration, log=run.log_of(trial), data=run.data, timing=timing
        )
        self._imported.add(_variables(trial.configuration))
        trial.instances += 1
        warm = trial.live.warm_up(timeout)
        run.refuse_other_devices(warm.started.gpus)
        trial.note_warm(warm)
        return warm

    # ----------------------------------------------------------------------------------------- candidates

    def imports_first(self, configuration: Configuration) -> bool:
        """Whether a configuration needs a template that has not imported yet."""
        return _variables(configuration) not in self._imported

    def measure(
        self,
        trial: Trial,
        limits: TrialLimits,
        *,
        leader: LogInterval | None,
        others: Spread | None = None,
        known: Callable[[Configuration], bool] = lambda configuration: False,
    ) -> TrialRecord:
        """Run a trial beside the baseline, in one more process, and keep its record.

        Called again for a trial that ran before, it adds to what was measured.

        Args:
            trial: What to run.
            limits: What it may take.
            leader: Logarithm of the leader's speed-up, against which it is told apart; None to measure it in any case.
            others: How much the pairs of other trials vary, where that is known.
            known: Whether a configuration was tried before: one that turns out to be in force is not measured again.

        Raises:
            Interrupted: The user asked to stop; the record is kept.
            TimeIsUp: The time is over; the record is kept.
            SameInForce: What is in force was tried before; the record is kept.
            NoStableConfigurationError: The baseline does not run any more, or the device is gone; the record is kept.
        """
        run, began, pairs_before = self._run, self._run.clock(), len(trial.pairs)
        ended: Interrupted | TimeIsUp | SameInForce | NoStableConfigurationError | None = None
        outcome, reason, log_tail = Outcome.OK, "", ""
        enough = partial(stop_measuring, leader=leader, others=others)
        trial.others = others
        self._known = known
        try:
            self._measure_or_bracket(trial, limits, began, enough)
            if trial.stopped_by == Stop.CANNOT_WIN:
                outcome, reason = Outcome.PRUNED, "its interval lies below the leader's"
        except SameInForce as same:
            ended, outcome = same, Outcome.PRUNED
            reason = f"the same as a trial before: {run.changes(same.configuration)} is in force"
        except DeviceUnavailable as failure:
            # Of this configuration it says nothing, and the next would fare alike.
            outcome, reason, log_tail = Outcome.INTERRUPTED, failure.whole, failure.log_tail
            ended = NoStableConfigurationError(
                f"the device is not available any more: {failure.reason}",
                hint=f"{failure.hint} Then --resume {run.directory.path} goes on with what was found.",
                detail=failure.detail,
            )
        except TrialFailed as failure:
            before = run.records.get(trial.number)
            if failure.outcome is not Outcome.TIMEOUT or before is None or not before.outcome.measured:
                outcome, reason, log_tail = failure.outcome, failure.whole, failure.log_tail
        except (Interrupted, TimeIsUp) as why:
            ended = why
            if isinstance(why, TimeIsUp) and len(trial.log_ratios) > 1:
                trial.stopped_by = Stop.TIME
            elif trial.number not in run.records:  # what an earlier process of it gave stands
                stopped = "stopped by the user" if isinstance(why, Interrupted) else "the time was over"
                outcome, reason = Outcome.INTERRUPTED, stopped
        finally:
            if trial.live is not None:
                trial.live.kill()
                trial.live = None
        trial.seconds += run.clock() - began
        record = trial.record(outcome, reason=reason, log_tail=log_tail)
        if ended is not None and len(trial.pairs) == pairs_before:
            record = run.records.get(trial.number, record)  # nothing new: what an earlier process gave stands
        record = run.keep(record)
        if ended is not None:
            raise ended
        return record

    def _measure_or_bracket(self, trial: Trial, limits: TrialLimits, began: float, enough: Enough) -> None:
        pairs_before, beside = len(trial.pairs), None
        if not self._bracketed and trial.pairing is not Pairing.BRACKETED:
            try:
                self._alternate(trial, limits, began, enough)
            except TrialFailed as failure:
                if failure.outcome is not Outcome.OOM:
                    raise
                beside = failure  # perhaps only the two together do not fit, or just did until one of them took more
            else:
                return
        try:
            with never_two_alive():
                self._bracket(trial, limits)
        except TimeIsUp:
            if beside is None or len(trial.pairs) == pairs_before:
                raise
            trial.pairing = Pairing.ALTERNATING
            raise beside from None  # what it gave before it failed makes it no success

    def _alternate(self, trial: Trial, limits: TrialLimits, began: float, enough: Enough) -> None:
        run = self._run
        self._live_baseline(beside=False)
        warm = self._start(trial, limits)
        reference = self.baseline.warm
        assert reference is not None
        trial.pairing = Pairing.ALTERNATING
        most = limits.measured / SLICES_IN_A_TRIAL
        length = slice_seconds(warm, reference, wanted=self._wanted, most=most)
        measuring_since, pairs_before = run.clock(), len(trial.pairs)
        while True:
            if run.interrupted():
                raise Interrupted
            baseline_first = run.rng.random() < 0.5
            first = self._baseline_slice(length, beside=True) if baseline_first else None
            left = limits.timeout - (run.clock() - began)
            own = self._own_slice(trial, length, max(left, 3 * length + SLICE_PATIENCE_SECONDS))
            trial.add_pair(
                baseline_first=baseline_first,
                baseline=first or self._baseline_slice(length, beside=True),
                candidate=own,
                reference=self.baseline.warm or reference,
            )
            run.measured(trial)
            trial.stopped_by = enough(trial.log_ratios)
            two_pairs = len(trial.pairs) - pairs_before >= 2
            spent = run.clock() - measuring_since - 2 * length * trial.repeats()
            left = limits.timeout - (run.clock() - began)
            if (
                trial.stopped_by is None
                and two_pairs
                and (spent + 2 * length > limits.measured or left < 2 * length)
            ):
                trial.stopped_by = Stop.TIME
            if trial.stopped_by is not None:
                break
        self._finish(trial)

    def _start(self, trial: Trial, limits: TrialLimits) -> WarmUp:
        """Launch a candidate, and take what is in force for its configuration.

        Raises:
            TrialFailed: It did not become warm, or Keras does not do what is to be measured.
            SameInForce: What is in force was tried before.
            TimeIsUp: The time does not hold it.
        """
        assert self.baseline.warm is not None
        with self._deadline.wait(self.baseline.warm.ready_seconds, at_most=limits.timeout) as timeout:
            warm = self._launch(trial, timeout, self._timing(trial.configuration))
        if trial.configuration["jit_compile"] is True and not warm.started.jit_compile:
            raise TrialFailed(
                Outcome.ERROR, "Keras does not compile this model with XLA: jit_compile falls back to false"
            )
        if warm.started.in_force:
            in_force = trial.configuration.replace(**warm.started.in_force)
            if in_force != trial.configuration and self._known(in_force):
                raise SameInForce(in_force)
            trial.configuration = in_force
        return warm

    def _timing(self, configuration: Configuration) -> TrialTiming:
        """The baseline's boundary of epochs is taken over, unless the pipeline is made of other parts."""
        changed = set(configuration.differences(self._run.baseline))
        return IN_SEARCH if changed & set(STRUCTURE) else replace(IN_SEARCH, boundary=self._run.boundary)

    def _own_slice(self, trial: Trial, length: float, at_most: float) -> Slice:
        usual, beyond = slice_times(length, trial.warm)
        with self._deadline.wait(usual, at_most=at_most, beyond=beyond) as timeout:
            return self._run.stamped(_live(trial).measure(length, timeout))

    def _finish(self, trial: Trial) -> None:
        """Closing figures; a trial that was measured stays so when they do not come."""
        with contextlib.suppress(TrialFailed):
            patience = self._deadline.closing(PATIENCE_SECONDS)
            trial.note_closing(_live(trial).finish(QUICK_INPUT_WAIT_SECONDS, patience))

    def _bracket(self, trial: Trial, limits: TrialLimits) -> None:
        """Baseline, candidate, baseline again; each pair takes its baseline from one side."""
        if trial.live is not None:
            trial.live.kill()
            trial.live = None
        trial.pairing = Pairing.BRACKETED
        reference = self.baseline.warm
        assert reference is not None
        length = slice_seconds(reference, most=limits.measured / SLICES_IN_A_TRIAL)
        usual = 4 * BRACKET_SLICES * SLICE_SECONDS
        count = _within(BRACKET_SLICES, max(limits.measured, usual) / (4 * length))
        before = [self._baseline_slice(length) for _ in range(count)]
        self._stop_baseline()
        self._start(trial, limits)
        own = [self._own_slice(trial, length, limits.timeout + length) for _ in range(2 * count)]
        self._finish(trial)
        _live(trial).kill()
        trial.live = None
        after = [self._baseline_slice(length) for _ in range(count)]
        for index, candidate in enumerate(own):
            # Neighbours in turn from before and after: a steady drift cancels.
            side, place = (before, index // 2) if index % 2 == 0 else (after, index // 2)
            trial.add_pair(
                baseline_first=index % 2 == 0,
                baseline=side[place],
                candidate=candidate,
                reference=self.baseline.warm or reference,
            )
        self._run.measured(trial)
        trial.stopped_by = Stop.TIME


def _within(most: int, affordable: float) -> int:
    """How many of at most `most` slices are affordable: one in any case."""
    return max(1, min(most, int(affordable)))


def _variables(configuration: Configuration) -> tuple[tuple[str, str], ...]:
    """What tells templates apart: the environment that TensorFlow reads when it is imported."""
    return tuple(sorted(environment(configuration).items()))


def _live(trial: Trial) -> LiveTrial:
    assert trial.live is not None
    return trial.live
