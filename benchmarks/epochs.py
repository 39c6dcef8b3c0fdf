"""Whether a trial shows what plain `model.fit` does over whole epochs, boundaries and validation included.

    python benchmarks/epochs.py [--quick] [--json FILE] [--tuned] [--instances N]

Prints one table: throughput as a trial shows it over that of `model.fit` in a process of its own (`plain_fit.py`), for
three sizes of data set, three batch sizes, with and without validation. Both take turns, a tenth of a second each or an
epoch, one always frozen; what is counted of plain `fit` is whole epochs, from the end of one to the end of another.

`tf.data`'s own tuning is off in both: with it, some epochs end in a stall that may last as long as the epoch (see
`docs/architecture.md`), which hides differences of percents. `--tuned` leaves it on, as TensorFlow and users have it.
"""

import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, factor, parser, report, share

from autotune.data.record import Slice
from autotune.runtime.executor import WarmUp
from autotune.runtime.local import LocalExecutor
from autotune.runtime.trial_process import is_stopped
from autotune.script.loading import parse_reference
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.stats.ratios import EpochCost, rate, throughput_interval
from autotune.tuning.costs import slice_length

HERE = Path(__file__).resolve().parent
SIZES = (300, 3_000, 100_000)
BATCHES = (32, 256, 1024)
Case = tuple[int, int, bool]
"""Examples, batch size, with validation or not."""
CASES: list[Case] = [(size, batch, validated) for size in SIZES for batch in BATCHES for validated in (False, True)]
QUICK_CASES: list[Case] = [(300, 32, True), (3_000, 256, True), (100_000, 1024, True)]
INSTANCES, INSTANCES_QUICK = 3, 1
"""Fresh processes of both, for each case, unless `--instances` says how many; their parents, which import TensorFlow,
are fresh for each instance, too.

Were two processes that import the same not equally fast, their forks would not be either (`templates.py` asks that):
with one parent for all instances it would be in every one of them.
"""
INSTANCE_SECONDS = 4.0
"""Of plain `fit`, at least, up to the end of an epoch."""
WARMUP_SECONDS = 0.5
"""Of plain `fit`, after its first epoch. An epoch that ends in it is not counted."""
TURN_SECONDS = 0.1
"""Both are the same training, so that what pauses cost or give cancels; and the shorter the turns, the less noise."""
TUNING = "TILED_TF_DATA_TUNING"
"""What `tiled.py` reads; importing that would import TensorFlow."""
MOST_OFF = 0.03
WITHIN = {"min": 1 - MOST_OFF, "max": 1 + MOST_OFF}
PATIENCE_SECONDS = 120.0


class PlainFit:
    """One case's `model.fit`, which runs only in its turns.

    Args:
        server: The process that forks it off.
        case: What it trains.
    """

    def __init__(self, server: subprocess.Popen[bytes], case: Case) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._from = server.stdout.fileno()
        self._text = b""
        server.stdin.write(b"%d %d %d\n" % case)
        server.stdin.flush()
        self._said: list[float] = []
        self._turns = [(time.monotonic(), math.inf)]
        self._await_word()
        self._pid = int(self._said.pop())
        self._await_word()  # of the first epoch, which compiles
        self._stop()

    def _await_word(self) -> None:
        given_up = time.monotonic() + PATIENCE_SECONDS
        while not self._said:
            if time.monotonic() > given_up:
                raise SystemExit(f"plain fit says nothing for {PATIENCE_SECONDS:g} s: run plain_fit.py by hand")
            self._listen(1.0)

    def _listen(self, seconds: float) -> None:
        while select.select([self._from], [], [], seconds)[0]:
            read = os.read(self._from, 1 << 16)
            if not read:
                raise SystemExit("plain fit has ended: run plain_fit.py by hand to see why")
            self._text += read
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
        return [sum(max(0.0, min(stopped, said) - began) for began, stopped in self._turns) for said in self._said]

    def kill(self) -> None:
        """End it."""
        os.kill(self._pid, signal.SIGKILL)


