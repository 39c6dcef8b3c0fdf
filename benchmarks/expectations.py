"""What changes of knobs gain: makes the package's table of expectations from recorded runs and from literature.

    python benchmarks/expectations.py [--json FILE] RUN...

Each RUN is a run directory. Two trials of a run that differ in one knob tell what its change gains, and whether it
fails. A row is the median over workloads, each of whose gains is a mean; of numbers it is the gain of the first
doubling. It replaces a row of `data/expectations_literature.json` where it rests on several workloads. Writes
`autotune/tuning/expectations.json`.
"""

import json
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from figures import Figure, one, parser, write

from autotune.data.errors import AutotuneError
from autotune.data.facts import Machine
from autotune.data.files import write_atomically
from autotune.data.models import KnobValue
from autotune.data.record import Outcome, Phase, TrialRecord
from autotune.data.run_directory import RunDirectory, RunRecord
from autotune.machine.fingerprint import fingerprint
from autotune.space.changes import Context
from autotune.space.configuration import Configuration, read_trials
from autotune.space.knobs import KNOBS
from autotune.tuning.beliefs import (
    TABLE,
    Expectation,
    ExpectationsFile,
    classify_change,
    find_unit,
    is_number,
    size_of_change,
)
from autotune.tuning.candidates import describe_context
from autotune.tuning.rules import Limits

LITERATURE = Path(__file__).resolve().parent / "data" / "expectations_literature.json"
FEWEST_WORKLOADS = 2
"""A recorded row of fewer does not replace literature."""
FEWEST_TRIALS = 4
"""The same. A row of less stands where there is neither literature nor a row of any limit that rests on enough."""
FEWEST_DOUBLINGS = 0.5
"""Squared first doublings that a workload's changes of a number must have together: later ones are mostly noise."""
MOST_SPREAD = 0.5
"""Of a row: wider ones come from a few large losses, which tell nothing of gains."""
SINGLE_SPREAD = 0.15
"""Spread of a row that rests on one workload, which tells nothing of others."""
MOST_LATE = math.log(4)
"""Longer first steps than this are a stall of the machine, as a logarithm."""

Key = tuple[str, str, str, str, str]
"""Knob, change, device, limit, unit."""


@dataclass
class Seen:
    """What one workload has shown of a row."""

    gains: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)  # of each change, in first doublings
    starts: list[float] = field(default_factory=list)
    failures: int = 0

    @property
    def gain(self) -> float:
        """The gain of a change of size 1, by least squares."""
        products = [gain * size for gain, size in zip(self.gains, self.sizes, strict=True)]
        return math.fsum(products) / math.fsum(size * size for size in self.sizes)

    def add(self, other: "Seen") -> None:
        """Count what another pair of trials has shown, too."""
        self.gains += other.gains
        self.sizes += other.sizes
        self.starts += other.starts
        self.failures += other.failures


