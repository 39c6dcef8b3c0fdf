"""Short trainings for their losses alone, while nothing is timed: numerics parity, and what a larger batch costs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.data.facts import Trains
from autotune.data.figures import Check
from autotune.data.record import ContinuedTraining, Outcome, TrialRecord
from autotune.recipe.learning_rate import RULES, factor_of
from autotune.runtime import protocol
from autotune.runtime.executor import DeviceUnavailable, SeatLost, TrialFailed
from autotune.runtime.protocol import BranchRuns, LossRuns
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats.same_loss import FEWEST_SEEDS, NOT_COMPARABLE, find_step_counter
from autotune.stats.stability import PARITY, cannot_tell, check_parity
from autotune.tuning.events import Began, Notice
from autotune.tuning.run import Interrupted, Run, reclassify_busy_gpu

Curves = Sequence[Sequence[float | None]]

PARITY_SEEDS, PARITY_STEPS = (0, 1, 2, 3, 4), 200
BRANCH_SEEDS, FEWEST_BRANCH_SEEDS = 8, 5
BRANCH_STEPS = 400  # of the baseline, from the branch: the most that each training lasts
PROBES, PROBE_EXAMPLES = 16, 512
PROBING = 1.5  # what evaluating the probe makes of a training's time
STEP_SECONDS = 0.004  # at least, of a step that is called by itself
FINISHING = 0.8  # share of the time after which no step begins, so that the losses come within it
CAUTION = 0.5  # share of the time that trainings are planned for which did not end in their time before
CUT_SHORT = 1.5  # times what was kept for trainings that did not end in it: what they should need
LEAST_SECONDS = 0.2  # of one training, its compilation not counted


def numerics_of(configuration: Configuration) -> tuple[object, ...]:
    """Return the class of numerics that a configuration computes in."""
    return tuple(configuration.get(name) for name, knob in KNOBS.items() if knob.numerics is Numerics.ARITHMETIC)


def plain_numerics(baseline: Configuration, *, batch_size: int) -> Configuration:
    """Return the baseline at a batch size, without XLA in float32 or higher: what numerics are compared with."""
    is_higher = baseline.get("precision") == "float64"
    plain = {name: KNOBS[name].plain for name in baseline if name != "precision" or not is_higher}
    changes = {name: value for name, value in plain.items() if value is not None}
    return baseline.replace(**changes, batch_size=batch_size)


class Trainings:
    """Short trainings within a time, on batches recorded below the run directory; leaving it removes those."""

    def __init__(self, run: Run, *, seat: str, ends: float, heading: str, again: bool = False) -> None:
        self.run = run
        self._again = again  # they did not end in their time before
        self._heading = heading  # shown when the first one begins
        self._seat, self._ends = seat, ends
        self._scratch: Path | None = None
        self._count = 0

    def __enter__(self) -> Trainings:
        return self

    def __exit__(self, *_: object) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def left(self) -> float:
        """Return the seconds until it must be over."""
        return max(0.0, self._ends - self.run.clock())

    def planned(self) -> float:
        """Return the seconds to plan trainings for: half of the time left where they may take longer than planned."""
        return self.left() * (CAUTION if self._again else 1.0)

    def seconds_each(self, count: int, *, share: float) -> float:
        """Return seconds for each of several trainings of the baseline's kind, out of a share of the time left."""
        # They read a few batches, so they do not fill what the dataset caches.
        baseline = self.run.records[0]
        start = baseline.start_seconds - (baseline.filling_seconds or 0.0)
        return (share * self.left() - start) / (count + 1)

    def curves(
        self, configuration: Configuration, *, recorded: int, seeds: tuple[int, ...], steps: int, seconds: float
    ) -> Curves:
        """Return losses by step, for each seed; empty where there are none."""
        # Raises TrialFailed, DeviceUnavailable, Interrupted. Batches of the size `recorded` are recorded where they
        # are not yet; no step of the first training begins later than `seconds` after its first step.
        losses = LossRuns(
            folder=self._folder(f"batch-{recorded}"),
            recorded_batch_size=recorded,
            seeds=seeds,
            most_steps=steps,
            seconds=seconds,
        )
        return self.train(configuration, losses).curves

    def branch_curves(
        self, configuration: Configuration, *, state: str, runs: Mapping[str, Any]
    ) -> protocol.LossCurves:
        """Return the losses on the probe of trainings that branch from a state; `runs` are more of `BranchRuns`."""
        # Raises TrialFailed, DeviceUnavailable, Interrupted.
        recorded = self.run.baseline.batch_size
        made = BranchRuns(
            state=state,
            folder=self._folder(f"branch-{recorded}"),
            recorded_batch_size=recorded,
            probe_examples=PROBE_EXAMPLES,
            probes=PROBES,
            seconds=max(1.0, FINISHING * self.left()),
            **runs,
        )
        return self.train(configuration, made)

    def _folder(self, name: str) -> str:
        if self._scratch is None:  # a name that nothing of others can have
            self._scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=self.run.directory.path))
        return str((self._scratch / name).resolve())

    def train(self, configuration: Configuration, losses: protocol.Trainings) -> protocol.LossCurves:
        """Return the losses of these trainings. Raises TrialFailed, DeviceUnavailable, Interrupted."""
        if self.run.interrupted():
            raise Interrupted
        self._count += 1
        if self._count == 1:
            self.run.observe(Began(text=self._heading))
        log = self.run.directory.log_directory / f"losses-{self._count}.log"
        with reclassify_busy_gpu(), self.run.driver_lock.released():
            try:
                live = self.run.executor.launch(
                    configuration, seat=self._seat, log=str(log.resolve()), data=self.run.data, losses=losses
                )
                try:
                    found = live.loss_curves(max(1.0, self.left()), self.run.interrupted)
                finally:
                    live.kill()
            except TrialFailed:
                if self.run.interrupted():  # it says nothing of the configuration
                    raise Interrupted from None
                raise
        self.run.refuse_other_devices(found.gpus)
        self.run.refuse_another_model("a training for its losses", configuration, found)
        return found