def log_ratio(processes: LocalExecutor, server: subprocess.Popen[bytes], case: Case, logs: Path) -> float:
    """Logarithm of a trial's throughput over plain fit's, one fresh process of each."""
    size, batch, _ = case
    configuration = baseline_configuration(batch, {}, Device.CPU, where="benchmark")
    plain = PlainFit(server, case)
    trial = processes.launch(configuration, log=str(logs / f"{size}-{batch}.log"), data=None)
    try:
        warm = trial.warm_up(PATIENCE_SECONDS)
        length = slice_length(warm, wanted=TURN_SECONDS)
        plain.turn(WARMUP_SECONDS)
        since = plain.epoch_ends()[-1]
        own: list[Slice] = []
        while True:
            plain.turn(length)
            own.append(trial.measure(length, PATIENCE_SECONDS))
            ends = plain.epoch_ends()
            if ends[-1] - since >= INSTANCE_SECONDS:
                epochs = sum(each > since for each in ends)
                return math.log(shown(own, warm) * (ends[-1] - since) / (size * epochs))
    finally:
        plain.kill()
        trial.kill()


def shown(parts: list[Slice], warm: WarmUp) -> float:
    """Samples per second, as a trial's record has them."""
    ready = warm.ready
    cost = EpochCost(examples=warm.started.examples, seconds=ready.epoch_overhead_seconds)
    rates = [rate(each, cost) for each in parts]
    return throughput_interval(rates, [each.examples for each in parts]).value


def trials_of(name: str, logs: Path) -> LocalExecutor:
    """Trials of one of the workloads."""
    return LocalExecutor(parse_reference(f"{HERE / 'tiled.py'}:{name}"), logs=logs)


def log_ratios(cases: Sequence[Case]) -> list[float]:
    """One of each case, in order, from a freshly started server of plain fits and fresh templates."""
    plain = [sys.executable, "-W", "ignore", str(HERE / "plain_fit.py")]
    with (
        tempfile.TemporaryDirectory() as folder,
        # In a session of its own, as templates are: the kernel shares out processor time by sessions.
        subprocess.Popen(
            plain, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        ) as server,
        trials_of("alone", Path(folder)) as alone,
        trials_of("validated", Path(folder)) as validated,
    ):
        for processes, used in ((alone, False), (validated, True)):
            if any(used is validates for *_, validates in cases):
                processes.open()
        found = [log_ratio(validated if case[2] else alone, server, case, Path(folder)) for case in cases]
        server.kill()
    return found


def figures(cases: Sequence[Case], instances: int) -> dict[str, Figure]:
    """All figures of the table, by name, with their bars."""
    found: dict[str, Figure] = {}
    logs: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(instances):  # of all cases in turn, so that a slow minute is in all of them
        for case, ratio in zip(cases, log_ratios(cases), strict=True):
            logs[case].append(ratio)
    for (size, batch, validates), ratios in logs.items():
        name = f"{size:,} examples, batch {batch}{', validation' if validates else ''}"
        found[name] = factor(ratios, WITHIN)
    off = [abs(each["value"] - 1) for each in found.values()]
    for size in dict.fromkeys(size for size, *_ in cases):
        of_size = [each for case, ratios in logs.items() for each in ratios if case[0] == size]
        found[f"{size:,} examples, all cases"] = factor(of_size, WITHIN)
    found["all cases"] = factor([each for ratios in logs.values() for each in ratios], WITHIN)
    found["share of cases within 3%"] = share(sum(each <= MOST_OFF for each in off), len(off), {"min": 1.0})
    return found


def main() -> None:
    """Measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--tuned", action="store_true", help="with tf.data's own tuning, as TensorFlow has it")
    made.add_argument("--instances", type=int, help="fresh processes of both, for each case")
    arguments = made.parse_args()
    os.environ[TUNING] = "1" if arguments.tuned else "0"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # trials and plain fit on the same device
    usual = (QUICK_CASES, INSTANCES_QUICK) if arguments.quick else (CASES, INSTANCES)
    found = figures(usual[0], arguments.instances or usual[1])
    report("epochs", found, arguments.json)


if __name__ == "__main__":
    main()