def read_run(path: Path) -> tuple[RunRecord, list[TrialRecord]]:
    """Read a run and its trials. Raises AutotuneError where it is no finished run."""
    directory = RunDirectory(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return directory.read_run(), list(read_trials(directory))


def units_of(machine: Machine, here: Machine) -> tuple[str, ...] | None:
    """The units of a run's machine; those of this one where the processor is the same; None where they are unknown."""
    return machine.units or (here.units if machine.cpu == here.cpu else None)


def context_of(run: RunRecord, baseline: TrialRecord, units: tuple[str, ...]) -> Context:
    """What limited a run's baseline, as the tuner sees it."""
    return describe_context(
        baseline,
        baseline,
        [],
        units=units,
        limits=Limits(host_bytes=run.machine.memory_bytes, device_bytes=None),
        on_gpu=run.workload is not None and run.workload.device == "gpu",
        measured_seconds=1.0,
        import_seconds=0.0,
    )


def changed_knob(changed: Mapping[str, KnobValue]) -> str:
    """The knob that was changed, alone or together with those that its entry names; empty where others were, too."""
    joint = {
        knob.name for knob in KNOBS.values() for each in knob.changes if changed.keys() == {knob.name, *each.together}
    }
    return next((name for name in changed if len(changed) == 1 or name in joint), "")


def is_away(before: KnobValue, after: KnobValue, baseline: KnobValue) -> bool:
    """Whether a change leads away from the baseline's value."""
    if is_number(before) and is_number(after) and is_number(baseline):
        low, middle, high = int(before), int(after), int(baseline)
        return abs(math.log(middle / high)) > abs(math.log(low / high)) and (middle - high) * (low - high) >= 0
    return before == baseline and type(before) is type(baseline)


def differences(records: Sequence[TrialRecord]) -> Iterator[tuple[str, KnobValue, KnobValue, Seen]]:
    """Each pair of trials that differ in one knob: the knob, its values, and what the second shows."""
    searched = [record for record in records if record.phase in (Phase.BASELINE, Phase.SEARCH)]
    ratios: dict[Configuration, tuple[float | None, TrialRecord]] = {}
    for record in searched:
        configuration = Configuration(record.asked or record.configuration)
        if record.phase is Phase.BASELINE:
            ratios[configuration] = 0.0, record
        elif record.outcome.measured and record.speedup is not None:
            ratios.setdefault(configuration, (math.log(record.speedup.value), record))
        elif not record.outcome.measured and record.outcome is not Outcome.INTERRUPTED:
            ratios.setdefault(configuration, (None, record))
    baseline = next(iter(ratios))
    for before, (base, beside) in ratios.items():
        for after, (ratio, record) in ratios.items():
            changed = after.differences(before)
            if base is None or before.keys() != after.keys() or not (name := changed_knob(changed)):
                continue
            value = changed[name]
            if not is_away(before[name], value, baseline[name]):
                continue
            if ratio is None:
                yield name, before[name], value, Seen(failures=1)
                continue
            late = math.log((record.first_step_seconds or 1.0) / (beside.first_step_seconds or 1.0))
            size = size_of_change(before[name], value, baseline[name])
            yield name, before[name], value, Seen(gains=[ratio - base], sizes=[size], starts=[late])


def collect(paths: Iterable[Path]) -> tuple[dict[Key, dict[str, Seen]], str]:
    """What the runs show of each row, by workload; and the runs, in words."""
    here, found = fingerprint(), defaultdict[Key, dict[str, Seen]](lambda: defaultdict(Seen))
    runs, processors = set[tuple[str, str]](), set[str]()
    for path in paths:
        try:
            run, records = read_run(path)
        except AutotuneError as error:
            print(f"left out: {error.message}")
            continue
        baseline = next((each for each in records if each.phase is Phase.BASELINE and each.outcome is Outcome.OK), None)
        if (
            baseline is None
            or run.workload is None
            or run.machine.cpu == "simulated"
            or (run.run, run.started_at) in runs
        ):
            print(f"left out: {path} has no baseline, is simulated, or is a copy")
            continue
        runs.add((run.run, run.started_at))
        processors.add(f"{run.machine.cpu} with {run.machine.cores} cores")
        units = units_of(run.machine, here)
        now = context_of(run, baseline, units or ())
        device = "gpu" if now.on_gpu else "cpu"
        for name, before, after, seen in differences(records):
            change, unit = classify_change(before, after), find_unit(name, after, now.units)
            if unit and units is None:
                continue
            for limit in (now.limit, ""):
                found[name, change, device, limit, unit][run.workload.name].add(seen)
    return found, f"of {len(runs)} runs on {' and '.join(sorted(processors))}"


def make_row(key: Key, workloads: dict[str, Seen], runs: str) -> Expectation | None:
    """The row of what workloads have shown; None where none was measured."""
    told = [seen for seen in workloads.values() if sum(size**2 for size in seen.sizes) >= FEWEST_DOUBLINGS]
    gains = [seen.gain for seen in told]
    if not gains:
        return None
    trials = sum(len(seen.gains) + seen.failures for seen in workloads.values())
    starts = [late for seen in workloads.values() for late in seen.starts if abs(late) < MOST_LATE]
    failures = sum(seen.failures for seen in workloads.values())
    spread = min(MOST_SPREAD, statistics.stdev(gains)) if len(gains) > 1 else SINGLE_SPREAD
    names = ", ".join(sorted(workloads))
    knob, change, device, limit, unit = key
    return Expectation.model_validate(
        {
            "knob": knob,
            "change": change,
            "device": device,
            "limit": limit,
            "unit": unit,
            "speedup": round(math.exp(statistics.median(gains)), 3),
            "spread": round(spread, 3),
            "failures": round((failures + 0.1) / (trials + 2), 3),  # as of two trials at 5%
            "start": round(math.exp(statistics.median(starts)), 2) if starts else 1.0,
            "trials": trials,
            "source": f"recorded: {names}; {runs}",
        }
    )


def merge(found: dict[Key, dict[str, Seen]], literature: Sequence[Expectation], runs: str) -> list[Expectation]:
    """Recorded rows, and literature where those rest on too little."""
    merged: dict[Key, Expectation] = {
        (row.knob, row.change, row.device, row.limit, row.unit): row for row in literature
    }
    for key in sorted(found, key=lambda key: key[3]):  # rows of any limit first
        row = make_row(key, found[key], runs)
        if row is None:
            continue
        is_enough = len(found[key]) >= FEWEST_WORKLOADS and row.trials >= FEWEST_TRIALS
        knob, change, device, _, unit = key
        if is_enough or not merged.keys() & {key, (knob, change, device, "", unit)}:
            merged[key] = row
    return [merged[key] for key in sorted(merged)]


def main() -> None:
    """Collect, merge, print, and write."""
    made = parser(__doc__)
    made.add_argument("runs", nargs="+", type=Path, help="run directories")
    given = made.parse_args()
    found, runs = collect(given.runs)
    literature = ExpectationsFile.model_validate_json(LITERATURE.read_bytes()).rows
    rows = merge(found, literature, runs)
    print(f"{'knob':<28} {'change':<15} {'on':<4} {'limit':<8} {'unit':<12} {'ratio':>6} {'spread':>6} {'trials':>6}")
    for row in rows:
        place = f"{row.knob:<28} {row.change:<15} {row.device:<4} {row.limit or 'any':<8} {row.unit:<12}"
        print(f"{place} {row.speedup:>6.2f} {row.spread:>6.2f} {row.trials:>6}")
    document = {"schema_version": 1, "rows": [row.model_dump(mode="json") for row in rows]}
    write_atomically(TABLE, json.dumps(document, indent=1) + "\n")
    figures: dict[str, Figure] = {
        " ".join(filter(None, (row.knob, row.change, row.device, row.limit, row.unit))): one(row.speedup, row.trials)
        for row in rows
    }
    write("expectations", figures, given.json)


if __name__ == "__main__":
    main()
