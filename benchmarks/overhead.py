"""What the tool itself costs: how soon a trial's first step comes, and where the wall time of a run goes.

    python benchmarks/overhead.py [--quick] [--json FILE]

Prints one table, of medians, each with the interval of the mean. Template and fresh interpreter start the same
workload's baseline in turn, within one run of this script; the other figures come from one real run of the tuner.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from figures import Bar, Figure, mean, parser, report

from autotune import tune
from autotune.data.record import Outcome, Phase, TrialRecord
from autotune.data.run_directory import RunDirectory
from autotune.runtime.executor import Data
from autotune.runtime.local import TrialProcesses
from autotune.runtime.protocol import Finished
from autotune.runtime.trial_process import TrialProcess
from autotune.script.loading import parse_reference
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.space.recorded import read_trials
from autotune.tuning.events import Event, TrialBegan, TrialEnded

WORKLOAD = Path(__file__).resolve().parent.parent / "examples" / "digits_mlp.py"
STARTS = 7
STARTS_QUICK = 2
BUDGET_SECONDS = 120
BUDGET_SECONDS_QUICK = 35


def first_steps(count: int, scratch: Path) -> dict[str, list[float]]:
    """Seconds from asking for a trial to its first step, both ways in turn."""
    reference = parse_reference(str(WORKLOAD))
    seconds: dict[str, list[float]] = {"template": [], "spawn": []}
    with (
        TrialProcesses(reference, logs=scratch) as forking,
        TrialProcesses(reference, logs=scratch, isolation="spawn") as spawning,
    ):
        facts = forking.open()
        spawning.open()
        data = None
        configuration = baseline_configuration(facts.batch_size, facts.baseline, Device.CPU, where="benchmark")
        for _ in range(count):
            for name, trials in (("template", forking), ("spawn", spawning)):
                trial = trials.launch(configuration, log=str(scratch / f"{name}.log"), data=data)
                warm = trial.warm_up(300)
                trial.kill()
                seconds[name].append(warm.first_step_seconds)
                data = Data.found_by(warm.started)
    return seconds


class Watch:
    """Notes how long each trial took as the tuner sees it, Optuna and files included."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.last = 0
        self.whole: dict[int, float] = {}

    def __call__(self, event: Event) -> None:
        """From one trial's announcement to the next one's."""
        if isinstance(event, TrialBegan):
            now = time.monotonic()
            if self.began is not None:
                self.whole[self.last] = now - self.began
            self.began, self.last = now, event.trial
        elif isinstance(event, TrialEnded) and event.record.phase is Phase.CONFIRM:
            self.began = None


def own_seconds(record: TrialRecord, whole: float) -> float:
    """A trial's wall time without building, tracing, compiling, warming up and slices."""
    slices = sum(pair.candidate.seconds + pair.baseline.seconds for pair in record.pairs)
    assert record.first_step_seconds is not None
    assert record.launch_seconds is not None
    training = record.first_step_seconds - record.launch_seconds + (record.warmup_seconds or 0.0)
    return whole - training - slices


def tuning(budget: float, scratch: Path) -> tuple[list[float], float, float, list[float]]:
    """One run: the tool's own seconds of each trial, the share of slices, and the run's wall time over its budget.

    And the share of each search trial's time that its closing figures take, by which its bottleneck is known.
    """
    watch = Watch()
    began = time.monotonic()
    closing: list[float] = []
    usual = TrialProcess.finish

    def timed_finish(self: TrialProcess, *given: Any, thorough: bool = False, **named: Any) -> Finished:
        asked = time.monotonic()
        found = usual(self, *given, thorough=thorough, **named)
        if not thorough:
            closing.append(time.monotonic() - asked)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialProcess, "finish", timed_finish)
        tune(str(WORKLOAD), budget=budget, out=scratch / "run", observe=watch)
    wall = time.monotonic() - began
    records = {record.trial: record for record in read_trials(RunDirectory(scratch / "run"))}
    own = [
        own_seconds(records[number], whole)
        for number, whole in watch.whole.items()
        if records[number].outcome is Outcome.OK and records[number].instances == 1 and records[number].pairs
        if records[number].phase is Phase.SEARCH
    ]
    timed = sum(
        pair.candidate.seconds + (pair.baseline.seconds if record.phase is not Phase.CONFIRM else 0.0)
        for record in records.values()
        for pair in record.pairs
    ) + sum(each.seconds for record in records.values() for each in record.slices)
    searched = [each.seconds for each in records.values() if each.phase is Phase.SEARCH]
    return own, timed / wall, wall / budget, [each / statistics.median(searched) for each in closing]


def figures(quick: bool) -> dict[str, Figure]:
    """All figures of the table, by name, with their bars."""
    with tempfile.TemporaryDirectory() as folder:
        starts = first_steps(STARTS_QUICK if quick else STARTS, Path(folder))
        own, share, spent, closing = tuning(BUDGET_SECONDS_QUICK if quick else BUDGET_SECONDS, Path(folder))
    ratios = [spawn / template for spawn, template in zip(starts["spawn"], starts["template"], strict=True)]
    return {
        "seconds to the first step, template": median(starts["template"]),
        "seconds to the first step, fresh interpreter": median(starts["spawn"]),
        "fresh interpreter / template": median(ratios, {"min": 4.0}),
        "the tool's own seconds per trial": median(own, {"max": 0.3}),
        "share of a trial's time for its closing figures": median(closing, {"max": 0.02}),
        "share of the run's wall time in timed slices": single(share),
        "wall time / budget": single(spent, {"max": 1.1}),
    }


def median(values: Sequence[float], bar: Bar | None = None) -> Figure:
    """The median, with Student's interval of the mean; none where a short run gave no values."""
    if not values:
        return single(None, bar)
    return mean(values, bar) | {"value": statistics.median(values)}


def single(value: float | None, bar: Bar | None = None) -> Figure:
    """A figure that was measured once, or not at all."""
    return {"value": value, "ci95": None, "bar": bar, "count": int(value is not None)}


def main() -> None:
    """Measure, print, and write."""
    arguments = parser(__doc__).parse_args()
    report("overhead", figures(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
