"""Choose the next configuration: a combination, changes of the fastest one by their worth, then Optuna's samples.

The worth of a configuration is its expected gain per expected second; see `beliefs`. Every proposal is a
trial of the run's Optuna study, which gets its result. Values hardly worth a trial come last: see `find_useful`.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from optuna.trial import Trial

from autotune.data.models import KnobValue
from autotune.data.record import Slice, TrialRecord
from autotune.machine.fingerprint import units_for
from autotune.space.changes import Context
from autotune.space.configuration import Configuration, find_conflict
from autotune.space.knobs import KNOBS, Knob
from autotune.space.space_file import ResolvedSpace
from autotune.stats.disturbance import gpu_figures
from autotune.stats.same_loss import best_batch_size
from autotune.tuning.beliefs import NO_UNIT, Beliefs, Expectations, Features, Observations, find_unit, load_expectations
from autotune.tuning.costs import is_busy
from autotune.tuning.rules import Limits
from autotune.tuning.sampler import STARTUP_TRIALS, Sampler

MOST_REPEATS = 5  # samples in a row that are known or passed over, before configurations are drawn at random
MOST_DRAWN = 4096  # configurations drawn at random; a smaller space is gone through whole
MOST_OF_OTHERS = 2  # values of a knob without changes of its own, before the sampler has its turn
CLEAR_GAIN = 0.04  # log speed-up from which on a change joins the combination
MIN_Z_TO_COMBINE = 0.45  # standard deviations of it that a joining change must gain: it is faster in two of three cases
MOST_FAILURES = 0.15  # chance to fail of a change that joins
MOST_MEMORY = 0.9  # of what a trial may take, if memory grew with the batch size: more joins no combination
FAR_BATCH_FACTOR = 4.0  # times the batch size that should reach a loss soonest: samples of larger ones come last
LEAST_IMPROVEMENT = 0.02  # log speed-up to be expected of a change; for less, the sampler proposes

Changes = dict[str, KnobValue]
NOTHING_TRIED = Observations()
INPUT_BOUND_SHARE = 0.15  # share of its time waiting for input from which a training is limited by it
SHORT_STEP_SECONDS = 0.01  # a call into TensorFlow takes about 1 ms, which several steps may share
LAUNCH_STEP_SECONDS = 0.004  # the same is a quarter of a step, and limits the training
BUSY_GPU = 0.8  # share of the time in which a kernel runs: such a training hardly waits for input
COMPUTING_CORES = 0.5  # cores that a wait for input keeps busy: with fewer, it waits for a disk or a network
SATURATED_SHARE = 0.9  # share of the cores that others left free: who takes so much gains nothing by more threads
LEAST_LEFT = 0.3  # share of the cores: if others take more, they may only fill what a trial that waits leaves
SHORT_EPOCH = 0.02  # share of an epoch that passes between epochs


class Proposals:
    """Proposes configurations that were not tried: `first` those of earlier runs, later samples of the study."""

    def __init__(
        self,
        space: ResolvedSpace,
        sampler: Sampler,
        *,
        first: Sequence[Configuration] = (),
        table: Expectations | None = None,
    ) -> None:
        self.space = space
        self._sampler = sampler
        self.first = first
        self._table = load_expectations() if table is None else table
        self._features = Features(space)
        self.exhausted = self.nothing_fits = False  # nothing new is left, or nothing new fits into the time

    def next(
        self,
        tried: Collection[Configuration],
        best: Configuration,
        *,
        context: Context,
        observations: Observations = NOTHING_TRIED,
        is_skipped: Callable[[Configuration], bool] = lambda configuration: False,
        batch_size: int | None = None,
        last: bool = False,
    ) -> tuple[Trial, Configuration] | None:
        """Return the next configuration and its Optuna trial; None where nothing new is left, or fits.

        With a `batch_size` only configurations of it are proposed; only with `last` what comes last.
        """
        self.nothing_fits = False
        beliefs = Beliefs(self._features, context, self._table, observations)
        able, useful = (find_useful(self.space, context, late=late) for late in (True, False))
        if batch_size is not None and "batch_size" in useful:
            useful["batch_size"] = (batch_size,)
        known = {tuple(configuration[name] for name in able) for configuration in tried}
        far = far_batch(observations, self.space.baseline)

        def fits(configuration: Configuration) -> bool:
            return batch_size in (None, configuration.batch_size) and not is_skipped(configuration)

        def is_new(configuration: Configuration) -> bool:
            """Return whether it differs from what was tried by a knob that can act here."""
            return tuple(configuration[name] for name in able) not in known

        def order(configuration: Configuration) -> tuple[bool, bool, int]:
            changed = configuration.differences(best)
            acts = is_new(configuration) and all(value in able.get(name, ()) for name, value in changed.items())
            return not acts, configuration.batch_size > far, len(changed) if last else 0

        for configuration in self.first:
            if configuration not in tried and fits(configuration):
                return self._sampler.ask_for(configuration), configuration
        if not last:
            for configuration in self._promising(
                tried, best, beliefs, context, observations, lambda one: not fits(one)
            ):
                if is_new(configuration) and fits(configuration):
                    return self._sampler.ask_for(configuration), configuration
            for optuna_trial, wanted in self._samples(len(tried), best, beliefs, useful):
                useless = wanted.batch_size > far or beliefs.is_slower(wanted, best)
                if is_new(wanted) and not useless and fits(wanted):
                    return optuna_trial, wanted
                self._sampler.skip_sample(optuna_trial)
        drawn = self._drawn(len(tried), *((self.space.choices, self.space.baseline) if last else (useful, best)))
        left = [found for found in drawn if (found not in tried if last else is_new(found))]
        for configuration in sorted(left, key=order):
            if fits(configuration):
                return self._sampler.ask_for(configuration), configuration
        self.exhausted = last and not left and self.space.size <= MOST_DRAWN
        self.nothing_fits = last and not self.exhausted
        return None

    def _promising(
        self,
        tried: Collection[Configuration],
        best: Configuration,
        beliefs: Beliefs,
        now: Context,
        observations: Observations,
        is_skipped: Callable[[Configuration], bool],
    ) -> Iterator[Configuration]:
        """Yield the combination that is expected to be clearly faster, a larger batch, then changes by their worth."""
        space, own = self.space, self.space.baseline.batch_size
        combined, larger = combine(best, beliefs, space, now, is_skipped), list[Configuration]()
        if all(known.batch_size <= own for known in tried):
            able = [found for found in neighbours(best, space, now) if _fits_in_memory(found, space.baseline, now)]
            larger = [found for found in able if best.replace(batch_size=found.batch_size) == found != best]
            # With the known limits: the wait for input is known after the first trial.
            larger = [space.canonical(combined.replace(batch_size=found.batch_size)) for found in larger] + larger
        joined = len(tried) == 1 or combined.batch_size > own  # else a larger batch waits no longer
        yield from [combined, *larger] if joined else [*larger, combined]
        beginnings = dict.fromkeys([best, *observations.running[-1:], space.baseline])
        changed = {
            space.canonical(found)
            for beginning in beginnings
            for found in (
                *neighbours(beginning, space, now),
                *(beginning.replace(**{name: space.baseline[name]}) for name in beginning.differences(space.baseline)),
            )
        }
        fastest = max([best, *observations.running], key=lambda known: beliefs.gain(known, best)[0])  # as is expected
        improvements = {found: beliefs.improvement(found, fastest) for found in changed}
        doubtful = {found for found in changed if best == space.baseline and not beliefs.is_slower(found, best)}
        able = [found for found, gain in improvements.items() if gain >= LEAST_IMPROVEMENT or found in doubtful]
        able = [found for found in able if not find_conflict(found)]
        # Equal worth must not leave the order to a set's.
        yield from sorted(able, key=lambda found: (-improvements[found] / beliefs.seconds(found), found.key))

    def _samples(
        self, tried: int, best: Configuration, beliefs: Beliefs, useful: Mapping[str, tuple[KnobValue, ...]]
    ) -> Iterator[tuple[Trial, Configuration]]:
        """Yield samples of the useful values, by the expectations, later by Optuna's model."""
        draw = random.Random(tried)
        for _ in range(MOST_REPEATS):
            if tried < STARTUP_TRIALS:
                wanted = beliefs.draw(draw, best, useful)
                yield self._sampler.ask_for(wanted), wanted
                continue
            optuna_trial, sampled = self._sampler.ask()
            values = {name: sampled[name] for name, choices in useful.items() if sampled[name] in choices}
            wanted = self.space.canonical(best.replace(**values))
            if wanted != sampled:
                self._sampler.skip_sample(optuna_trial)
                optuna_trial = self._sampler.ask_for(wanted)
            yield optuna_trial, wanted

    def _drawn(
        self, seed: int, choices: Mapping[str, tuple[KnobValue, ...]], usual: Configuration
    ) -> Iterator[Configuration]:
        """Draw changes of a configuration at random: all of them where they are few."""
        draw = random.Random(seed)
        if math.prod(len(values) for values in choices.values()) <= MOST_DRAWN:
            every = list(itertools.product(*choices.values()))
            draw.shuffle(every)
        else:
            every = [tuple(draw.choice(values) for values in choices.values()) for _ in range(MOST_DRAWN)]
        for values in every:
            yield self.space.canonical(usual.replace(**dict(zip(choices, values, strict=True))))


