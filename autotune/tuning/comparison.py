"""Compare configurations with a reference: in turns, or in blocks where memory holds one process at a time.

Search, confirmation and verification are settings of `Comparison`; a soak is one `MeasuredProcess` on its own.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from autotune.data.errors import (
    INTERNAL,
    BudgetError,
    MeasuringStoppedError,
    NoStableConfigurationError,
    TrialProcessError,
    WorkloadError,
)
from autotune.data.record import Boundary, Outcome, Pairing, Slice
from autotune.recipe.compiled import ConfirmedCompilations, SharedCompilations
from autotune.runtime.executor import SEARCH_TIMING, LiveTrial, SeatLost, TrialFailed, WarmUp
from autotune.runtime.protocol import Started
from autotune.space.variables import CacheUse
from autotune.stats.disturbance import gpu_load_of
from autotune.tuning.costs import start_seconds, taken_seconds
from autotune.tuning.events import StepsBegan
from autotune.tuning.rules import fit_on_card
from autotune.tuning.run import TIMEOUT_FACTOR, Interrupted, Run, TimeIsUp, reclassify_busy_gpu
from autotune.tuning.trial import Trial

PATIENCE_SECONDS = 30.0  # how long a slice of a process that has been warm may take beyond its length
LONG_START_SHARE, BASELINE_COMPILATIONS = 0.1, 2  # of the budget; of the baseline beside a leader, where it is shorter
MOST_DEATHS = 3  # in a row, of a baseline that has trained before: then the run ends


def own_compilations(run: Run, trial: Trial) -> tuple[object, int]:
    """Return the side of a confirming process, and how many of its processes compile for themselves.

    The user's own run compiles the baseline anew: two do so, unless a start takes a tenth of the budget.
    """
    if trial.configuration != run.baseline:
        return trial.configuration, 1
    is_long = start_seconds(run.records[0]) >= LONG_START_SHARE * run.options.budget
    return trial.number, 1 if is_long else BASELINE_COMPILATIONS


@dataclass(kw_only=True, eq=False)
class MeasuredProcess:
    """A trial's process on a seat: started, asked for slices, closed, killed. Failures carry the trial's number."""

    run: Run
    trial: Trial  # keeps what the process reports
    seat: str
    start_timeout: float  # seconds to wait until it is warm
    usual_start: float | None = None  # seconds that a start takes; None for what the trial's last start took
    boundary: Boundary | None = None  # between two epochs; None to have the process measure it
    slice_patience: float = PATIENCE_SECONDS  # to wait for a slice beyond three times its length
    save_state: str = ""  # a file that takes weights and optimizer once it is warm; empty for none
    keeps_compilations: bool = False  # loads what a process of its side has compiled, or keeps that for others
    shares_compilations: bool = False  # loads what other processes of the search have compiled
    timeout_factor: float = TIMEOUT_FACTOR  # of the expected time: a timeout after less is the budget's fault
    on_started: Callable[[Started], None] = lambda started: None  # the process ends if this raises
    live: LiveTrial | None = field(default=None, init=False)
    _warm: WarmUp | None = field(default=None, init=False)
    _compilations: SharedCompilations | ConfirmedCompilations | None = field(default=None, init=False)
    _compiled_in: str = field(default="", init=False)  # the folder of what it has compiled, until its first slice
    alternates: bool = field(default=False, init=False)  # another process of the comparison is alive
    is_kept: ClassVar[bool] = False  # it outlives the comparison

    @property
    def warm(self) -> WarmUp:
        """The warm-up report of its latest start."""
        assert self._warm is not None
        return self._warm

    def ensure(self) -> None:
        """Start it unless it is alive."""
        if self.live is None:
            self.start()

    def start(self) -> None:
        """Launch a process and wait until it is warm. Raises TrialFailed, and TimeIsUp where the time is too short."""
        run, trial = self.run, self.trial
        instances, folder = trial.instances, ""
        use: CacheUse = "written"
        self._compilations = None
        if run.shared is not None and self.shares_compilations:
            self._compilations, use = run.shared, "shared"
            folder = run.shared.folder_for(trial.configuration, run.executor.place(self.seat))
        elif run.confirmed is not None and self.keeps_compilations:
            self._compilations, directory = run.confirmed, run.directory.trial_directory(trial.number)
            folder, use = run.confirmed.folder_for(*own_compilations(run, trial), directory, instances)
        try:
            self._start(folder, use if folder else "written")
        except TrialFailed as failure:
            text = f"{failure.whole}\n{failure.log_tail}"
            compilations = self._compilations
            if compilations is None or not compilations.may_fail(folder, failure.outcome, text):
                raise
            trial.instances = instances
            self._start("", "written")  # nothing but what was shared is at fault where this works
            compilations.turn_off(f"trial {trial.number} failed with what was compiled before it: {failure.reason}")

    def _start(self, compiled: str, use: CacheUse) -> None:
        """Do as `start`; `compiled` is the folder of compilations, empty for none."""
        run, trial, live, began = self.run, self.trial, None, self.run.clock()
        usual, cap = self.usual_start, self.start_timeout
        if usual is None:
            usual = trial.processes[-1].ready_seconds if trial.processes else 0.0
            if self.is_kept and trial.processes:  # it was warm before: a restart is not waited for as the first start
                cap = 3 * PATIENCE_SECONDS
            cap = max(cap, TIMEOUT_FACTOR * usual)
        trial.place = run.executor.place(self.seat)
        try:
            limit = self.run.deadline.time_limit(usual, cap=cap, timeout_factor=self.timeout_factor)
            with limit as timeout, self._failures():
                with run.driver_lock.released():
                    live = run.executor.launch(
                        trial.configuration,
                        seat=self.seat,
                        log=run.log_of(trial),
                        data=run.data,
                        timing=replace(
                            SEARCH_TIMING,
                            boundary=self.boundary,
                            longest_boundary_epoch_seconds=run.options.budget,
                            save_state=self.save_state,
                            compiled=compiled,
                            compiled_use=use,
                        ),
                    )
                    trial.instances += 1
                    warm = live.warm_up(timeout, self._note_started)
                is_baseline = trial.configuration == run.baseline
                who = "the baseline, started again," if is_baseline else f"trial {trial.number}"
                run.refuse_another_model(who, trial.configuration, warm)
                if compiled and self._compilations is not None:
                    saved = self._compilations.note_start(compiled, warm.first_step_seconds)
                    warm = replace(warm, saved_seconds=saved)
                self._warm = warm
                trial.note_warm(warm)
        except BaseException:
            if live is not None:
                live.kill()
            if compiled and use == "written":  # it may hold half of a program
                shutil.rmtree(compiled, ignore_errors=True)
            raise
        finally:
            trial.seconds += run.clock() - began
        self._compiled_in = compiled
        self.live, self.boundary = live, warm.ready.boundary or self.boundary

    def _note_started(self, started: Started) -> None:
        with self.run.driver_lock:
            self.run.observe(StepsBegan())
            self.run.refuse_other_devices(started.gpus)
            self.on_started(started)

    def slice(self, length: float) -> Slice:
        """Train for about so many seconds. Raises TrialFailed, TimeIsUp."""
        assert self.live is not None
        began, usual = self.run.clock(), taken_seconds(length, self.warm)
        try:
            with (
                self.run.deadline.time_limit(
                    usual,
                    cap=3 * max(length, usual) + self.slice_patience,
                    timeout_factor=self.timeout_factor,
                    extra_seconds=self.warm.ready.uncounted_seconds,
                ) as timeout,
                self._failures(),
                self.run.driver_lock.released(),
            ):
                measured = self.live.measure(length, timeout)
        finally:
            self.trial.seconds += self.run.clock() - began
        if self._compiled_in and self._compilations is not None:
            if gpu_load_of(measured):  # XLA may have chosen kernels by timings that other processes disturbed
                self._compilations.forget_latest(self._compiled_in)
            self._compiled_in = ""
        return measured.model_copy(update={"at": self.run.now()})

    def slices_without_pause(self, length: float, count: int) -> list[Slice]:
        """Train for `count` slices in a row. Raises TrialFailed."""
        assert self.live is not None
        with self._failures(), self.run.driver_lock.released():
            taken = self.live.measure_continuously(length, count, 3 * count * length + self.slice_patience)
        ended, after = self.run.now(), 0.0
        stamped = []
        for measured in reversed(taken):
            stamped.append(measured.model_copy(update={"at": ended - after}))
            after += measured.seconds
        return stamped[::-1]

    def close(self, input_wait_seconds: float, *, thorough: bool = False) -> None:
        """Take the closing figures and end it. Raises TrialFailed where weights are ruined, or not the baseline's."""
        # Without closing figures the slices stand all the same.
        assert self.live is not None
        patience = self.run.deadline.closing(PATIENCE_SECONDS)
        try:
            with self._failures(), self.run.driver_lock.released():
                finished = self.live.finish(input_wait_seconds, patience, thorough=thorough)
            self.trial.note_closing(finished)
        except TrialFailed as failure:
            if failure.outcome in (Outcome.NONFINITE, Outcome.UNSTABLE):
                raise
        finally:
            self.kill()

    def kill(self) -> None:
        """End it now."""
        if self.live is not None:
            self.live.kill()
            self.live = None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Note the trial's number in a failure. With a single seat, a lost one is the trial's failure."""
        alone = contextlib.nullcontext() if self.alternates else reclassify_busy_gpu()
        try:
            with alone:
                yield
        except TrialFailed as failure:
            failure.trial = self.trial.number
            if isinstance(failure, SeatLost) and not self.run.several:
                own = TrialFailed(failure.outcome, failure.reason, hint=failure.hint, log_tail=failure.log_tail)
                own.trial = self.trial.number
                raise own from failure
            raise


@dataclass(kw_only=True, eq=False)
class LiveBaseline(MeasuredProcess):
    """The baseline's process on a seat: alive between candidates, started again where it died."""

    is_kept: ClassVar[bool] = True
    timeout_factor: float = math.inf

    def ensure(self) -> None:
        """Start it again where it is gone. Raises NoStableConfigurationError, TrialFailed, TimeIsUp."""
        deaths = 0
        while self.live is None:
            try:
                self.start()
            except SeatLost:
                raise
            except TrialFailed as failure:
                deaths += 1
                if not self.should_restart(failure, deaths):
                    raise self._to_error(failure) from failure

    def slice(self, length: float) -> Slice:
        """Train a slice of it; it is started again where it died. Raises as `ensure`."""
        for deaths in range(1, MOST_DEATHS + 1):
            self.ensure()
            try:
                return super().slice(length)
            except TimeIsUp as over:
                if over.begun:
                    self.kill()
                raise
            except SeatLost:
                raise
            except TrialFailed as failure:
                self.kill()
                if deaths > 1 and not self.should_restart(failure, deaths):
                    raise self._to_error(failure) from failure
        raise AssertionError("unreachable")

    def should_restart(self, failure: TrialFailed, deaths: int) -> bool:
        """Return whether to start it again after so many deaths in a row: it has trained before."""
        trained = bool(self.trial.slices or self.trial.processes)
        return trained and failure.outcome is Outcome.CRASHED and deaths < MOST_DEATHS

    def _to_error(self, failure: TrialFailed) -> Exception:
        if self.alternates and failure.outcome is Outcome.OOM:
            return failure  # want of memory beside a candidate is the candidate's failure
        return baseline_error(self.run, self.trial, failure)


