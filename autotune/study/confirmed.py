"""What the confirmation finds: of each finalist its interval, the verdict and the rules it passed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from autotune.measure import growth
from autotune.measure.continuous import FEWEST_LEGS, Soaked
from autotune.measure.deciding import Shortfall, Verdict
from autotune.measure.epoch_ends import Stalls, WholeEpoch, stalls_in
from autotune.measure.intervals import LogInterval
from autotune.measure.stability import (
    MEMORY_MARGIN,
    CallSeconds,
    Check,
    device_memory,
    hangs,
    host_memory,
    loss_does_not_rise,
    loss_is_finite,
    loss_scale_skips,
    no_retracing,
    slow_quantile,
    tail,
    together,
)
from autotune.space.configuration import Configuration
from autotune.study.running import Trial, ratio_interval
from autotune.trial.live import TrialFailed
from autotune.trial.record import Interval, Outcome, Pairing, Slice, TrialRecord
from autotune.trial.step_clock import WHOLE_EPOCH_CALLS


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that there are (`device_bytes` is None where no GPU is, or nothing tells), and the share to keep free."""

    host_bytes: int
    device_bytes: int | None
    margin: float = MEMORY_MARGIN


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """One finalist, confirmed.

    Args:
        configuration: Which.
        ratio: Logarithm of its speed-up: the claim; None when no instance was measured.
        verdict: Whether it is faster.
        checks: The stability rules, applied.
        record: Its record: all its instances together.
        in_search: Its speed-up in the search, which is no claim.
        in_slices: Logarithm of its speed-up in frozen slices, over instances; `ratio` where nothing contradicts it.
        soaked: What a continuous run showed; None where it had none.
        barred: Whether it needed one and had none, because another's had contradicted its slices.
        templates: Of how many freshly started templates its processes are forks.
        over_plain: Logarithm of its speed-up over float32 without XLA, over instances; None where that was not
            measured beside it.
    """

    configuration: Configuration
    ratio: LogInterval | None
    verdict: Verdict
    checks: tuple[Check, ...]
    record: TrialRecord
    in_search: Interval | None = None
    in_slices: LogInterval | None = None
    soaked: Soaked | None = None
    barred: bool = False
    templates: int = 0
    over_plain: LogInterval | None = None

    @property
    def replaced(self) -> bool:
        """Whether the claim is the continuous run's, because that contradicts the slices."""
        return self.soaked is not None and self.soaked.contradicts

    @property
    def stable(self) -> bool:
        """Whether it ran and passed every rule."""
        return self.record.outcome is Outcome.OK and all(check.passed for check in self.checks)

    @property
    def speedup(self) -> Interval | None:
        """The speed-up with its interval; None while unbounded."""
        return None if self.ratio is None else ratio_interval(self.ratio)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The baseline in float32 without XLA, measured in the confirmation as well.

    Args:
        record: Its record: all its instances together; None where it was not begun.
        ratio: Logarithm of its speed-up over the baseline, over instances; None where that was not measured.
        left_out: Why that was not measured; empty where it was.
    """

    record: TrialRecord | None = None
    ratio: LogInterval | None = None
    left_out: str = ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the confirmation found.

    Args:
        confirmed: The finalists, the fastest first.
        baseline: The baseline's record: all its instances together.
        instances: How many were measured.
        cut_short: Why a finalist that did not fail has no interval, where one has none.
        sufficient_budget: Seconds for a run in which there would have been time for enough instances.
        plain: The baseline in float32 without XLA; None where the baseline is that, or nobody asked.
        stopped: Whether there are fewer instances than the time held because the user stopped it.
    """

    confirmed: tuple[Confirmed, ...]
    baseline: TrialRecord
    instances: int
    cut_short: Shortfall = Shortfall.NO_TIME
    sufficient_budget: float | None = None
    plain: Plain | None = None
    stopped: bool = False

    @property
    def winner(self) -> Confirmed | None:
        """The fastest finalist that is faster and stable."""
        good = [each for each in self.confirmed if each.stable and each.verdict is Verdict.FASTER]
        return good[0] if good else None