def compare_numerics(trainings: Trainings, configuration: Configuration) -> Check:
    """Return whether a configuration learns as float32 without XLA does, at its batch size."""
    # A comparison that could not be made passes, with no value and the reason in its detail.
    run = trainings.run
    plain = plain_numerics(run.baseline, batch_size=configuration.batch_size)
    if numerics_of(configuration) == numerics_of(plain):
        return Check(
            name=PARITY, passed=True, value=0.0, limit=0.0, detail=f"computes in {plain['precision']} without XLA"
        )
    check = _compared(trainings, configuration, plain)
    if not check.conclusive:
        run.observe(Notice(text=f"numerics parity of {run.changes(configuration)}: {check.detail}"))
    return check


def _compared(trainings: Trainings, configuration: Configuration, plain: Configuration) -> Check:
    run, size = trainings.run, configuration.batch_size
    if run.facts.script is not None and run.facts.script.trains is Trains.LOOP:
        return cannot_tell("a custom training loop cannot begin again from other weights")
    seconds = trainings.seconds_each(len(PARITY_SEEDS), share=0.5)
    if seconds < LEAST_SECONDS:
        return cannot_tell("no time was left for it; give a larger --budget")
    try:
        float32 = trainings.curves(plain, recorded=size, seeds=PARITY_SEEDS, steps=PARITY_STEPS, seconds=seconds)
    except TrialFailed as failure:
        refuse_lost(failure, run)
        return cannot_tell(f"{plain['precision']} without XLA gave no losses at batch_size={size}: {failure.reason}")
    if not float32 or not float32[0]:
        return cannot_tell("the model reports no loss")
    try:
        own = trainings.curves(
            configuration, recorded=size, seeds=PARITY_SEEDS[:1], steps=len(float32[0]), seconds=trainings.left()
        )
    except DeviceUnavailable as failure:
        return cannot_tell(failure.reason)
    except TrialFailed as failure:
        refuse_lost(failure, run)
        if failure.outcome is Outcome.TIMEOUT:
            return cannot_tell("its losses did not come within the time there was")
        if failure.outcome is Outcome.OTHER_MODEL:
            return cannot_tell(f"it {failure.reason}")
        return Check(name=PARITY, passed=False, detail=failure.reason)
    return check_parity(float32, own[0], str(plain["precision"]))


def refuse_lost(failure: TrialFailed, run: Run) -> None:
    """Raise what says nothing of a configuration: one of several seats was lost, and another compares again."""
    if isinstance(failure, SeatLost) and run.several:
        raise failure


class NotMeasured(Exception):
    """A leader's learning was not measured; the message is half a sentence."""

    needs_seconds: float | None = None  # that it should take, where there was too little time


class TooLittleTime(NotMeasured):
    """It needs more seconds than were kept for it; `needs` as far as that is known."""

    def __init__(self, *, kept: float, needs: float | None = None) -> None:
        were_kept = "no time was left" if kept < 1 else f"{kept:.0f} s were kept"
        about = f"it takes about {needs:.0f} s, and {were_kept} for it" if needs else ""
        super().__init__(about or f"it takes longer than the {kept:.0f} s that were kept for it")
        self.needs_seconds = needs or CUT_SHORT * kept