def baseline_error(run: Run, trial: Trial, failure: TrialFailed, *, budget_limited: bool = False) -> Exception:
    """Return the error for a baseline that failed; `budget_limited` if the budget cut its time."""
    detail = failure.detail or failure.log_tail
    if failure.outcome is Outcome.TIMEOUT and budget_limited:
        return BudgetError(
            f"the budget ended after {run.clock():.0f} s, before the baseline was timed",
            hint=f"Give a larger --budget, such as {max(60, math.ceil(run.clock() / 6) * 60)}s.",
            detail=detail,
        )
    if failure.outcome is Outcome.TIMEOUT and not trial.slices:
        hint = "Try it on its own with model.fit first; if it trains there, give a larger --budget."
        problem = f"the baseline did not warm up and finish timing in time: {failure.reason}"
        return BudgetError(problem, hint=hint, detail=detail)
    if failure.input_error:
        hint = failure.hint or f"Check that {run.reference} runs by itself."
        return WorkloadError(failure.reason, hint=hint, detail=failure.detail)
    if trial.slices and failure.outcome is not Outcome.NONFINITE:
        return MeasuringStoppedError(
            f"the baseline was measured, but its process now fails ({failure.outcome}): {failure.reason}",
            hint=failure.hint
            or f"Fix that; --resume {run.directory.path} continues the run. Its log is {run.log_of(trial)}.",
            detail=detail,
        )
    if failure.reason.startswith(INTERNAL):
        return TrialProcessError(failure.reason, hint=f"{failure.hint} The traceback is in {run.log_of(trial)}.")
    return NoStableConfigurationError(
        f"the baseline itself fails ({failure.outcome}): {failure.reason}",
        hint=failure.hint or f"Nothing can be recommended before it runs. Its log is {run.log_of(trial)}.",
        detail=detail,
    )


