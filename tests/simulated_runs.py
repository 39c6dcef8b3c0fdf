"""Whole runs of the tuner on simulated trials: what the tests of the study share."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from pathlib import Path

from simulated import SimulatedTrials

from autotune.data.facts import Gpu, Machine, WorkloadFacts, WorkloadReference
from autotune.data.figures import Interval, LogInterval
from autotune.data.options import Options
from autotune.data.record import (
    InterimAnalysis,
    Outcome,
    Pair,
    Pairing,
    Phase,
    Slice,
    Standing,
    StepSeconds,
    TrialRecord,
)
from autotune.data.run_directory import RunDirectory, RunRecord
from autotune.runtime.executor import WarmUp
from autotune.runtime.protocol import Ready, Started
from autotune.space.configuration import Configuration, baseline_configuration, read_trials
from autotune.space.knobs import Device
from autotune.space.space_file import SearchSpace
from autotune.stats.intervals import Spread, claim_interval, overall_log_ratios, process_prior
from autotune.tuning import costs
from autotune.tuning.confirmation import FreshPairs, LeaderTrials, SlicePlan
from autotune.tuning.earlier_runs import read_earlier
from autotune.tuning.events import silent
from autotune.tuning.rules import Limits
from autotune.tuning.run import Deadline, Invocation, Run
from autotune.tuning.seat import Seat, TrialLimits
from autotune.tuning.state import Candidate, Leader, State
from autotune.tuning.tune import tune_with

BATCH_SIZE = 32
FACTS = WorkloadFacts(
    name="simulated",
    batch_size=BATCH_SIZE,
    baseline={},
    batched=False,
    drop_remainder=False,
    takes_config=True,
    validates=False,
    fingerprint="sha256:00",
)
MACHINE = Machine(
    cpu="simulated",
    cores=2,
    memory_bytes=8 << 30,
    platform="Linux x86_64",
    python="3.11.7",
    packages={"tensorflow": "2.21.0", "keras": "3.14.0"},
    gpus=(),
    driver=None,
    cuda=None,
    cudnn=None,
)
A100 = Gpu(name="NVIDIA A100", memory_bytes=40 << 30, compute_capability="8.0")
LIMITS = Limits(host_bytes=8 << 30, device_bytes=None)
REFERENCE = WorkloadReference(file="/simulated.py")
BASELINE = baseline_configuration(BATCH_SIZE, {}, Device.CPU, where="baseline")
BASELINE = BASELINE.replace(jit_compile=False, keep_freed_memory="none")


def space(**knobs):
    """The text of a search space: of lists of choices, and of pairs of bounds that powers of two lie between."""
    tables = ["schema_version = 1"]
    for name, values in knobs.items():
        kind = '"power_of_two"' if isinstance(values, tuple) else '"categorical"'
        bounds = dict(zip(("low", "high"), values, strict=True)) if isinstance(values, tuple) else {"choices": values}
        written = (f"{key} = {json.dumps(value)}" for key, value in bounds.items())
        tables += [f"[knobs.{name}]", f"kind = {kind}", *written]
    return "\n".join([*tables, ""])


SMALL_SPACE = space(batch_size=(16, 512), jit_compile=[False, True], steps_per_execution=[1, 8])
GROWING_SPACE = space(batch_size=(32, "memory"), jit_compile=[False, True])


def space_of(text=SMALL_SPACE, *, baseline=BASELINE, examples=1437, device=Device.CPU):
    """A search space as written, resolved for a simulated machine of two cores."""
    written = SearchSpace.parse(text, source="test.toml")
    return written.resolve(baseline=baseline, device=device, cores=2, examples=examples, dataset_takes_config=True)


def flat(configuration):
    """Every configuration trains 4,000 examples a second."""
    return 4000.0


def faster_by(**factors):
    """Speeds of 4,000 examples a second, times a factor for each knob that has left the baseline."""

    def samples_per_second(configuration):
        changed = set(configuration.differences(BASELINE)) & set(factors)
        return 4000.0 * math.prod(factors[name] for name in changed)

    return samples_per_second


def simulated_trials(samples_per_second=flat, **settings):
    """Simulated trials of the test's workload."""
    return SimulatedTrials(facts=FACTS, samples_per_second=samples_per_second, **settings)


