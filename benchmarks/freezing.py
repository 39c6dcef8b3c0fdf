"""Whether slices between which a trial is frozen show what one continuous stretch of the same process does.

    python benchmarks/freezing.py [--quick] [--json FILE]

Prints one table of ratios, frozen slices over continuous ones. First a pipeline that decodes JPEG images and is slower
than the training it feeds, with buffers of several sizes: they must not fill while another process has its turn. Then
one that only waits, for answers from elsewhere: they arrive while the process is frozen, which no freeze can help, so
slices are faster than the truth, the shorter the more. Both kinds of measuring alternate, on the same two processes.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.machine import fingerprint
from autotune.measure.intervals import mean_interval
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.trial.live import Data
from autotune.trial.process import TrialProcess, TrialProcesses
from autotune.trial.record import Slice
from autotune.workload import parse_reference

WORKLOADS = Path(__file__).with_name("pipelines.py")
PREFETCHES: tuple[int | str, ...] = (0, 2, 8, 32, "autotune")
PREFETCHES_QUICK: tuple[int | str, ...] = (0, 32)
SLICE_SECONDS = 0.5
WAITING_SLICES_SECONDS, WAITING_SLICES_SECONDS_QUICK = (0.25, 0.5, 1.0, 2.0), (0.25,)
STRETCH_SECONDS, STRETCH_SECONDS_QUICK = 2.0, 1.0
"""How long either kind of measuring lasts in a repeat."""
REPEATS, REPEATS_QUICK = 5, 2
WAITING_REPEATS, WAITING_REPEATS_QUICK = 2, 1
PATIENCE_SECONDS = 120.0


class Pair:
    """Two processes of one workload that take turns: the one of interest, and its partner.

    Args:
        name: Of the workload.
        batch_size: Its.
        partner: What the partner runs.
        stretch: Seconds that either kind of measuring lasts in a repeat.
        scratch: Where logs go.
    """

    def __init__(
        self, name: str, batch_size: int, partner: dict[str, Any], stretch: float, scratch: Path
    ) -> None:
        self._batch_size = batch_size
        self._stretch = stretch
        self._log = str(scratch / f"{name}.log")
        self._processes = TrialProcesses(parse_reference(f"{WORKLOADS}:{name}"), logs=scratch)
        self._processes.open()
        self._partner = self._launch(partner)

    def _launch(self, knobs: dict[str, Any]) -> TrialProcess:
        configuration = baseline_configuration(self._batch_size, knobs, Device.CPU, where="benchmark")
        trial = self._processes.launch(configuration, log=self._log, data=Data(examples=None, endless=True))
        trial.warm_up(PATIENCE_SECONDS)
        return trial

    def ratios(self, knobs: dict[str, Any], seconds: float, repeats: int) -> list[float]:
        """Logarithms of frozen slices' throughput over the continuous one's.

        Args:
            knobs: What the process of interest runs.
            seconds: Of a slice.
            repeats: How many.
        """
        trial = self._launch(knobs)
        found = []
        for number in range(repeats):
            frozen_first = number % 2 == 0
            first = self._frozen(trial, seconds) if frozen_first else 0.0
            continuous = self._continuous(trial)
            found.append(math.log((first or self._frozen(trial, seconds)) / continuous))
        trial.kill()
        return found

    def _frozen(self, trial: TrialProcess, seconds: float) -> float:
        slices = []
        for _ in range(math.ceil(self._stretch / seconds)):
            self._partner.measure(seconds, PATIENCE_SECONDS)
            slices.append(trial.measure(seconds, PATIENCE_SECONDS))
        return _examples_per_second(slices)

    def _continuous(self, trial: TrialProcess) -> float:
        """The first slice is left out: the freeze before it may have given it something."""
        count = 1 + math.ceil(self._stretch / SLICE_SECONDS)
        return _examples_per_second(trial.measure_continuously(SLICE_SECONDS, count, PATIENCE_SECONDS)[1:])

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _examples_per_second(slices: Sequence[Slice]) -> float:
    return sum(each.examples for each in slices) / sum(each.seconds for each in slices)


def figures(quick: bool) -> dict[str, dict[str, Any]]:
    """All figures of the table, by name, with their bars."""
    found: dict[str, dict[str, Any]] = {}
    stretch = STRETCH_SECONDS_QUICK if quick else STRETCH_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair("decoding", 32, {}, stretch, Path(folder))
        for prefetch in PREFETCHES_QUICK if quick else PREFETCHES:
            knobs = {"prefetch": prefetch, "num_parallel_calls": 2}
            logs = pair.ratios(knobs, SLICE_SECONDS, REPEATS_QUICK if quick else REPEATS)
            found[f"decodes, prefetch {prefetch}"] = _figure(logs, {"min": 0.97, "max": 1.03})
        pair.close()
        knobs = {"prefetch": 8, "num_parallel_calls": 16, "data_threads": 16}
        pair = Pair("waiting", 4, knobs, stretch, Path(folder))
        for seconds in WAITING_SLICES_SECONDS_QUICK if quick else WAITING_SLICES_SECONDS:
            logs = pair.ratios(knobs, seconds, WAITING_REPEATS_QUICK if quick else WAITING_REPEATS)
            found[f"waits 200 ms, 16 in flight, slices of {seconds:g} s"] = _figure(logs, None)
        pair.close()
    return found


def _figure(logs: list[float], bar: dict[str, float] | None) -> dict[str, Any]:
    interval = mean_interval(logs)
    bounded = math.isfinite(interval.half_width)
    return {
        "value": math.exp(statistics.median(logs)),
        "ci95": [math.exp(interval.low), math.exp(interval.high)] if bounded else None,
        "bar": bar,
        "count": len(logs),
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ends within a minute: two buffers, one wait")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # all of it is about processors
    found = figures(arguments.quick)
    print(f"{'frozen slices / continuous':<44} {'bar':>19} {'median':>7}   95% interval of the mean")
    for name, figure in found.items():
        bar = " ".join(f"{which} {value:g}" for which, value in (figure["bar"] or {}).items())
        bounds = "" if figure["ci95"] is None else "{:.3f} to {:.3f}".format(*figure["ci95"])
        print(f"{name:<44} {bar:>19} {figure['value']:>7.3f}   {bounds}")
    if arguments.json:
        document = {
            "benchmark": "freezing",
            "machine": fingerprint().model_dump(mode="json"),
            "figures": found,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
