"""What tuning gives on a GPU: ResNet-50, a transformer of BERT-base's size, an MLP, and a pipeline of JPEG images.

    python benchmarks/gpu.py [--quick] [--only NAME] [--budget 10m] [--json FILE] [--runs DIR]

Each workload is tuned once against what it does by itself, which is Keras's default. Then what was recommended takes
turns with plain float32: no XLA, no TensorFloat-32. Beside the speed-ups stand memory, seconds to the first step from a
template and from a fresh interpreter, and what freezing adds: the first slice after a pause over those that follow it.
Checked, too: the template opens no NVIDIA device. `--quick` tunes small versions, on a processor as well.
"""

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
from figures import Figure, factor, one, parser, report

import autotune
from autotune.recipe.recipe import Recipe
from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import Data
from autotune.runtime.trial_process import TrialProcess
from autotune.script.loading import parse_reference
from autotune.space.configuration import Configuration

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
WORKLOADS = {
    "resnet50": HERE / "workloads" / "resnet50.py",
    "bert_base": HERE / "workloads" / "bert_base.py",
    "digits_mlp": EXAMPLES / "digits_mlp.py",
    "photos_jpeg": EXAMPLES / "photos_jpeg.py",
}
ROUNDS, ROUNDS_QUICK = 8, 2
SLICE_SECONDS = 1.0
PATIENCE_SECONDS = 600.0


class Turns:
    """Two configurations of one workload, each in a process of its own, which take turns."""

    def __init__(self, processes: LocalExecutor, folder: Path) -> None:
        self._processes, self._folder = processes, folder
        self.first_step_seconds: list[float] = []
        self._data: Data | None = None

    def start(self, configuration: Configuration) -> TrialProcess:
        """A trial that is warm."""
        trial = self._processes.launch(configuration, log=str(self._folder / "log.txt"), data=self._data)
        assert isinstance(trial, TrialProcess)
        warm = trial.warm_up(PATIENCE_SECONDS)
        self._data = Data.from_started(warm.started)
        self.first_step_seconds.append(warm.first_step_seconds)
        return trial

    def ratios(self, one_side: Configuration, other: Configuration, rounds: int) -> tuple[list[float], list[float]]:
        """Logarithms of the first side's rate over the other's; and of its first slice after a pause over the next."""
        sides = self.start(one_side), self.start(other)
        rates: list[float] = []
        after_pause: list[float] = []
        try:
            for _ in range(rounds):
                first, second = sides[0].measure_continuously(SLICE_SECONDS, 2, PATIENCE_SECONDS)
                beside = sides[1].measure(SLICE_SECONDS, PATIENCE_SECONDS)
                pace = [each.examples / each.seconds for each in (first, second, beside)]
                rates.append(math.log((pace[0] + pace[1]) / 2 / pace[2]))
                after_pause.append(math.log(pace[0] / pace[1]))
        finally:
            for side in sides:
                side.kill()
        return rates, after_pause


def opened_devices() -> list[str]:
    """The NVIDIA devices that a template of this process has open, which would keep its forks from using CUDA."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        for link in Path(f"/proc/{process.pid}/fd").glob("*"):
            target = os.readlink(link)
            found |= {target} if target.startswith("/dev/nvidia") else set()
    return sorted(found)


def measured(name: str, budget: str, runs: Path, rounds: int) -> dict[str, Figure]:
    """All figures of one workload."""
    file, out = WORKLOADS[name], runs / name
    if not (out / "recipe.json").exists():
        autotune.tune(file, budget=budget, out=out, fresh=True)
    recipe = Recipe.load(out / "recipe.json")
    claim, tuned = recipe.evidence.speedup, Configuration(recipe.configuration)
    plain = {name: value for name, value in (("precision", "float32"), ("tensor_float_32", False)) if name in tuned}
    reference = parse_reference(str(file))
    evidence = recipe.evidence
    sides, memory = evidence.confirmation.processes, evidence.peak_memory_bytes.device
    found = {f"{name}: speed-up over Keras's default": one(claim.value, sides, ci95=[claim.low, claim.high])}
    with tempfile.TemporaryDirectory() as scratch:
        with LocalExecutor(reference, logs=Path(scratch)) as processes:
            processes.open()
            devices = opened_devices()
            turns = Turns(processes, Path(scratch))
            rates, after_pause = turns.ratios(
                tuned, Configuration(recipe.baseline).replace(jit_compile=False, **plain), rounds
            )
        with LocalExecutor(reference, logs=Path(scratch), isolation="spawn") as processes:
            processes.open()
            fresh = Turns(processes, Path(scratch))
            fresh.start(Configuration(recipe.baseline)).kill()
    return found | {
        f"{name}: speed-up over plain float32": factor(rates),
        f"{name}: slice after a pause over the next": factor(after_pause, {"at least": 0.97, "at most": 1.03}),
        f"{name}: seconds to the first step, template": one(turns.first_step_seconds[-1], 1),
        f"{name}: seconds to the first step, fresh interpreter": one(fresh.first_step_seconds[0], 1),
        f"{name}: GiB on the device, recommended": one(memory / 2**30 if memory else None, 1),
        f"{name}: NVIDIA devices that a template has open": one(len(devices), 1, {"at most": 0}),
    }


def main() -> None:
    """Tune, measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=list(WORKLOADS))
    made.add_argument("--budget", help="of each tuning; 10m, or 60s with --quick")
    made.add_argument("--runs", type=Path, help="keep the runs here, and go on with those that are there")
    given = made.parse_args()
    if given.quick:
        os.environ["AUTOTUNE_BENCHMARK"] = "small"
    found: dict[str, Figure] = {}
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        runs = (given.runs or Path(scratch)).resolve()
        for name in given.only or WORKLOADS:
            found |= measured(
                name, given.budget or ("60s" if given.quick else "10m"), runs, ROUNDS_QUICK if given.quick else ROUNDS
            )
            if given.json:
                report("gpu", found, given.json, details)
    report("gpu", found, given.json, details)


if __name__ == "__main__":
    main()