class DirectoryWithoutStudy(RunDirectory):
    """A run directory whose Optuna study stays in memory."""

    def __init__(self, path):
        super().__init__(path)
        self.study_file = None


class MemoryDirectory(DirectoryWithoutStudy):
    """A run directory that keeps its records in memory, too: hundreds of runs need no disk."""

    def __init__(self, path):
        super().__init__(path)
        self.record = None
        self.trials = {}

    def write_run(self, record):
        """Keep the run's record."""
        self.record = record

    def read_run(self):
        """The run's record."""
        return self.record

    def prepare_trial(self, trial):
        """Nothing to make."""
        return self.trial_directory(trial)

    def write_trial(self, record):
        """Keep a trial's record."""
        self.trials[record.trial] = record


class Watcher:
    """An observer that remembers every event, and calls a function at each."""

    def __init__(self, react=lambda event: None):
        self.events = []
        self.react = react

    def __call__(self, event):
        """Remember the event."""
        self.events.append(event)
        self.react(event)

    def of(self, kind):
        """The events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


@contextlib.contextmanager
def on_disk(path, kind=RunDirectory):
    """A run directory that exists, with a run.json in it."""
    directory = kind(path)
    directory.create()
    try:
        yield with_run(directory)
    finally:
        directory.release()


def with_run(directory):
    """The directory, with a run.json as `tune` writes it first."""
    directory.write_run(
        RunRecord(run=directory.name, started_at="2026-11-20T19:10:01.250+00:00", machine=MACHINE, arguments={})
    )
    return directory


def tune_simulated(
    trials,
    directory,
    /,
    *,
    space=SMALL_SPACE,
    observe=silent,
    machine=MACHINE,
    earlier=None,
    spent_before=0.0,
    results=None,
    begin_with=None,
    **options,
):
    """One whole run on simulated trials and their clock; returns its recipe."""
    invocation = an_invocation(
        trials,
        directory,
        machine=machine,
        observe=observe,
        earlier=earlier,
        spent_before=spent_before,
        results=results,
        begin_with=begin_with,
        **{"budget": 300.0, **options},
    )
    return tune_with(invocation, SearchSpace.parse(space, source="test.toml"))


def an_invocation(
    trials,
    directory,
    /,
    *,
    machine=MACHINE,
    observe=silent,
    earlier=None,
    spent_before=0.0,
    results=None,
    begin_with=None,
    **options,
):
    """What an invocation on simulated trials works with; samples per second count unless another objective is given."""
    return Invocation(
        executor=trials,
        directory=directory,
        machine=machine,
        limits=LIMITS,
        reference=REFERENCE,
        options=Options(**{"objective": "throughput", **options}),
        clock=trials.clock,
        observe=observe,
        earlier=earlier,
        spent_before=spent_before,
        results=results,
        begin_with=begin_with,
    )


def records_of(directory):
    """Every record of a run on disk."""
    return list(read_trials(RunDirectory(directory.path)))


def leaders_of(records):
    """The records of what was confirmed, in order."""
    return [record for record in records if record.looks]


def go_on(trials, path, /, *, kind=DirectoryWithoutStudy, **options):
    """Another invocation of a run on disk, with as much more time as is given; returns its recipe."""
    directory = kind(path)
    earlier = read_earlier(directory)
    spent = earlier.spent_seconds
    with directory.reopen():
        return tune_simulated(trials, directory, earlier=earlier, spent_before=spent, **options)


def quick_tune(trials, path, /, **options):
    """One whole run that writes nothing but its recipe; returns recipe and directory."""
    path.mkdir(parents=True, exist_ok=True)
    directory = with_run(MemoryDirectory(path))
    return tune_simulated(trials, directory, **options), directory


def run_on(trials, path, *, observe=silent, interruptions=lambda: 0, seed=0):
    """What the phases of one run share, its records in memory."""
    invocation = an_invocation(trials, MemoryDirectory(Path(path)), observe=observe, budget=1e6, seed=seed)
    return Run(
        **vars(invocation),
        interruptions=interruptions,
        facts=FACTS,
        deadline=Deadline(clock=trials.clock),
        baseline=BASELINE.replace(jit_compile="auto"),
    )


FAST = BASELINE.replace(jit_compile=True)


class Searching:
    """A run whose baseline is warm, with candidates beside it.

    `left` is the time that its waits have from then on, and `settings` are of the run.
    """

    def __init__(
        self, path, trials, *, bracketed=False, left=math.inf, baseline_seconds=600.0, open_first=True, **settings
    ):
        if open_first:
            trials.open()
        self.trials = trials
        self.run = run_on(trials, path, **settings)
        self.run.deadline = Deadline(clock=trials.clock, at=trials.clock() + 2 * baseline_seconds)
        self.seat = Seat(self.run, name="simulated", bracketed=bracketed)
        self.seat.start_baseline(baseline_seconds)
        self.run.deadline = Deadline(clock=trials.clock, at=trials.clock() + left)

    def measure(
        self, configuration=FAST, *, trial=None, seconds=4.0, timeout=30.0, leader=None, pooled_spread=None, **limited
    ):
        """Measure a candidate, or a trial again; returns trial and record."""
        trial = trial or self.run.new_trial(Phase.SEARCH, configuration)
        limits = TrialLimits(timeout=timeout, measured=seconds, **limited)
        return trial, self.seat.measure(trial, limits, leader=leader, pooled_spread=pooled_spread)

    def lose_the_baseline(self):
        """Its process dies while nobody looks."""
        lose(self.seat.baseline.live)


class Fresh:
    """A leader's confirmation: what the search has found of it, and fresh pairs of processes."""

    def __init__(self, path, trials, configuration=FAST, *, champion=None, pairing=None, left=math.inf, **settings):
        searching = Searching(path, trials, bracketed=pairing is Pairing.BRACKETED, **settings)
        self.trials, self.run = trials, searching.run
        found = [searching.measure(each, timeout=600.0)[1] for each in (configuration, champion) if each is not None]
        searching.seat.end_baseline()
        self.records = [self.run.records[0], *found]
        self.left, self.before = left, len(trials.launched)
        self.began = trials.clock()
        sides = [self.run.baseline, configuration, champion]
        reference, trial, other = (None if side is None else self.run.new_trial(Phase.CONFIRM, side) for side in sides)
        self.confirmation = LeaderTrials(reference=reference, trial=trial, best_leader=other, search_record=found[0])
        self.run.deadline = Deadline(clock=trials.clock, at=trials.clock() + left)
        self.pairs = FreshPairs(self.run, timeout=60.0)

    @property
    def record(self):
        """The leader's."""
        return self.confirmation.record()

    @property
    def launched(self):
        """The processes of the confirmation."""
        return self.trials.launched[self.before :]

    def measure(self, count=1, *, rounds=None, most_seconds=None):
        """Measure so many more pairs, of as many rounds as are given or usual; returns the log-ratios of all."""
        seconds = costs.slices_seconds(self.records) if rounds is None else 1000.0
        limits = {"most_seconds": most_seconds or costs.MOST_SLICES_SECONDS, "most_rounds": rounds or costs.MOST_ROUNDS}
        plan = SlicePlan(seconds=min(seconds, most_seconds or 1000.0), **limits)
        for _ in range(count):
            self.pairs.measure(self.confirmation, plan, seat="simulated")
        return self.confirmation.instances

    def interval(self, confidence=0.95):
        """What they show, as a logarithm."""
        processes = self.confirmation.instances
        prior = process_prior([[values] for values in processes], rounds=min(map(len, processes)))
        return claim_interval(processes, prior=prior, confidence=confidence)


