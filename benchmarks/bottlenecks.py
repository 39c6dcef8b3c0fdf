"""Is what limits a training rightly named? Five trainings that are each built to be limited by one thing.

python benchmarks/bottlenecks.py [--repeats 4] [--quick] [--json FILE]
"""

import tempfile
from pathlib import Path

from figures import Figure, parser, report, share

from autotune.data.facts import WorkloadReference
from autotune.data.figures import Bottleneck
from autotune.runtime.executor import IN_SEARCH
from autotune.runtime.local import LocalExecutor
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.stats.bottleneck import Seen, bottleneck_of
from autotune.tuning.profiles import read_profiles

CASES = ("input", "launch", "compute", "memory_bandwidth", "balanced")
WORKLOAD = Path(__file__).with_name("workloads") / "limited.py"
SLICE_SECONDS, WAIT_SECONDS, TIMEOUT = 0.5, 0.3, 120.0


def judged(processes: LocalExecutor, case: str, folder: Path) -> Bottleneck:
    """What limits one trial of a case."""
    folder.mkdir(parents=True)
    trial = processes.launch(
        baseline_configuration(64, {}, Device.CPU, where="benchmark"),
        log=str(folder / f"{case}-.txt"),
        data=None,
        timing=IN_SEARCH,
    )
    try:
        trial.warm_up(TIMEOUT)
        trial.measure(SLICE_SECONDS, TIMEOUT)
        told = trial.finish(WAIT_SECONDS, TIMEOUT, thorough=True)
    finally:
        trial.kill()
    (profile,) = read_profiles([folder / "profile"])
    return bottleneck_of(Seen(waits=told.input_wait_fraction, outside=told.outside_fraction, profile=profile))


def main() -> None:
    """Judge each case a few times, in turn."""
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=4)
    options = made.parse_args()
    repeats = 1 if options.quick else options.repeats
    reference = WorkloadReference(file=str(WORKLOAD), search_path=(str(WORKLOAD.parent),))
    right = dict.fromkeys(CASES, 0)
    with tempfile.TemporaryDirectory(prefix="bottlenecks-") as made_folder:
        folder = Path(made_folder)
        with LocalExecutor(reference, logs=folder, profile="all") as processes:
            processes.open()
            for index in range(repeats):
                for case in CASES:
                    found = judged(processes, case, folder / f"{case}{index}")
                    print(f"{case}: {found.name}: {found.why}", flush=True)
                    right[case] += found.name == case
    figures: dict[str, Figure] = {case: share(count, repeats) for case, count in right.items()}
    figures["all"] = share(sum(right.values()), repeats * len(CASES), bar={"min": 1.0})
    report("bottlenecks", figures, options.json)


if __name__ == "__main__":
    main()
