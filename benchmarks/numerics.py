"""How often the numerics rule is right: innocent precisions must pass, planted faults must be refused.

    python benchmarks/numerics.py [--quick] [--json FILE]

Prints one table. Each repeat is what a run does for one finalist: float32 without XLA from five seeds, the
configuration from the first of them, on the same recorded batches. All repeats of a class are trained in one process.
"""

import tempfile
from pathlib import Path
from typing import Any

from figures import Figure, parser, report, share

from autotune.runtime.local import LocalExecutor
from autotune.runtime.protocol import Data, LossRuns
from autotune.script.loading import parse_reference
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.stats.stability import check_parity
from autotune.tuning.learning import PARITY_SEEDS as SEEDS

WORKLOADS = Path(__file__).with_name("planted.py")
REPEATS, REPEATS_QUICK = 20, 6
STEPS = 100
PATIENCE_SECONDS = 600.0
INNOCENT: dict[str, dict[str, Any]] = {
    "bfloat16": {"precision": "mixed_bfloat16"},
    "float16 with loss scaling": {"precision": "mixed_float16"},
    "XLA": {"jit_compile": True},
    "bfloat16 under XLA": {"precision": "mixed_bfloat16", "jit_compile": True},
}
PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "float16 that underflows": ("underflows", {"precision": "mixed_float16"}),
    "bfloat16 under XLA that stalls": ("stalls", {"precision": "mixed_bfloat16", "jit_compile": True}),
}


class Bench:
    """Loss curves of one workload, all on the same recorded batches."""

    def __init__(self, name: str, repeats: int, scratch: Path) -> None:
        self._scratch = scratch / name
        self._scratch.mkdir()
        self._repeats = repeats
        self._processes = LocalExecutor(parse_reference(f"{WORKLOADS}:{name}"), logs=self._scratch)
        self._processes.open()
        self._baseline = baseline_configuration(32, {"jit_compile": False}, Device.CPU, where="benchmark")
        self._reference = self._curves(self._baseline, tuple(range(repeats * len(SEEDS))))

    def _curves(self, configuration: Configuration, seeds: tuple[int, ...]) -> tuple[Any, ...]:
        runs = LossRuns(
            folder=str(self._scratch / "batches"),
            recorded_batch_size=32,
            seeds=seeds,
            most_steps=STEPS,
            seconds=PATIENCE_SECONDS,
        )
        trial = self._processes.launch(
            configuration, log=str(self._scratch / "log.txt"), data=Data(examples=1797, endless=False), losses=runs
        )
        return trial.loss_curves(PATIENCE_SECONDS).curves

    def passed(self, changes: dict[str, Any]) -> tuple[int, int]:
        """How many repeats passed, and how many of all could tell."""
        own = self._curves(self._baseline.replace(**changes), tuple(range(0, self._repeats * len(SEEDS), len(SEEDS))))
        checks = [
            check_parity(self._reference[index * len(SEEDS) :][: len(SEEDS)], curve) for index, curve in enumerate(own)
        ]
        return sum(check.passed for check in checks), sum(check.conclusive for check in checks)

    def close(self) -> None:
        """End its processes."""
        self._processes.close()


def figures(repeats: int) -> dict[str, Figure]:
    """All figures of the table, by name, with their bars."""
    found: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench("innocent", repeats, Path(folder))
        for name, changes in INNOCENT.items():
            passed, told = bench.passed(changes)
            found[f"innocent {name}: passed"] = share(passed, repeats, {"min": 0.95})
            found[f"innocent {name}: could tell"] = share(told, repeats)
        bench.close()
        for name, (workload, changes) in PLANTED.items():
            bench = Bench(workload, repeats, Path(folder))
            found[f"planted {name}: refused"] = share(repeats - bench.passed(changes)[0], repeats, {"min": 0.95})
            bench.close()
    return found


def main() -> None:
    """Measure, print, and write."""
    arguments = parser(__doc__).parse_args()
    report("numerics", figures(REPEATS_QUICK if arguments.quick else REPEATS), arguments.json)


if __name__ == "__main__":
    main()
