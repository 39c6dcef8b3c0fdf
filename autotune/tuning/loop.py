"""The loop of a run: ask what to do next, do it, know more.

    while time is left and the answer is not settled:
        action = next_action(state)
        state = the standings after it

Measurements are in records, and the state follows from them. So a stopped run continues from its records.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from optuna.trial import Trial as OptunaTrial

from autotune.data.errors import MeasuringStoppedError, NoStableConfigurationError
from autotune.data.figures import Check
from autotune.data.printable import first_line
from autotune.data.record import ContinuedTraining, Outcome, Pairing, Phase, TrialRecord
from autotune.data.run_directory import EarlierLeader
from autotune.recipe.answer import how_soon
from autotune.runtime.executor import SeatLost
from autotune.space.changes import Context
from autotune.space.configuration import Configuration, find_conflict
from autotune.space.knobs import KNOBS, Stage
from autotune.space.space_file import ResolvedSpace
from autotune.stats.deciding import EndedBy
from autotune.stats.same_loss import NOT_REACHED
from autotune.tuning import costs
from autotune.tuning.candidates import INPUT_BOUND_SHARE, Proposals, describe_context, find_useful, neighbours
from autotune.tuning.confirmation import FreshPairs, LeaderTrials, leave_out
from autotune.tuning.events import Notice
from autotune.tuning.leaders import Leaders
from autotune.tuning.learning import (
    NotMeasured,
    Trainings,
    branch,
    compare_numerics,
    least_branch_seconds,
    numerics_of,
    plain_numerics,
)
from autotune.tuning.policy import (
    CONFIRM_TIME_FACTOR,
    ENOUGH_CANDIDATES,
    LEARNING_AGAIN_SHARE,
    Action,
    CompareLearning,
    CompareLosses,
    Confirm,
    End,
    FreshPair,
    GiveUp,
    LeaveOut,
    LookAgain,
    TryAnother,
    Wait,
    error_of,
    kept_for_learning,
    next_action,
)
from autotune.tuning.rules import changing_work, expected_in_force, known_to_fail, needs_as_long
from autotune.tuning.run import CLOSING_SECONDS, Interrupted, TimeIsUp
from autotune.tuning.sampler import Sampler
from autotune.tuning.seat import SameInForce, Seat, TrialLimits
from autotune.tuning.seats import (
    MOST_LOSSES,
    ExclusiveResources,
    FailingChanges,
    NoSeatLeft,
    Seats,
    find_failing_changes,
)
from autotune.tuning.standings import LearningResult, Standings, parity_checks
from autotune.tuning.state import State
from autotune.tuning.trial import Trial

CHECK_SHARE = 0.1  # of the budget: what comparing losses may take, all together
LEARNING_SHARE = 0.25  # the same for comparing how leaders with another batch size learn
ABLATION_SHARE = 0.2  # of the time spent so far: what leaving changes out of the recommended configuration may take
CATCH_UP_SHARE = 0.05  # of the time that is left: what writing an earlier invocation's trials to the study may take
LATEST_CANDIDATES = 5  # what another candidate takes is the median of so many
FAR_BELOW = math.log(0.6)  # log speed-up: a change this slow is not combined with others


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a run when it ends."""

    state: State
    ended_by: EndedBy
    confirmations: Mapping[int, LeaderTrials]  # of all leaders, by the numbers of their trials
    checks: Mapping[int, tuple[Check, ...]]
    learning: Mapping[int, LearningResult | str | None]  # see `Standings.learning_result`
    untried: tuple[str, ...] = ()  # knobs that could act, and that no time was left for