def lose(live):
    """A simulated process dies while nobody looks."""
    live._trials.orphaned.add(live)
    live.kill()


# ------------------------------------------------------------------------------------- what a run knows


def a_candidate(number, gain=0.0, *, pairs=8, **fields):
    """A candidate that looks so much faster than the baseline, as a share."""
    fields = {"configuration": BASELINE, "look_seconds": 5.0, "pair_seconds": 10.0, **fields}
    return Candidate(number=number, ratio=math.log1p(gain), pairs=pairs, **fields)


def a_leader(candidate, *, low=None, high=None, most=12, standing=Standing.OPEN, number=90, **fields):
    """A leader; with bounds, its claim lies in the middle of them."""
    ratio = None
    if low is not None:
        bounds = math.log1p(low), math.log1p(high)
        ratio = LogInterval(value=sum(bounds) / 2, low=bounds[0], high=bounds[1], count=4)
    looks = InterimAnalysis(
        leader=1, candidate=candidate, error=0.025, most=most, reference=number + 1, standing=standing
    )
    fields = {"processes": 0, "pair_seconds": 10.0, "least_pair_seconds": 8.0, **fields}
    return Leader(number=number, candidate=candidate, looks=looks, ratio=ratio, **fields)


def a_state(*candidates, left=100.0, **fields):
    """What a run knows in which another candidate takes 5 s, and a fresh pair of processes 10 s."""
    usual = {"budget": 300.0, "spread": Spread(deviation=0.05, degrees=30)}
    costs = {"candidate_seconds": 5.0, "first_pair_seconds": 10.0}
    return State(left=left, candidates=tuple(candidates), **{**usual, **costs, **fields})


