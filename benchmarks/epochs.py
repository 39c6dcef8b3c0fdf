"""Whether a trial shows what plain `model.fit` does over whole epochs, boundaries and validation included.

    python benchmarks/epochs.py [--quick] [--json FILE]

Prints one table: throughput as a trial shows it over that of `model.fit` in a process of its own (`plain_fit.py`), for
three sizes of data set, three batch sizes, with and without validation. Both take turns, half a second each, one always
frozen; what is counted of plain `fit` is whole epochs, from the end of one to the end of another.
"""

import argparse
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.machine import fingerprint
from autotune.measure.intervals import mean_interval
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.study.running import rate, throughput_interval
from autotune.study.slicing import SLICE_SECONDS, slice_seconds
from autotune.trial.live import WarmUp
from autotune.trial.process import TrialProcesses, is_stopped
from autotune.trial.record import Slice
from autotune.workload import parse_reference

HERE = Path(__file__).resolve().parent
SIZES = (300, 3_000, 100_000)
BATCHES = (32, 256, 1024)
CASES = [(size, batch, validated) for size in SIZES for batch in BATCHES for validated in (False, True)]
QUICK_CASES = [(300, 32, True), (3_000, 256, True), (100_000, 1024, True)]
REPEATS, REPEATS_QUICK = 6, 2
CASE_SECONDS = 24.0
"""No further repeat of a case is begun after so long, once there were two."""
REPEAT_SECONDS = 1.0
"""A repeat is so much of plain `fit` at least, and at least one epoch."""
PATIENCE_SECONDS = 120.0


class PlainFit:
    """One case's `model.fit`, which runs only in its turns.

    Args:
        server: The process that forks it off.
        case: Examples, batch size, with validation or not.
    """

    def __init__(self, server: subprocess.Popen[bytes], case: tuple[int, int, bool]) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._from = server.stdout.fileno()
        self._text = b""
        server.stdin.write(b"%d %d %d\n" % case)
        server.stdin.flush()
        self._said: list[float] = []
        self._turns = [(time.monotonic(), math.inf)]
        while not self._said:
            self._listen(1.0)
        self._pid = int(self._said.pop())
        while not self._said:  # the first epoch, which compiles
            self._listen(1.0)
        self._stop()

    def _listen(self, seconds: float) -> None:
        while select.select([self._from], [], [], seconds)[0]:
            self._text += os.read(self._from, 1 << 16)
            *lines, self._text = self._text.split(b"\n")
            self._said += map(float, lines)
            seconds = 0.0

    def _stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        self._turns[-1] = (self._turns[-1][0], time.monotonic())
        while not is_stopped(self._pid):
            time.sleep(0.0005)
        self._listen(0.0)

    def turn(self, seconds: float) -> None:
        """Let it train for so long."""
        self._turns.append((time.monotonic(), math.inf))
        os.kill(self._pid, signal.SIGCONT)
        time.sleep(seconds)
        self._stop()

    def epoch_ends(self) -> list[float]:
        """When its epochs ended, in seconds that it has run."""
        return [
            sum(max(0.0, min(stopped, said) - began) for began, stopped in self._turns) for said in self._said
        ]

    def kill(self) -> None:
        """End it."""
        os.kill(self._pid, signal.SIGKILL)


def ratios(
    processes: TrialProcesses,
    server: subprocess.Popen[bytes],
    case: tuple[int, int, bool],
    repeats: int,
    logs: Path,
) -> list[float]:
    """Logarithms of the trial's throughput over plain fit's, one per repeat."""
    size, batch, _ = case
    configuration = baseline_configuration(batch, {}, Device.CPU, where="benchmark")
    began = time.monotonic()
    plain = PlainFit(server, case)
    trial = processes.launch(configuration, log=str(logs / f"{size}-{batch}.log"), data=None)
    try:
        warm = trial.warm_up(PATIENCE_SECONDS)
        length = slice_seconds(warm, measured=8 * SLICE_SECONDS)
        found: list[float] = []
        parts: list[Slice] = []
        since: float | None = None
        while len(found) < repeats and (len(found) < 2 or time.monotonic() - began < CASE_SECONDS):
            plain.turn(SLICE_SECONDS)
            parts.append(trial.measure(length, PATIENCE_SECONDS))
            ends = plain.epoch_ends()
            if since is None:
                since, parts = ends[-1], []
            elif ends[-1] - since >= REPEAT_SECONDS:
                epochs = sum(each > since for each in ends)
                found.append(math.log(shown(parts, warm) * (ends[-1] - since) / (size * epochs)))
                since, parts = ends[-1], []
        return found
    finally:
        plain.kill()
        trial.kill()


def shown(parts: list[Slice], warm: WarmUp) -> float:
    """Samples per second, as a trial's record has them."""
    overhead = warm.ready.epoch_overhead_seconds
    rates = [
        rate(each, examples_per_epoch=warm.started.examples, epoch_overhead_seconds=overhead)
        for each in parts
    ]
    return throughput_interval(rates, [each.examples for each in parts]).value


def trials_of(name: str, logs: Path) -> TrialProcesses:
    """Trials of one of the workloads."""
    return TrialProcesses(parse_reference(f"{HERE / 'tiled.py'}:{name}"), logs=logs)


def figures(cases: list[tuple[int, int, bool]], repeats: int) -> dict[str, dict[str, Any]]:
    """All figures of the table, by name, with their bars."""
    found: dict[str, dict[str, Any]] = {}
    plain = [sys.executable, "-W", "ignore", str(HERE / "plain_fit.py")]
    with (
        tempfile.TemporaryDirectory() as folder,
        # In a session of its own, as templates are: the kernel shares out processor time by sessions.
        subprocess.Popen(
            plain, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as server,
        trials_of("alone", Path(folder)) as alone,
        trials_of("validated", Path(folder)) as validated,
    ):
        for processes, used in ((alone, False), (validated, True)):
            if any(used is validates for *_, validates in cases):
                processes.open()
        for case in cases:
            size, batch, validates = case
            logs = ratios(validated if validates else alone, server, case, repeats, Path(folder))
            interval = mean_interval(logs)
            found[f"{size:,} examples, batch {batch}{', validation' if validates else ''}"] = {
                "value": math.exp(statistics.median(logs)),
                "ci95": [math.exp(interval.low), math.exp(interval.high)],
                "bar": {"min": 0.97, "max": 1.03},
                "count": len(logs),
            }
        server.kill()
    off = [abs(each["value"] - 1) for each in found.values()]
    found["worst case, off by"] = {"value": max(off), "ci95": None, "bar": {"max": 0.03}}
    share = sum(each <= 0.03 for each in off) / len(off)
    found["share of cases within 3%"] = {"value": share, "ci95": None, "bar": {"min": 1.0}}
    return found


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ends within a minute: three cases")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # trials and plain fit on the same device
    found = figures(QUICK_CASES, REPEATS_QUICK) if arguments.quick else figures(CASES, REPEATS)
    print(f"{'trial / plain fit':<44} {'bar':>19} {'median':>7}   95% interval of the mean")
    for name, figure in found.items():
        bar = " ".join(f"{which} {value:g}" for which, value in figure["bar"].items())
        bounds = "" if figure["ci95"] is None else "{:.3f} to {:.3f}".format(*figure["ci95"])
        print(f"{name:<44} {bar:>19} {figure['value']:>7.3f}   {bounds}")
    if arguments.json:
        document = {
            "benchmark": "epochs",
            "machine": fingerprint().model_dump(mode="json"),
            "figures": found,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
