"""Whether slices between which a trial is frozen show what one continuous stretch of the same process does.

    python benchmarks/freezing.py [--quick] [--json FILE]

Prints one table of ratios, frozen slices over continuous ones. First a pipeline that decodes JPEG images and is slower
than the training it feeds, with buffers of several sizes: they must not fill while another process has its turn. Each
leg is a slice after a pause, and three more that follow without one, a moment later. Then a pipeline that only waits,
for answers from elsewhere: they arrive while the process is frozen, which no freeze can help, so slices are faster than
the truth, the shorter the more. Stretches of either kind of measuring alternate, on the same two processes.
"""

import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import Figure, factor, parser, report

from autotune.data.record import Slice
from autotune.runtime.executor import Data
from autotune.runtime.local import TrialProcesses
from autotune.runtime.trial_process import TrialProcess
from autotune.script.loading import parse_reference
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.tuning.costs import SHORT_SLICE_SECONDS

WORKLOADS = Path(__file__).with_name("pipelines.py")
PREFETCHES: tuple[int | str, ...] = (0, 2, 8, 32, "autotune")
PREFETCHES_QUICK: tuple[int | str, ...] = (0, 32)
SLICE_SECONDS = SHORT_SLICE_SECONDS
"""The shortest that the tuner takes: what a pause gives or costs shows most in it."""
LEG_SLICES = 4
LEGS, LEGS_QUICK = 100, 6
"""Of each buffer, in as many fresh processes as `PROCESSES` says."""
PROCESSES, PROCESSES_QUICK = 2, 1
MOST_OFF = 0.03
WAITING_SLICES_SECONDS, WAITING_SLICES_SECONDS_QUICK = (0.25, 0.5, 1.0, 2.0), (0.25,)
STRETCH_SECONDS, STRETCH_SECONDS_QUICK = 6.0, 1.0
"""How long either kind of measuring of what waits lasts in a repeat: three of the longest slices."""
CONTINUOUS_SLICE_SECONDS = 0.5
WAITING_REPEATS, WAITING_REPEATS_QUICK = 8, 1
"""Of each length of slices, in as many fresh processes as `WAITING_PROCESSES` says."""
WAITING_PROCESSES, WAITING_PROCESSES_QUICK = 4, 1
PATIENCE_SECONDS = 120.0


class Pair:
    """Two processes of one workload that take turns: the one of interest, and its partner.

    Args:
        name: Of the workload.
        batch_size: Its.
        partner: What the partner runs.
        scratch: Where logs go.
    """

    def __init__(self, name: str, batch_size: int, partner: dict[str, Any], scratch: Path) -> None:
        self._batch_size = batch_size
        self._log = str(scratch / f"{name}.log")
        self._processes = TrialProcesses(parse_reference(f"{WORKLOADS}:{name}"), logs=scratch)
        self._processes.open()
        self._partner = self._launch(partner)

    def _launch(self, knobs: dict[str, Any]) -> TrialProcess:
        configuration = baseline_configuration(self._batch_size, knobs, Device.CPU, where="benchmark")
        trial = self._processes.launch(configuration, log=self._log, data=Data(examples=None, endless=True))
        trial.warm_up(PATIENCE_SECONDS)
        return trial

    def leg_ratios(self, knobs: dict[str, Any], legs: int) -> list[float]:
        """Logarithms of the rate of a leg's first slice, which a pause went before, over that of its others.

        Args:
            knobs: What the process of interest runs.
            legs: How many.
        """
        trial = self._launch(knobs)
        found = []
        for _ in range(legs):
            self._partner.measure(SLICE_SECONDS, PATIENCE_SECONDS)
            leg = trial.measure_continuously(SLICE_SECONDS, LEG_SLICES, PATIENCE_SECONDS)
            first, *others = (math.log(_examples_per_second([each])) for each in leg)
            found.append(first - statistics.fmean(others))
        trial.kill()
        return found

    def stretch_ratios(self, knobs: dict[str, Any], seconds: float, *, stretch: float, repeats: int) -> list[float]:
        """Logarithms of the rate of a stretch of frozen slices over that of a continuous one.

        Args:
            knobs: What the process of interest runs.
            seconds: Of a slice.
            stretch: Seconds that either stretch lasts.
            repeats: How many.
        """
        trial = self._launch(knobs)
        found = []
        for number in range(repeats):
            frozen_first = number % 2 == 0
            first = self._frozen(trial, seconds, stretch) if frozen_first else 0.0
            continuous = self._continuous(trial, stretch)
            found.append(math.log((first or self._frozen(trial, seconds, stretch)) / continuous))
        trial.kill()
        return found

    def _frozen(self, trial: TrialProcess, seconds: float, stretch: float) -> float:
        slices = []
        for _ in range(math.ceil(stretch / seconds)):
            self._partner.measure(seconds, PATIENCE_SECONDS)
            slices.append(trial.measure(seconds, PATIENCE_SECONDS))
        return _examples_per_second(slices)

    def _continuous(self, trial: TrialProcess, stretch: float) -> float:
        """The first slice is left out: the freeze before it may have given it something."""
        count = 1 + math.ceil(stretch / CONTINUOUS_SLICE_SECONDS)
        return _examples_per_second(trial.measure_continuously(CONTINUOUS_SLICE_SECONDS, count, PATIENCE_SECONDS)[1:])

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _examples_per_second(slices: Sequence[Slice]) -> float:
    return sum(each.examples for each in slices) / sum(each.seconds for each in slices)


def figures(quick: bool) -> dict[str, Figure]:
    """All figures of the table, by name, with their bars."""
    found: dict[str, Figure] = {}
    legs, processes = (LEGS_QUICK, PROCESSES_QUICK) if quick else (LEGS, PROCESSES)
    prefetches = PREFETCHES_QUICK if quick else PREFETCHES
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair("decoding", 32, {}, Path(folder))
        logs: dict[int | str, list[float]] = {prefetch: [] for prefetch in prefetches}
        for _ in range(processes):  # of all buffers in turn, so that a slow minute is in all of them
            for prefetch in prefetches:
                knobs = {"prefetch": prefetch, "num_parallel_calls": 2}
                logs[prefetch] += pair.leg_ratios(knobs, legs // processes)
        pair.close()
        for prefetch, ratios in logs.items():
            found[f"decodes, prefetch {prefetch}"] = factor(ratios, {"min": 1 - MOST_OFF, "max": 1 + MOST_OFF})
        found["decodes, all buffers"] = factor([each for ratios in logs.values() for each in ratios])
        knobs = {"prefetch": 8, "num_parallel_calls": 16, "data_threads": 16}
        pair = Pair("waiting", 4, knobs, Path(folder))
        lengths = WAITING_SLICES_SECONDS_QUICK if quick else WAITING_SLICES_SECONDS
        processes = WAITING_PROCESSES_QUICK if quick else WAITING_PROCESSES
        repeats = WAITING_REPEATS_QUICK if quick else WAITING_REPEATS
        stretch = STRETCH_SECONDS_QUICK if quick else STRETCH_SECONDS
        waits: dict[float, list[float]] = {seconds: [] for seconds in lengths}
        for _ in range(processes):  # of all lengths in turn, as above
            for seconds in lengths:
                waits[seconds] += pair.stretch_ratios(knobs, seconds, stretch=stretch, repeats=repeats // processes)
        pair.close()
        for seconds, ratios in waits.items():
            found[f"waits 200 ms, 16 in flight, slices of {seconds:g} s"] = factor(ratios)
    return found


def main() -> None:
    """Measure, print, and write."""
    arguments = parser(__doc__).parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # all of it is about processors
    report("freezing", figures(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