def find_useful(space: ResolvedSpace, now: Context, *, late: bool = False) -> dict[str, tuple[KnobValue, ...]]:
    """Return the values of a space that can act, by knob; a knob without any other than the baseline's is left out.

    Values that are hardly ever faster count only with `late`: low precision without units for it, and batches below the
    baseline's.
    """

    def is_useful(knob: Knob, value: KnobValue) -> bool:
        can_act = type(value) is not int or value <= knob.most(now)
        is_smaller = knob.name == "batch_size" and int(value) < space.baseline.batch_size
        return can_act and (late or not (is_smaller or find_unit(knob.name, value, now.units) == NO_UNIT))

    found: dict[str, tuple[KnobValue, ...]] = {}
    for name, choices in space.choices.items():
        knob, own = KNOBS[name], space.baseline[name]
        values = tuple(value for value in choices if value == own or is_useful(knob, value))
        if len(values) > 1 and knob.useful(now):
            found[name] = values
    return found


def far_batch(observations: Observations, baseline: Configuration) -> float:
    """Return the batch size above which samples come last: far above the one that should reach a loss soonest.

    A step takes a time that is linear in the batch size. It is fitted to configurations that differ in nothing else;
    before there are two, nothing is far.
    """
    steps: dict[Configuration, dict[int, float]] = {}  # seconds by batch size, in those of an example of the baseline's
    for known, ratio in observations.ratios.items():
        others = known.replace(batch_size=baseline.batch_size)
        steps.setdefault(others, {})[known.batch_size] = known.batch_size * math.exp(-ratio)
    most = max(steps.values(), key=len, default={})
    if not observations.over_critical or len(most) < 2 or baseline.update_size != baseline.batch_size:
        return math.inf
    critical = baseline.batch_size / observations.over_critical
    return FAR_BATCH_FACTOR * max(baseline.batch_size, best_batch_size(critical, most))