def state_steps(run: Run) -> int:
    """Return the steps after which the baseline's state was saved. Raises NotMeasured where it was not."""
    processes = run.records[0].processes
    steps = next((log.state_steps for log in reversed(processes) if log.state_steps is not None), None)
    if run.state_file is None or steps is None or not run.state_file.exists():
        raise NotMeasured("the state of the baseline's training could not be saved")
    return steps


def branch(trainings: Trainings, leader: TrialRecord) -> ContinuedTraining:
    """Train the baseline and a leader with another batch size from the same state, for their losses on a probe.

    Raises:
        NotMeasured: There is no state to begin with, too little time, or the training has no such losses.
        Interrupted: The user stops the run.
    """
    run, configuration, kept = trainings.run, Configuration(leader.configuration), trainings.left()
    steps = state_steps(run)
    seeds, examples = _branch_size(trainings, leader)

    counted: list[Mapping[str, Sequence[float]]] = []

    def train(configuration: Configuration, scales: Sequence[float]) -> Curves:
        runs = {"seeds": tuple(range(seeds)), "scales": tuple(scales), "examples": examples}
        found = trainings.branch_curves(configuration, state=str(run.state_file), runs=runs)
        counted.append(found.counted)
        curves = found.curves
        whole = [all(curves[seed::seeds]) for seed in range(seeds)]
        if len(curves) != seeds * len(scales) or sum(whole) < FEWEST_SEEDS:
            raise TooLittleTime(kept=kept)
        return curves

    factors = {rule: factor_of(rule, configuration.update_size / run.baseline.update_size) for rule in RULES}
    try:
        before, after = train(run.baseline, [1.0]), train(configuration, list(factors.values()))
    except TrialFailed as failure:
        refuse_lost(failure, run)
        if failure.outcome is Outcome.TIMEOUT:
            raise TooLittleTime(kept=kept) from failure
        raise NotMeasured(failure.reason) from failure
    if counter := find_step_counter(*counted):
        raise NotMeasured(f"{NOT_COMPARABLE}{counter} counts steps, of which a larger batch has fewer")
    by_rule = {rule: after[place * seeds : (place + 1) * seeds] for place, rule in enumerate(factors)}
    return ContinuedTraining(
        after_steps=steps,
        examples=examples,
        baseline=tuple(map(tuple, before)),
        leader={rule: tuple(map(tuple, curves)) for rule, curves in by_rule.items()},
    )


def _branch_size(trainings: Trainings, leader: TrialRecord) -> tuple[int, int]:
    """Return how many seeds, and on how many examples each training trains, as the time allows. Raises NotMeasured."""
    baseline = trainings.run.records[0]
    seconds_per_example, starts = _branch_costs(baseline, leader)
    most, least = most_and_least(baseline, leader)
    planned, left = trainings.planned(), trainings.left()
    for seconds, seeds in ((planned, BRANCH_SEEDS), (planned, FEWEST_BRANCH_SEEDS), (left, FEWEST_BRANCH_SEEDS)):
        held = int((seconds - starts) / (seeds * seconds_per_example))
        if held >= least:
            return seeds, min(held, most) // least * least
    raise TooLittleTime(kept=left, needs=least_branch_seconds(baseline, leader))


def branch_seconds(baseline: TrialRecord, leader: TrialRecord) -> float:
    """Return the most seconds of comparing the learning of two configurations."""
    seconds_per_example, starts = _branch_costs(baseline, leader)
    most, _ = most_and_least(baseline, leader)
    return starts + BRANCH_SEEDS * most * seconds_per_example


def least_branch_seconds(baseline: TrialRecord, leader: TrialRecord) -> float:
    """Return the least seconds of comparing the learning of two configurations."""
    seconds_per_example, starts = _branch_costs(baseline, leader)
    return starts + FEWEST_BRANCH_SEEDS * most_and_least(baseline, leader)[1] * seconds_per_example


def most_and_least(baseline: TrialRecord, leader: TrialRecord) -> tuple[int, int]:
    """Return the examples of each training at most, and those of which it is a multiple.

    Then both have trained equally many at each probe, which is at least one update of either.
    """
    least = PROBES * max(map(batch_size_of, (baseline, leader)))
    return max(BRANCH_STEPS * batch_size_of(baseline), least), least


def _branch_costs(baseline: TrialRecord, leader: TrialRecord) -> tuple[float, float]:
    """Return the seconds per example and seed of all trainings together, and those of their starts."""
    both = (baseline, leader)
    own, others = (
        max(0.0 if record.throughput is None else 1 / record.throughput.value, STEP_SECONDS / batch_size_of(record))
        for record in both
    )
    starts = sum(record.start_seconds + (record.compile_seconds or 0.0) for record in both)
    return PROBING / FINISHING * (own + len(RULES) * others), starts


def batch_size_of(record: TrialRecord) -> int:
    """Return the examples of a step."""
    return int(record.configuration["batch_size"])