class Schedule(Protocol):
    """The schedule of a comparison: slice lengths, stop rule, and how its processes close."""

    def turn_seconds(self, processes: Sequence[MeasuredProcess]) -> float:
        """Return the length of a slice while processes take turns; the reference is the first of them."""

    def goes_on(self, rounds: int, length: float) -> bool:
        """Return whether another round of turns follows so many."""

    def block_seconds(self, process: MeasuredProcess) -> float:
        """Return the length of a process's slices in a block."""

    def block_rounds(self, length: float) -> int:
        """Return the slices in a block of the reference, which are so long; a candidate's block has twice as many."""

    def close(self, process: MeasuredProcess) -> None:
        """Take the closing figures of a process and end it."""


@dataclass(kw_only=True)
class Comparison:
    """Candidates measured against one reference.

    In turns, all processes are alive and each is frozen while another one trains. In blocks, one process is alive:
    the reference, the candidates, the reference again.
    """

    run: Run
    reference: MeasuredProcess  # the first to start
    candidates: Sequence[MeasuredProcess]  # whose trials get the pairs
    schedule: Schedule
    in_blocks: bool
    reference_alone: Sequence[Slice] = ()  # of a reference that was alone, which tell what a card has left
    out_of_memory: TrialFailed | None = field(default=None, init=False)  # why blocks followed turns

    def measure(self) -> None:
        """Add pairs to the candidates' trials. Raises TrialFailed, Interrupted, TimeIsUp; whole rounds are kept."""
        # All replicas of MirroredStrategy are threads of one process, so a freeze stops them together. A training of
        # several processes must be set in blocks: a freeze of one rank would hang the others' collectives.
        wanted = [candidate.trial.configuration for candidate in self.candidates]
        if not self.in_blocks and fit_on_card(self.reference_alone, wanted, self.run.records.values()):
            self.reference.ensure()
            try:
                return self._take_turns()
            except TrialFailed as failure:
                if failure.outcome is not Outcome.OOM:
                    raise
                self.out_of_memory = failure  # perhaps the processes do not fit together
        return self._follow_in_blocks()

    def _take_turns(self) -> None:
        processes = [self.reference, *self.candidates]
        try:
            for process in processes:
                process.alternates = True
            for candidate in self.candidates:
                candidate.trial.pairing = Pairing.ALTERNATING
                candidate.start()
            self._measure_rounds(processes, self.schedule.turn_seconds(processes))
            self._close(processes)
        except TrialFailed as failure:
            if failure.trial == self.candidates[0].trial.number and failure.outcome is not Outcome.OOM:
                self._close([process for process in processes if process.trial.number != failure.trial])
            raise
        finally:
            for process in processes:
                process.alternates = False
                if not process.is_kept:
                    process.kill()

    def _close(self, processes: Sequence[MeasuredProcess]) -> None:
        """Close all processes that are alive, whatever one of them says. Raises TrialFailed, the reference's first."""
        failures = []
        for process in processes:
            if process.is_kept or process.live is None:
                continue
            try:
                self.schedule.close(process)
            except TrialFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _measure_rounds(self, processes: Sequence[MeasuredProcess], length: float) -> None:
        """Measure rounds of one slice each, in a drawn order and then in its reverse, so that a drift cancels."""
        order, rounds = list(processes), 0
        beside: list[Slice] = []
        try:
            while self.schedule.goes_on(rounds, length):
                if self.run.interrupted():
                    raise Interrupted
                order = order[::-1] if rounds % 2 else self.run.rng.sample(processes, len(processes))
                slices = {process.trial.number: process.slice(length) for process in order}
                baseline = slices[self.reference.trial.number]
                for candidate in self.candidates:
                    candidate.trial.add_pair(
                        baseline_first=order.index(self.reference) < order.index(candidate),
                        baseline=baseline,
                        candidate=slices[candidate.trial.number],
                        reference=self.reference.trial,
                    )
                beside.append(baseline)
                rounds += 1
        finally:
            self._keep_reference_slices(beside)

    def _follow_in_blocks(self) -> None:
        """Pair each candidate's slices with those before and after it, by turns, so that a steady drift cancels."""
        self.reference.ensure()
        rounds = self.schedule.block_rounds(self.schedule.block_seconds(self.reference))
        before = self._measure_block(self.reference, rounds)
        self.reference.kill()
        forward = self.candidates[0].trial.instances % 2 == 0
        blocks = []
        for candidate in self.candidates if forward else self.candidates[::-1]:
            candidate.trial.pairing = Pairing.BRACKETED
            blocks.append((candidate, self._measure_block(candidate, 2 * rounds)))
        after = self._measure_block(self.reference, rounds)
        self._keep_reference_slices([*before, *after])
        for candidate, own in blocks:
            for place, measured in enumerate(own):
                candidate.trial.add_pair(
                    baseline_first=place % 2 == 0,
                    baseline=(before, after)[place % 2][place // 2],
                    candidate=measured,
                    reference=self.reference.trial,
                )

    def _measure_block(self, process: MeasuredProcess, count: int) -> list[Slice]:
        process.ensure()
        try:
            length = self.schedule.block_seconds(process)
            slices = [process.slice(length) for _ in range(count)]
            if not process.is_kept:
                self.schedule.close(process)
        finally:
            if not process.is_kept:
                process.kill()
        return slices

    def _keep_reference_slices(self, slices: Sequence[Slice]) -> None:
        """Keep the slices of a reference that ends with the comparison; a live baseline's are in the pairs alone."""
        if not self.reference.is_kept and slices:
            self.reference.trial.add_slices(slices)