def combine(
    best: Configuration,
    beliefs: Beliefs,
    space: ResolvedSpace,
    now: Context,
    is_skipped: Callable[[Configuration], bool] = lambda configuration: False,
) -> Configuration:
    """Add to the fastest configuration all changes that are clearly expected to gain; the same where none is.

    Knobs that it has changed already are left alone: their further steps are tried apart. So is a change with which the
    combination would be passed over, such as a batch whose steps the time does not hold.
    """
    changes: dict[Configuration, tuple[float, Changes]] = {}
    for wanted in _changes(best, space, now):
        if any(best[name] != space.baseline[name] for name in wanted):
            continue
        changed = space.canonical(best.replace(**wanted))
        mean, deviation = beliefs.gain(changed, best)
        fails = 1 - (1 - beliefs.failure(changed)) / max(1 - beliefs.failure(best), 1e-6)  # because of the change
        is_clear = mean >= max(CLEAR_GAIN, MIN_Z_TO_COMBINE * deviation) and fails <= MOST_FAILURES
        if is_clear and _fits_in_memory(changed, space.baseline, now):
            changes[changed] = mean, wanted
    combined = best
    for _, wanted in sorted(changes.values(), key=lambda found: -found[0]):
        if any(combined[name] != best[name] for name in wanted):
            continue  # a larger gain has changed this knob
        joined = space.canonical(combined.replace(**wanted))
        if find_conflict(joined) or is_skipped(joined):
            continue
        if all(joined[name] == combined[name] for name in combined if name not in wanted):
            combined = joined
    return combined


def _fits_in_memory(changed: Configuration, baseline: Configuration, now: Context) -> bool:
    """Return whether a larger batch should fit, if all memory grew with it."""
    growth = changed.batch_size / baseline.batch_size
    return now.memory_share is None or growth <= 1 or now.memory_share * growth <= MOST_MEMORY


def neighbours(best: Configuration, space: ResolvedSpace, now: Context) -> list[Configuration]:
    """Return the configurations that one change leads to, of the knobs that can act."""
    found = (space.canonical(best.replace(**changes)) for changes in _changes(best, space, now))
    return [changed for changed in dict.fromkeys(found) if changed != best]