# ------------------------------------------------------------------------------------------------- records

_numbers = itertools.count(1)


def a_slice(rate=4000.0, *, seconds=0.5, epochs=0, loss=2.0):
    """A slice of so many examples a second."""
    examples = round(rate * seconds)
    step = StepSeconds(p50=0.01, p90=0.01, p99=0.01, max=0.01)
    return Slice(
        seconds=seconds,
        steps=max(1, examples // BATCH_SIZE),
        examples=examples,
        epochs=epochs,
        cpu_seconds=seconds,
        step_seconds=step,
        loss=loss,
    )


def a_warm_up(*, examples=1437, call_seconds=0.01, epoch_seconds=0.36, overhead=None, run_in=0.0):
    """The warm-up of a trial that is timed by epochs, or by steps with `epoch_seconds=None`."""
    return WarmUp(
        started=Started(
            jit_compile=False, examples=examples, examples_per_epoch=examples, endless=examples is None, element="test"
        ),
        ready=Ready(
            timed_by="epochs" if epoch_seconds else "steps",
            settled=True,
            warmup_seconds=0.4,
            compile_seconds=0.5,
            epoch_overhead_seconds=overhead,
            call_seconds=call_seconds,
            epoch_seconds=epoch_seconds,
            run_in_seconds=run_in,
        ),
        launch_seconds=0.01,
        first_step_seconds=1.5,
        ready_seconds=2.0,
        first_loss=2.3,
    )


def a_record(configuration=BASELINE, *, speedup=None, spread=0.02, **fields):
    """A trial's record; a speed-up without an interval has one of ±`spread`."""
    if isinstance(speedup, float | int):
        speedup = Interval(value=speedup, low=speedup * (1 - spread), high=speedup * (1 + spread))
    return TrialRecord(
        **{
            "trial": next(_numbers),
            "phase": Phase.SEARCH,
            "configuration": dict(Configuration(configuration)),
            "outcome": Outcome.OK,
            "started_at": "2026-11-20T19:10:01.250+00:00",
            "seconds": 3.0,
            "speedup": speedup,
            **fields,
        }
    )


def log_ratios_of(pairs):
    """What an interval is made of: each pair's influence, around the ratio of all examples over all the time."""
    return overall_log_ratios(
        *([(each.examples / each.seconds, each.examples) for each in side] for side in sides_of(pairs))
    )


def sides_of(pairs):
    """The baseline's slices, and the candidate's."""
    return [pair.baseline for pair in pairs], [pair.candidate for pair in pairs]


def a_pair(speedup=1.0, **fields):
    """Two neighbouring slices whose speeds have this ratio."""
    return Pair(baseline_first=True, baseline=a_slice(), candidate=a_slice(4000.0 * speedup), **fields)
