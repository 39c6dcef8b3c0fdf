"""Leave one change out of a confirmed leader, to see what that change gives. It claims nothing and decides nothing.

A fresh process of the leader and one of the leader without the change are compared like the two of a search trial.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from autotune.data.figures import Interval, LogInterval
from autotune.data.record import Ablation, Outcome, Phase, TrialRecord
from autotune.runtime.executor import DeviceUnavailable, SeatLost, TrialFailed
from autotune.runtime.protocol import Started
from autotune.space.configuration import Configuration, find_conflict, normalize, reset_idle
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import Stop, stop_measuring
from autotune.stats.intervals import CONFIDENCE, ProcessPrior, Spread, mean_interval
from autotune.tuning import costs
from autotune.tuning.comparison import Comparison, MeasuredProcess
from autotune.tuning.confirmation import LeaderTrials
from autotune.tuning.run import Deadline, Interrupted, Run, TimeIsUp
from autotune.tuning.seat import SearchSchedule, TrialLimits
from autotune.tuning.trial import Trial

FEWEST_CHANGES = 2  # what a single change gives is the claim itself
FEWEST_PAIRS = 2  # of slices, where the time was over: one has no spread


def without_change(configuration: Configuration, knob: str, baseline: Configuration) -> Configuration:
    """Return a configuration with the baseline's value of one knob, and of those that only act beside it."""
    return reset_idle(normalize(configuration.replace(**{knob: baseline[knob]}), {}), baseline)


def unmeasured_changes(
    leader: int, configuration: Configuration, baseline: Configuration, records: Iterable[TrialRecord]
) -> tuple[str, ...]:
    """Return the changes of a leader that can be left out of it and were not yet; none where it has only one."""
    # The configuration is as it was asked for: what other changes bring about cannot be left out alone.
    changes = configuration.differences(baseline)
    if len(changes) < FEWEST_CHANGES:
        return ()
    done = {record.ablation.knob for record in records if record.ablation and record.ablation.leader == leader}
    return tuple(
        knob
        for knob in changes
        if knob not in done and not find_conflict(without_change(configuration, knob, baseline))
    )


def leave_out(
    run: Run,
    leader: LeaderTrials,
    knob: str,
    *,
    seat: str,
    deadline: Deadline,
    limits: TrialLimits,
    spread: Spread,
    prior: ProcessPrior,
) -> TrialRecord:
    """Measure a leader without one of its changes beside the whole leader, and keep both records.

    Whatever fails is in the record. `spread` is that of other trials' pairs, `prior` that of fresh pairs of processes.
    """
    # Raises Interrupted, and SeatLost where there are several seats.
    whole = leader.trial.configuration
    reference = run.new_trial(Phase.ABLATION, whole)
    trial = run.new_trial(Phase.ABLATION, without_change(leader.asked, knob, run.baseline))
    trial.others = spread
    outcome, reason, log_tail = Outcome.OK, "", ""
    ended: Interrupted | SeatLost | None = None
    try:
        _compare(run, leader, reference, trial, knob, seat=seat, deadline=deadline, limits=limits)
    except (Interrupted, SeatLost) as why:
        ended, outcome, reason = why, Outcome.INTERRUPTED, "stopped before it was measured"
    except TimeIsUp:
        if len(trial.log_ratios) < FEWEST_PAIRS:
            outcome, reason = Outcome.INTERRUPTED, "the time was over"
    except TrialFailed as failure:
        outcome, reason, log_tail = failure.outcome, failure.whole, failure.log_tail
        if isinstance(failure, DeviceUnavailable):
            outcome = Outcome.INTERRUPTED  # it says nothing of the change
        elif failure.trial != trial.number:
            outcome, reason = Outcome.INTERRUPTED, f"the recommended configuration failed beside it: {failure.whole}"
    if reference.slices:
        run.keep(reference.record(Outcome.OK), announce=False)
    gain: Interval | None = None
    if outcome is Outcome.OK:
        measured = mean_interval(trial.log_ratios, others=trial.others)
        margin = max(measured.half_width, prior.half_width(1, CONFIDENCE))  # no narrower than one fresh pair tells
        value = -measured.value
        gain = LogInterval(value=value, low=value - margin, high=value + margin, count=1).ratio
    ablation = Ablation(knob=knob, leader=leader.trial.number, reference=reference.number, gain=gain)
    record = trial.record(outcome, reason=reason, log_tail=log_tail)
    record = run.keep(record.model_copy(update={"ablation": ablation, "speedup": None}))
    if ended is not None:
        raise ended
    return record


def _compare(
    run: Run,
    leader: LeaderTrials,
    reference: Trial,
    trial: Trial,
    knob: str,
    *,
    seat: str,
    deadline: Deadline,
    limits: TrialLimits,
) -> None:
    """Measure both sides in turns, or in blocks where memory does not hold both."""

    def note_in_force(started: Started) -> None:
        resolved = trial.configuration.replace(**{"jit_compile": started.jit_compile, **started.in_force})
        trial.configuration = reset_idle(resolved, run.baseline)

    def enough() -> Stop | None:
        return stop_measuring(trial.log_ratios, leader=None, others=trial.others)

    of_processes = (log.boundary for log in reversed(leader.trial.processes))
    known = next((found for found in of_processes if found is not None), leader.in_search.boundary)
    boundary = known or run.boundary
    process = partial(MeasuredProcess, run=run, deadline=deadline, seat=seat, start_timeout=limits.timeout)
    own = None if KNOBS[knob].structural else boundary
    whole = process(trial=reference, boundary=boundary)
    without = process(trial=trial, boundary=own, on_started=note_in_force)
    searched = [run.records[0], leader.in_search]
    waiting = [costs.most_waiting(record.own_slices, record.input_wait_fraction) for record in searched]
    schedule = SearchSchedule(
        run=run,
        trial=trial,
        process=without,
        baseline=whole,
        limits=limits,
        usual_length=costs.length_in_turns(*waiting, objective=run.objective),
        enough=enough,
    )
    comparison = Comparison(
        run=run,
        reference=whole,
        candidates=[without],
        schedule=schedule,
        in_blocks=leader.in_blocks,
        reference_alone=run.records[0].slices,
    )
    comparison.measure()