def _changes(best: Configuration, space: ResolvedSpace, now: Context) -> Iterator[Changes]:
    """Yield the changes to values that are useful, or two other values of a knob that names none."""
    useful = find_useful(space, now)
    for name, choices in useful.items():
        knob = KNOBS[name]
        if not knob.changes:
            yield from ({name: value} for value in [value for value in choices if value != best[name]][:MOST_OF_OTHERS])
        for change in knob.changes:
            if (value := change.to(choices, best[name])) is not None:
                picks = {other: pick for other, pick in change.together.items() if other in useful}
                joined = {other: pick(useful[other], best[other]) for other, pick in picks.items()}
                yield {name: value, **{other: found for other, found in joined.items() if found is not None}}


# --------------------------------------------------------------------------------------- the context


def describe_context(
    baseline: TrialRecord,
    best: TrialRecord,
    others: Sequence[TrialRecord],
    *,
    units: Collection[str],
    limits: Limits,
    on_gpu: bool,
    measured_seconds: float,
    import_seconds: float,
) -> Context:
    """Return the context in which the next candidate is chosen; the other trials have the latest last."""
    cores = next((timed.cores for timed in baseline.own_slices if timed.cores), math.inf)
    # TensorFlow has a thread for each core, whatever the quota. Under one, slices do not tell what others take.
    has_quota = all(timed.foreign_cpu_seconds is None for timed in baseline.own_slices)
    sets_threads = any(baseline.configuration.get(f"{pool}_op_threads") for pool in ("intra", "inter"))
    short_steps = _usual_step(baseline) <= SHORT_STEP_SECONDS
    taken = (  # of the memory that it may take
        (max((part.host_bytes or 0 for part in baseline.own_slices), default=0), limits.host_bytes),
        (max((part.device_bytes or 0 for part in baseline.own_slices), default=0), limits.device_bytes or 0),
    )
    known = next((trial for trial in (best, *reversed(others)) if trial.input_wait_fraction is not None), None)
    return Context(
        on_gpu=on_gpu,
        units=units_for(units, on_gpu=on_gpu),
        waits_for_input=waits_for_input(known or best),
        may_wait=short_steps and known is None,
        most_calls=math.inf if known is None else most_calls(known),
        most_threads=cores if has_quota or sets_threads else cores - 1,
        short_steps=short_steps,
        launch_bound=_usual_step(baseline) <= LAUNCH_STEP_SECONDS,
        faults_often=best.faults_often,
        short_epochs=has_short_epochs(baseline),
        memory_share=max((used / limit for used, limit in taken if used and limit), default=None),
        start_seconds=baseline.start_seconds,
        measured_seconds=(baseline.warmup_seconds or 0.0) + measured_seconds,
        import_seconds=import_seconds,
    )


def _usual_step(record: TrialRecord) -> float:
    """Return the seconds of a step; 0 where none was timed."""
    return statistics.median([measured.step_seconds.p50 for measured in record.slices] or [0.0])


def has_short_epochs(record: TrialRecord) -> bool:
    """Return whether what lies between epochs takes much of them; False where that is not known."""
    if record.timed_by == "epochs":
        return True
    overhead, examples = record.epoch_overhead_seconds, record.examples_per_epoch
    if not overhead or not examples or record.throughput is None:
        return False
    return overhead >= SHORT_EPOCH * examples / record.throughput.value


def waits_for_input(record: TrialRecord) -> bool:
    """Return whether a trial waits for input, as was measured, or as what it leaves idle tells."""
    if record.input_wait_fraction is not None:
        return record.input_wait_fraction > INPUT_BOUND_SHARE
    gpu = gpu_figures(record)["gpu_utilisation"]
    is_idle = not is_busy(record.own_slices) and share_taken(record.own_slices) < SATURATED_SHARE
    return is_idle and (gpu is None or gpu < BUSY_GPU)


def share_taken(slices: Sequence[Slice]) -> float:
    """Return the share that a trial takes of what others leave of its cores; 0 where that is not known."""
    offered = sum((part.cores or 0) * part.seconds for part in slices)
    free = max(LEAST_LEFT * offered, offered - sum(part.foreign_cpu_seconds or 0.0 for part in slices))
    return sum(part.cpu_seconds for part in slices if part.cores) / free if free else 0.0


def most_calls(record: TrialRecord) -> float:
    """Return how many parallel calls can make the input faster: 1 if it takes all cores, no limit if it only waits."""
    waits, cores = record.input_wait_fraction, next((part.cores for part in record.own_slices if part.cores), None)
    if not waits or cores is None:
        return math.inf
    taken = share_taken(record.own_slices)
    # While it does not wait, a step takes all that is free at most: the rest is the input's.
    computes = cores * (taken - 1 + waits) / waits
    if computes < COMPUTING_CORES:
        return math.inf
    return 1 if taken >= SATURATED_SHARE else math.ceil(cores / min(1.0, computes))