def checks_of(record: TrialRecord, baseline: TrialRecord, limits: Limits) -> tuple[Check, ...]:
    """The stability rules, applied to a finalist's record beside the baseline's."""
    losses = [pair.candidate.loss for pair in record.pairs]
    checks = [
        loss_is_finite(losses),
        loss_does_not_rise(
            record.first_loss,
            record.last_loss,
            baseline_first=baseline.first_loss,
            baseline_last=baseline.last_loss,
        ),
    ]
    if record.peak_host_bytes is not None:
        checks.append(host_memory(record.peak_host_bytes, limits.host_bytes, margin=limits.margin))
        checks += _growth(
            growth.HOST, record, baseline, record.peak_host_bytes, limits.host_bytes, limits.margin
        )
    if record.peak_device_bytes is not None and limits.device_bytes:
        checks.append(device_memory(record.peak_device_bytes, limits.device_bytes, margin=limits.margin))
        checks += _growth(
            growth.DEVICE, record, baseline, record.peak_device_bytes, limits.device_bytes, limits.margin
        )
    if record.pairs:
        checks += _checks_of_slices(record, baseline)
    return tuple(checks)


def _growth(
    of: str, record: TrialRecord, baseline: TrialRecord, held_bytes: int, limit_bytes: int, margin: float
) -> list[Check]:
    """Whether memory of one kind grows; nothing of a finalist that was not timed."""
    if record.throughput is None:
        return []
    return [
        growth.memory_growth(
            _memory_of(record, of, candidate=True),
            _memory_of(record, of, candidate=False, alone=baseline),
            of=of,
            examples_per_second=record.throughput.value,
            held_bytes=held_bytes,
            limit_bytes=limit_bytes,
            margin=margin,
        )
    ]


def _memory_of(
    record: TrialRecord, of: str, *, candidate: bool, alone: TrialRecord | None = None
) -> list[list[tuple[float, float]]]:
    """By process: examples trained so far and memory held, at the end of each slice of a confirmation.

    Args:
        record: The finalist's, whose pairs hold the baseline's slices too.
        of: Whose memory, `growth.HOST` or `growth.DEVICE`.
        candidate: Whose slices are asked for.
        alone: The record that has the legs of the one asked for; `record` where None.
    """
    before_and_after = record.pairing is Pairing.BRACKETED and not candidate  # two processes of the baseline
    processes: dict[tuple[int, bool], list[Slice]] = {}
    for pair in record.pairs:
        process = (pair.instance, before_and_after and pair.baseline_first)
        processes.setdefault(process, []).append(pair.candidate if candidate else pair.baseline)
    return [_samples(each, of) for each in (*processes.values(), *_in_soaks(alone or record).values())]


def _samples(slices: Sequence[Slice], of: str) -> list[tuple[float, float]]:
    counted = accumulate(each.examples for each in slices)
    held = [each.host_bytes if of == growth.HOST else each.device_bytes for each in slices]
    return [
        (float(examples if each.trained_examples is None else each.trained_examples), float(memory))
        for examples, each, memory in zip(counted, slices, held, strict=True)
        if memory is not None
    ]


def _checks_of_slices(record: TrialRecord, baseline: TrialRecord) -> list[Check]:
    """The rules on what the slices show, each beside the baseline's of the same round.

    What stalls or hangs in the soak only is told so. What traces or compiles anew, and what skips steps, is asked of
    the slices alone: a single process cannot tell XLA's compiling for an epoch's smaller batches from more.
    """
    own, beside = (_by_process(record, candidate=each) for each in (True, False))
    boundary = max(record.epoch_overhead_seconds or 0.0, baseline.epoch_overhead_seconds or 0.0)
    calls, usual = _calls(own.values(), record), _calls(beside.values(), baseline)
    checks = [
        tail(list(chain(*calls)), list(chain(*usual))),
        hangs(list(chain(*calls)), list(chain(*usual)), boundary_seconds=boundary),
    ]
    if retraces := _sums(own, lambda each: each.retraces):
        checks.append(no_retracing(retraces, _sums(beside, lambda each: each.retraces) or [0]))
    if skipped := _sums(own, lambda each: each.skipped_steps):
        baseline_skipped = _sums(beside, lambda each: each.skipped_steps) or [0]
        checks.append(
            loss_scale_skips(
                skipped,
                _sums(own, lambda each: each.steps) or [],
                baseline_share=sum(baseline_skipped) / sum(_sums(beside, lambda each: each.steps) or [1]),
            )
        )
    in_soak = {each.name: each for each in _checks_of_soak(record, baseline, boundary) if not each.passed}
    return [in_soak.get(each.name, each) if each.passed else each for each in checks]


