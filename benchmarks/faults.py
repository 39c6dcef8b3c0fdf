"""Whether every way a trial can go wrong is caught, named and survived: the table of faults, many times over.

    python benchmarks/faults.py [--quick] [--json FILE]

Prints one table. The faults of `tests/faults/fault_table.py` are injected for real, in random order, into the trials
of a few studies: candidates beside a live baseline, each study in a run directory of its own. A fault counts only where
the trial was seen to begin it. A trial *survived* when the study went on after it, was *classified* when its outcome
and reason are the fault's, and left *orphans* where a process that it started lives on 5 s after its end.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "faults"))

from fault_table import FAULTS, WORKLOAD, Fault, memory_cgroup, witness  # noqa: E402
from figures import Figure, one, parser, report, share  # noqa: E402
from studies import Study  # noqa: E402

from autotune.data.facts import WorkloadReference  # noqa: E402
from autotune.runtime.local import LocalExecutor  # noqa: E402
from autotune.space.configuration import read_trials  # noqa: E402

STUDIES, ROUNDS = 2, 2
"""Each study has every fault so often."""
HANG_SECONDS, HANG_SECONDS_QUICK = 8.0, 5.0
"""Time limit of the trials that hang."""
QUICK_SECONDS = 42.0
"""With --quick, no trial is begun after so long."""
ORPHAN_SECONDS = 5.0
SLOW = ("exhausts_tensors",)
"""Left out of --quick: TensorFlow's allocator alone takes ten seconds."""


COUNTED = ("injected", "survived", "classified", "orphans")


@dataclass
class Tally:
    """What became of one fault's trials."""

    injected: int = 0
    survived: int = 0
    classified: int = 0
    orphans: int = 0
    wrong: list[str] = field(default_factory=list)


def below(pid: int) -> set[psutil.Process]:
    """All descendants of a process."""
    return set(psutil.Process(pid).children(recursive=True))


def marked(marker: str) -> Iterator[psutil.Process]:
    """Every process anywhere that has inherited the marker in its environment."""
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and marker in process.environ():
                yield process
        except psutil.Error:
            continue


def orphans(marker: str, expected: set[psutil.Process]) -> list[psutil.Process]:
    """What carries the marker and should not be there, once it has had its time to go."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        found = [each for each in marked(marker) if each not in expected]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def expected_of(study: Study) -> set[psutil.Process]:
    """The baseline, its template, and the keepers: what must be there between two trials."""
    live = study.seat.baseline.live
    mine = below(os.getpid())
    alive = {each for each in mine if live is not None and each.pid == getattr(live, "pid", None)}
    supervisors = set(psutil.Process().children())
    templates = {child for supervisor in supervisors for child in supervisor.children()}
    return alive | supervisors | templates


def run_study(
    faults: list[Fault], processes: LocalExecutor, path: Path, seconds: float, ends: float, tallies: dict[str, Tally]
) -> None:
    """One study over these faults, in this order."""
    marker = f"AUTOTUNE_FAULTS_{os.getpid()}"
    study = Study(processes, path, trial_seconds=seconds)
    for fault in faults:
        if time.monotonic() > ends:
            break
        tally = tallies[fault.name]
        record = study.try_fault(fault.name)
        if witness(study.log_of(record)).get("fault") != fault.name:
            tally.wrong.append(f"not injected: {record.outcome}: {record.reason}")
            continue
        tally.injected += 1
        if record.outcome is fault.outcome and fault.words in record.reason:
            tally.classified += 1
        else:
            tally.wrong.append(f"{record.outcome}: {record.reason}")
        left = orphans(marker, expected_of(study))
        tally.orphans += len(left)
        tally.wrong += [f"left {each}" for each in left]
        kept = {record.trial: record for record in read_trials(study.run.directory)}
        tally.survived += kept.get(record.trial) == record
    study.end()


def tallies_of(quick: bool) -> dict[str, Tally]:
    """Run it all."""
    began = time.monotonic()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ[f"AUTOTUNE_FAULTS_{os.getpid()}"] = "1"
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, memory_cgroup() as group:
        chosen = [fault for fault in FAULTS if (group or not fault.cgroup) and not (quick and fault.name in SLOW)]
        tallies = {fault.name: Tally() for fault in chosen}
        reference = WorkloadReference(file=str(WORKLOAD), search_path=(str(WORKLOAD.parent),))
        with LocalExecutor(reference, logs=Path(folder)) as processes:
            processes.open()
            for number in range(1 if quick else STUDIES):
                order = chosen * (1 if quick else ROUNDS)
                rng.shuffle(order)
                run_study(
                    order,
                    processes,
                    Path(folder) / f"run-{number}",
                    HANG_SECONDS_QUICK if quick else HANG_SECONDS,
                    began + QUICK_SECONDS if quick else float("inf"),
                    tallies,
                )
    return tallies


def figures(tallies: dict[str, Tally]) -> dict[str, Figure]:
    """Shares of all faults and of each, with their bars."""
    found = dict[str, Figure]()
    for name, tally in tallies.items():
        found[f"{name}: survived"] = share(tally.survived, tally.injected, {"min": 1.0})
        found[f"{name}: classified"] = share(tally.classified, tally.injected, {"min": 1.0})
        found[f"{name}: orphans"] = one(tally.orphans, tally.injected, {"max": 0.0})
    return found


def main() -> None:
    """Inject, print, and write."""
    arguments = parser(__doc__).parse_args()
    tallies = {name: tally for name, tally in tallies_of(arguments.quick).items() if tally.injected or tally.wrong}
    for name, tally in tallies.items():
        for line in tally.wrong:
            print(f"{name}: {line}")
    counts = {name: sum(getattr(tally, name) for tally in tallies.values()) for name in COUNTED}
    injected = {name: tally for name, tally in tallies.items() if tally.injected}
    report("faults", figures({**injected, "all": Tally(**counts)}), arguments.json)


if __name__ == "__main__":
    main()