class Loop:
    """Asks for the next action and does it, until the run ends."""

    def __init__(
        self, seat: Seat, *, space: ResolvedSpace, sampler: Sampler, first: Mapping[Configuration, EarlierLeader]
    ) -> None:
        run, options, warm = seat.run, seat.run.options, seat.baseline.warm
        first_step, slow_call = warm.first_step_seconds, warm.ready.call_seconds if costs.is_slow(warm) else 0.0
        timeout = options.trial_timeout or costs.trial_timeout(
            options.budget,
            first_step=first_step,
            ready=warm.ready_seconds,
            slow_call=slow_call,
            is_eager="graph_step" in run.baseline,
        )
        measured = costs.measured_seconds(first_step, slow_call)
        self._run, self._sampler, self._options = run, sampler, options
        self._proposals = Proposals(space, sampler, first=list(first))
        self._seats = Seats(seat)
        self._failing: set[FailingChanges] = set()  # that were said to be left out
        self._lost: list[Configuration] = []  # whose seat was lost: they are run again
        self._exclusive = ExclusiveResources(run)
        self._problem = ""  # why another candidate would fail as well
        self._standings = standings = Standings(run, measured_seconds=measured, earlier=first)
        self._trial_limits = TrialLimits(
            timeout=timeout, measured=measured, known=lambda configuration: configuration in standings.tried()
        )
        self._leaders = Leaders(run, standings, FreshPairs(run, timeout=timeout))
        self._check_seconds = CHECK_SHARE * options.budget
        self._compared: int | None = None  # whose losses, or learning, are being compared
        # An earlier invocation may have lacked time, or a device.
        needs = CONFIRM_TIME_FACTOR * standings.forget_unmeasured_learning()
        share = max(LEARNING_SHARE * options.budget, min(needs, LEARNING_AGAIN_SHARE * options.budget))
        self._learning_seconds = share
        self._durations: list[float] = []
        self._all_tried = False  # each change that can act, by itself, or it is passed over
        self._time_is_up = False
        self._ended_by = EndedBy.BUDGET  # once the time is up
        sampler.catch_up(run.records.values(), seconds=CATCH_UP_SHARE * max(0.0, options.budget - run.clock()))

    def run(self) -> SearchResult:
        """Run until the answer is settled, or the time is over."""
        with self._seats:
            while True:
                try:
                    self._seats.wait_for_free()
                except NoSeatLeft:
                    return self._without_seats()
                state = self.state()
                action = next_action(state)
                if not self._time_is_up and (work := changing_work(self._run.records.values())) is not None:
                    self._stop_measuring(work.detail)
                if self._time_is_up:
                    action = Wait() if state.busy else End(self._ended_by)
                if isinstance(action, End):
                    return self._ended(state, action.by)
                alone = self._alone(action)
                if isinstance(action, Wait) or (alone and state.busy):
                    self._seats.wait()
                else:
                    number = getattr(action, "candidate", None) or getattr(action, "leader", None)
                    if isinstance(action, (CompareLosses, CompareLearning)):
                        self._compared = number
                    self._seats.run_action(partial(self._do, action), number, alone=alone)

    def _alone(self, action: Action) -> bool:
        """Return whether no other seat may work meanwhile: seats of a host share the cores that make the input."""
        executor = self._run.executor
        hosts = [executor.place(seat).host for seat in executor.seats]
        if not isinstance(action, FreshPair) or len(set(hosts)) == len(hosts):
            return False
        leader = self._standings.leader(action.leader)
        changed = leader.trial.configuration.differences(self._run.baseline)
        of_input = any(KNOBS[name].stage in (Stage.PIPELINE, Stage.OPTIONS) for name in changed if name != "batch_size")
        return of_input or (leader.search_record.input_wait_fraction or 0.0) > INPUT_BOUND_SHARE

    def _without_seats(self) -> SearchResult:
        """End the run with what it has."""
        run = self._run
        if not any(record.outcome.measured for record in run.records.values() if record.phase is not Phase.BASELINE):
            raise NoStableConfigurationError(
                "every seat was lost before a trial had ended",
                hint=f"See the notices above; --resume {run.directory.path} continues the run.",
            )
        run.observe(Notice(text="no seat is left; the run ends with the measurements so far"))
        return self._ended(self.state(), EndedBy.FAILED)

    def _ended(self, state: State, by: EndedBy) -> SearchResult:
        if by in (EndedBy.BUDGET, EndedBy.FAILED) and state.open_leaders:
            for leader in state.open_leaders:
                self._leaders.last_look(leader.number)
            state = self.state()
        leaders = {leader.trial.number: leader for leader in self._standings.leaders()}
        checks = {number: leader.trial.checks for number, leader in leaders.items()}
        learning = {number: self._standings.learning_result(leader) for number, leader in leaders.items()}
        return SearchResult(
            state=state,
            ended_by=by,
            confirmations=leaders,
            checks=checks,
            learning=learning,
            untried=self._untried() if by in (EndedBy.BUDGET, EndedBy.INTERRUPTED) else (),
        )

    def _untried(self) -> tuple[str, ...]:
        """Return the knobs that could act and that no trial has changed."""
        baseline, now = self._run.baseline, self._context(self._standings.best())
        tried = {name for known in self._standings.tried() for name in known.differences(baseline)}
        return tuple(name for name in find_useful(self._proposals.space, now, late=True) if name not in tried)

    def _do(self, action: Action, seat: Seat) -> None:
        try:
            match action:
                case TryAnother():
                    self._try_another(seat)
                case LookAgain(candidate=number):
                    self._run.announce(self._run.trials[number])
                    self._measure(self._run.trials[number], seat, remeasure=True)
                case CompareLosses(candidate=number):
                    self._compare_losses(self._run.trials[number], seat)
                case CompareLearning(leader=number):
                    self._compare_learning(number, seat)
                case Confirm(candidate=number):
                    seat.end_baseline(examine=False)
                    self._leaders.begin(self._run.trials[number], error=error_of(self.state().next_leader))
                case FreshPair(leader=number):
                    seat.end_baseline(examine=False)
                    state = self.state()
                    left = state.left - kept_for_learning(state, number)
                    self._leaders.measure_pair(number, seat=seat.name, left=left)
                case LeaveOut(leader=number, knob=knob):
                    seat.end_baseline(examine=False)
                    leave_out(
                        self._run,
                        self._standings.leader(number),
                        knob,
                        seat=seat.name,
                        limits=self._trial_limits,
                        spread=self._standings.spread(),
                        prior=self._standings.process_prior(),
                    )
                case GiveUp(leader=number):
                    self._leaders.give_up(number)
        except Interrupted:
            pass  # the state says so
        except TimeIsUp:
            self._time_is_up = True
        except NoStableConfigurationError as error:
            stands = isinstance(error, MeasuringStoppedError) or bool(self._standings.best_leaders())
            if self._seats.has_other_seats or not stands:
                raise
            self._stop_measuring(error.message)
        finally:
            if self._run.model_error is not None:
                raise self._run.model_error

    def _stop_measuring(self, why: str) -> None:
        """End the run with what was measured."""
        self._run.observe(Notice(text=f"{why}; the search ends here"))
        self._time_is_up, self._ended_by = True, EndedBy.FAILED

    # ---------------------------------------------------------------------------------------------- the state

    def state(self) -> State:
        """Return the current state."""
        run, options, standings = self._run, self._options, self._standings
        candidates = tuple(standings.candidates())
        baseline = run.records[0]
        ablations = math.fsum(record.seconds for record in run.records.values() if record.phase is Phase.ABLATION)
        limit = options.trials is not None and len(standings.searched()) >= options.trials
        candidate_seconds = costs.start_seconds(baseline) + self._trial_limits.measured
        if self._durations:
            candidate_seconds = statistics.median(self._durations[-LATEST_CANDIDATES:])
        return State(
            left=options.searching - CLOSING_SECONDS - run.clock(),
            budget=options.budget,
            keeps_budget=options.keeps_budget,
            candidates=candidates,
            leaders=tuple(map(standings.weigh_leader, standings.leaders())),
            spread=standings.spread(),
            candidate_seconds=candidate_seconds,
            first_pair_seconds=costs.pair_seconds([baseline, baseline]),
            more_candidates=bool(self._lost)
            or not (self._proposals.exhausted or self._proposals.nothing_fits or limit),
            exhausted=self._proposals.exhausted,
            all_tried=self._all_tried and not (self._lost or self._problem),
            check_seconds=self._check_seconds,
            learning_seconds=self._learning_seconds if standings.can_branch else 0.0,
            ablation_seconds=max(0.0, ABLATION_SHARE * run.now() - ablations),
            over_critical=standings.over_critical(),
            prior=standings.process_prior(),
            busy=self._seats.busy,
            compares_losses=self._compared in self._seats.busy,
            min_gain=options.min_gain,
            confirms_at_once=len(run.executor.seats),
            interrupted=run.interrupted(),
        )

    # ------------------------------------------------------------------------------------------- the actions

    def _try_another(self, seat: Seat) -> None:
        run, standings = self._run, self._standings
        if self._lost:
            configuration = self._lost.pop()
            optuna_trial = self._sampler.ask_for(configuration)
        else:
            proposed = self._propose(seat)
            if proposed is None:
                return
            if self._problem:
                self._stop_measuring(self._problem)
                return
            optuna_trial, configuration = proposed
        trial = run.new_trial(Phase.SEARCH, configuration)
        try:
            out_of_memory = [  # alone
                Configuration(record.configuration)
                for record in run.records.values()
                if record.outcome is Outcome.OOM and record.pairing is not Pairing.ALTERNATING
            ]
            if known_to_fail(configuration, out_of_memory):
                reason = "not run: a trial that needs no more memory ran out of memory"
                run.save_record(trial.record(Outcome.INFERRED_OOM, reason=reason))
            else:
                self._measure(trial, seat)
                again, self._problem = self._exclusive.judge(run.records[trial.number], seat)
                self._lost += again
                self._note_failing_change(run.records[trial.number])
        except SeatLost as lost:
            self._lose(trial, lost)
            raise
        except SameInForce as same:
            number = standings.tried()[same.configuration].number
            other = f"trial {number}" if number else "the baseline"
            run.observe(Notice(text=f"{run.changes(trial.requested)} is equivalent to {other}: skipped"))
        finally:
            ended = run.records.get(trial.number)
            if ended is None:
                del run.trials[trial.number]  # it does not run any more, and nothing is known of it
            else:
                self._sampler.tell(optuna_trial, ended)

    def _note_failing_change(self, record: TrialRecord) -> None:
        """Say once that a change is left out of the search because it fails."""
        for changes, last in find_failing_changes(self._run.records.values(), self._run.baseline).items():
            if last is record and changes not in self._failing:
                self._failing.add(changes)
                what = self._run.changes(self._run.baseline.replace(**dict(changes)))
                text = f"{what} is left out from now on: it fails in this training, as trial {record.trial} has"
                self._run.observe(Notice(text=f"{text} ({first_line(record.reason)})"))

    def _propose(self, seat: Seat) -> tuple[OptunaTrial, Configuration] | None:
        """Return the next configuration: the same training and any batch size in turn, the least useful last."""
        standings, space = self._standings, self._proposals.space
        ratios = [standings.batch_ratio(trial.requested) for trial in standings.searched()]
        same, others = ratios.count(1.0), len(ratios) - ratios.count(1.0)
        (is_ruled_out, is_skipped), tried = self._skip_rules(seat), standings.tried()
        changes = neighbours(space.baseline, space, self._context(standings.best()))
        before, self._all_tried = self._all_tried, all(known in tried or is_ruled_out(known) for known in changes)
        if self._all_tried and not before:
            return None  # that may be the end
        turns, sizes = [False], space.choices.get("batch_size", ())
        batch_varies = any(standings.batch_ratio(space.baseline.replace(batch_size=size)) != 1 for size in sizes)
        if batch_varies and len(ratios) >= len(self._proposals.first):
            baseline, most = self._run.records[0], LEARNING_AGAIN_SHARE * self._options.budget
            can_learn = standings.can_branch and least_branch_seconds(baseline, baseline) <= most
            for_each = 1 if can_learn else ENOUGH_CANDIDATES  # what cannot be compared in learning is not recommended
            turns = [True, False] if same < for_each * (others + 1) else [False, True]
        for last, of_same_training in itertools.product((False, True), turns):
            best = standings.best(of_same_training=of_same_training)
            proposed = self._proposals.next(
                tried,
                best.requested,
                context=self._context(best),
                observations=standings.observations(),
                is_skipped=is_skipped,
                batch_size=space.baseline.batch_size if of_same_training else None,
                last=last,
            )
            if proposed is not None:
                return proposed
        return None

    def _context(self, best: Trial) -> Context:
        records = self._run.records
        return describe_context(
            records[0],
            records[best.number],
            [records[trial.number] for trial in self._standings.ended()],
            units=self._run.machine.units,
            limits=self._run.limits,
            on_gpu=bool(self._run.gpus),
            measured_seconds=self._trial_limits.measured,
            import_seconds=self._run.import_seconds,
        )

    def _lose(self, trial: Trial, lost: SeatLost) -> None:
        """Run a trial again whose seat was lost; twice, and the trial is at fault."""
        losses = [
            record
            for record in self._run.records.values()
            if record.outcome is Outcome.INTERRUPTED
            and Configuration(record.asked or record.configuration) == trial.requested
        ]
        if len(losses) < MOST_LOSSES:
            self._lost.append(trial.requested)
            return
        reason = f"{len(losses)} seats were lost while it ran: {lost.reason}"
        self._run.save_record(trial.record(Outcome.CRASHED, reason=reason, log_tail=lost.log_tail))

    def _measure(self, trial: Trial, seat: Seat, *, remeasure: bool = False) -> None:
        began, standings = self._run.clock(), self._standings
        try:
            leader = None if remeasure else standings.best_interval(trial.configuration)
            seat.measure(trial, self._trial_limits, leader=leader, pooled_spread=standings.spread())
        finally:
            self._durations.append(self._run.clock() - began)

    def _timed_out(self) -> list[Configuration]:
        """Return what took too long, where calls are slow and none that computes as much was in time."""
        records = [record for record in self._run.records.values() if record.phase is not Phase.CONFIRM]
        in_time = [Configuration(record.configuration) for record in records if record.outcome.measured]
        late = [Configuration(record.configuration) for record in records if record.outcome is Outcome.TIMEOUT]
        if not costs.slow_call_seconds(self._run.records[0]):
            return []
        return [known for known in late if not any(needs_as_long(other, known) for other in in_time)]

    def _skip_rules(self, seat: Seat) -> tuple[Callable[[Configuration], bool], Callable[[Configuration], bool]]:
        """Return two predicates: is a configuration ruled out, and is it that or too long for the time left?"""
        # Ruled out: knobs that exclude one another, that do nothing, or with which it fails or does not learn.
        state, baseline = self.state(), self._run.records[0]
        parity, tried = parity_checks(self._run.records.values()), self._standings.tried()
        idle, timed_out = self._standings.idle_values(), self._timed_out()
        ruled_out = [*find_failing_changes(self._run.records.values(), self._run.baseline)]
        for candidate in [known for known in state.candidates if known.measured and known.ratio < FAR_BELOW]:
            changed = candidate.configuration.differences(self._run.baseline)
            ruled_out += [frozenset(changed.items())] if len(changed) == 1 else []
        gain = max([0.0, *(candidate.ratio for candidate in state.candidates if not candidate.unstable)])
        most = min(self._trial_limits.timeout, state.left)
        importing = self._run.import_seconds + 2 * state.candidate_seconds + 4 * state.first_pair_seconds

        def is_ruled_out(configuration: Configuration) -> bool:
            expected = expected_in_force(configuration, baseline)
            if expected != configuration and expected in tried:
                return True
            values = set(configuration.items())
            if idle & values or any(changes <= values for changes in ruled_out):
                return True
            if any(needs_as_long(configuration, late) for late in timed_out):
                return True
            check = parity.get(numerics_of(configuration))
            return bool(find_conflict(configuration)) or (check is not None and not check.passed)

        def is_skipped(configuration: Configuration) -> bool:
            if is_ruled_out(configuration) or costs.least_trial_seconds(baseline, configuration, gain) > most:
                return True
            return seat.imports_first(configuration) and state.left < importing

        return is_ruled_out, is_skipped

    def _compare_learning(self, number: int, seat: Seat) -> None:
        """Compare how a confirmed leader learns with how the baseline does, from the same state."""
        run, began, trial = self._run, self._run.clock(), self._run.trials[number]
        seat.end_baseline(examine=False)
        heading = f"comparing how fast losses fall: {run.changes(trial.configuration)}"
        taken = 0.0 if trial.branch is None else trial.branch.seconds
        again = self._standings.branch_of(trial.configuration) is not None
        ends = self._options.searching - CLOSING_SECONDS
        if not again and self._learning_seconds > 0:  # else nothing better is to be done with the time
            ends = min(run.clock() + self._learning_seconds, ends)
        try:
            with Trainings(run, seat=seat.name, ends=ends, heading=heading, again=again) as trainings:
                try:
                    found = branch(trainings, run.records[number])
                except NotMeasured as why:
                    found = ContinuedTraining(not_measured=str(why), needs_seconds=why.needs_seconds)
        finally:
            spent = run.clock() - began
            self._compared = None
            self._learning_seconds = max(0.0, self._learning_seconds - spent)
        self._standings.keep_branch(trial, found.model_copy(update={"seconds": taken + spent}))
        run.save_record(run.records[number].model_copy(update={"branch": trial.branch}), announce=False)
        run.observe(Notice(text=self._learning_in_words(number)))

    def _learning_in_words(self, number: int) -> str:
        """Say how much sooner a leader reaches the same losses, or why that is not known."""
        leader = self._standings.leader(number)
        size, result = leader.trial.configuration.update_size, self._standings.learning_result(leader)
        if result == NOT_REACHED:
            return f"batch size {size} does not reach the losses that the baseline reaches"
        if not isinstance(result, LearningResult):
            return f"how batch size {size} learns was not measured: {result}"
        sooner = result.speedup.ratio
        speedup = "much sooner or later" if sooner is None else how_soon(sooner)
        return f"batch size {size} reaches the same losses {speedup} (learning rate {result.needed.rule})"

    def _compare_losses(self, trial: Trial, seat: Seat) -> None:
        """See whether a leader learns as float32 without XLA does."""
        run, began = self._run, self._run.clock()
        seat.end_baseline(examine=False)
        plain = plain_numerics(run.baseline, batch_size=run.baseline.batch_size)["precision"]
        heading = f"comparing losses with {plain} without XLA: {run.changes(trial.configuration)}"
        ends = min(began + self._check_seconds, self._options.searching - CLOSING_SECONDS)
        try:
            with Trainings(run, seat=seat.name, ends=ends, heading=heading) as trainings:
                check = compare_numerics(trainings, trial.configuration)
        finally:
            self._compared = None
            self._check_seconds = max(0.0, self._check_seconds - (run.clock() - began))
        self._leaders.note_parity(trial, check)