def _checks_of_soak(record: TrialRecord, baseline: TrialRecord, boundary: float) -> list[Check]:
    """Those that a continuous run can break, where either side had enough of it.

    A hang counts once a turn: in one, slices follow on one another, and a single burst reaches several.
    """
    if min(len(record.legs), len(baseline.legs)) < FEWEST_LEGS / 2:
        return []
    own, usual = (_calls([leg.slices for leg in each.legs], each) for each in (record, baseline))
    found = [
        tail(list(chain(*own)), list(chain(*usual))),
        hangs(
            [together(each) for each in own],
            [together(each) for each in usual],
            boundary_seconds=boundary,
            of="turns",
        ),
    ]
    return [replace(each, detail=f"in the continuous run: {each.detail}") for each in found]


def _calls(groups: Iterable[Sequence[Slice]], record: TrialRecord) -> list[list[CallSeconds]]:
    return [[_call_seconds(each, record) for each in slices] for slices in groups]


_Slices = Mapping[int, Sequence[Slice]]
"""By process."""


def stalls_of_baseline(beside: TrialRecord, baseline: TrialRecord) -> tuple[Stalls, int]:
    """What stalls at ends of epochs took of the baseline's undisturbed slices, and how many of those there are.

    Only slices of a single epoch tell which ended in one, and only epochs of more calls than it takes to tell an end
    from the others.

    Args:
        beside: The finalist's record, whose pairs hold those slices.
        baseline: The record of both configurations' other side. Where `tf.data` does not tune its pipeline, there are
            no slices.
    """
    calls = WHOLE_EPOCH_CALLS * int(baseline.configuration["steps_per_execution"])
    epochs = [
        WholeEpoch(seconds=pair.baseline.seconds, longest=_call_seconds(pair.baseline, baseline).longest)
        for pair in beside.pairs
        if pair.disturbed is None and pair.baseline.epochs == 1 and pair.baseline.steps > calls
    ]
    if not baseline.configuration["data_autotune"]:
        epochs = []
    return stalls_in(epochs), len(epochs)


def _call_seconds(each: Slice, record: TrialRecord) -> CallSeconds:
    steps, seconds = int(record.configuration["steps_per_execution"]), each.step_seconds
    slow = slow_quantile(
        p50=seconds.p50, p90=seconds.p90, p99=seconds.p99, boundaries=each.epochs * steps / each.steps
    )
    return CallSeconds(median=steps * seconds.p50, slow=steps * slow, longest=steps * seconds.max)


def _by_process(record: TrialRecord, *, candidate: bool) -> dict[int, list[Slice]]:
    """One side's slices of a finalist's pairs."""
    found: dict[int, list[Slice]] = {}
    for pair in record.pairs:
        found.setdefault(pair.instance, []).append(pair.candidate if candidate else pair.baseline)
    return found


def _in_soaks(record: TrialRecord) -> dict[int, list[Slice]]:
    """A record's slices of continuous runs."""
    found: dict[int, list[Slice]] = {}
    for leg in record.legs:
        found.setdefault(leg.instance, []).extend(leg.slices)
    return found


def _sums(slices: _Slices, count: Callable[[Slice], int | None]) -> list[int] | None:
    """Of each process the sum over its slices; None where one was not counted."""
    counts = [[count(each) for each in of_process] for of_process in slices.values()]
    if any(each is None for of_process in counts for each in of_process):
        return None
    return [sum(each or 0 for each in of_process) for of_process in counts]


def ended(trial: Trial, failure: TrialFailed | None, *, early: bool = False) -> TrialRecord:
    """A trial's record; one that was never begun says so.

    Args:
        trial: Which.
        failure: What ended it; None where nothing did.
        early: The confirmation goes on: this is what there is should the run end before.
    """
    if failure is not None:
        return trial.failed(failure)
    if early:
        return trial.record(Outcome.INTERRUPTED, reason="the run ended before its confirmation did")
    if not trial.pairs and not trial.slices:
        return trial.record(
            Outcome.INTERRUPTED,
            reason="not measured again: the budget ended, the baseline failed, or a process had no device, "
            "before its turn was over",
        )
    return trial.record(Outcome.OK)
