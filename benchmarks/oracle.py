"""How fast a recommendation is beside the best of all 72 configurations of a search space.

    python benchmarks/oracle.py --record [--passes 2] [--quick]
    python benchmarks/oracle.py [--runs 3] [--budget 5m] [--quick] [--json FILE]

The first form measures each configuration of `data/oracle_space.toml` on `examples/digits_mlp.py` in plain `fit`
beside the baseline (`plain_rounds.py`), and writes `data/oracle_digits_mlp.json`. Each pass has an order of its own.
Then the fastest are measured anew. The table has only their later speeds: the first ones, by which they were chosen,
are too high. A quick record measures four configurations and writes nothing.

The second form runs `autotune tune` on that space, and looks up in the table what it recommends.
Prints one table.
"""

import itertools
import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from answers import progress, tune
from figures import Figure, factor, one, parser, report
from plain_rounds import Failed, Rounds, plain_rounds

from autotune.data.facts import Machine
from autotune.data.files import write_atomically
from autotune.data.models import KnobValue
from autotune.machine.fingerprint import fingerprint
from autotune.space.configuration import Configuration
from autotune.space.space_file import ResolvedSpace, find_search_space

HERE = Path(__file__).resolve().parent
WORKLOAD = HERE.parent / "examples" / "digits_mlp.py"
SPACE = HERE / "data" / "oracle_space.toml"
TABLE = HERE / "data" / "oracle_digits_mlp.json"
SIZE, SIZE_QUICK = 72, 4
PASSES, PASSES_QUICK = 2, 1
FASTEST, PASSES_OF_FASTEST = 12, 3
TURN_SECONDS, TURN_SECONDS_QUICK = 0.6, 0.2
"""Shortest timed stretch of a turn. Each side has two turns."""
RUNS, RUNS_QUICK = 3, 1
BUDGET, BUDGET_QUICK = "5m", "40s"
BAR = {"min": 0.95}

Speedups = dict[Configuration, list[float]]
"""Speed-ups over the baseline, one of each pass."""
Table = dict[frozenset[tuple[str, KnobValue]], float]
"""Speed-ups by the knobs that vary."""


def configurations(space: ResolvedSpace) -> list[Configuration]:
    """Every configuration of a space."""
    every = itertools.product(*space.choices.values())
    return [space.configuration(dict(zip(space.choices, values, strict=True))) for values in every]


def measured(rounds: Rounds, wanted: Sequence[Configuration], passes: int, seconds: float) -> Speedups:
    """Speed-ups from so many passes."""
    found: Speedups = {each: [] for each in wanted}
    for number in range(1, passes + 1):
        for each in random.Random(number).sample(wanted, len(wanted)):
            shown = f"pass {number} of {passes}: {each.describe(rounds.baseline)}"
            try:
                baseline, candidate = rounds.speeds(each, seconds)
            except Failed as error:
                progress(f"{shown}: {error}")
                continue
            found[each].append(candidate / baseline)
            progress(f"{shown}: ×{candidate / baseline:.3f} of {baseline:,.0f} samples/s")
    return found


def mean(speedups: Iterable[float]) -> float:
    """The geometric mean; 0 for a configuration that always failed."""
    logarithms = [math.log(speedup) for speedup in speedups]
    return math.exp(statistics.fmean(logarithms)) if logarithms else 0.0


def fastest(found: Speedups, count: int) -> list[Configuration]:
    """The configurations that looked fastest, in order."""
    return sorted(found, key=lambda each: mean(found[each]), reverse=True)[:count]


def record(passes: int, *, quick: bool) -> dict[str, Figure]:
    """Measure all configurations and write the table."""
    seconds = TURN_SECONDS_QUICK if quick else TURN_SECONDS
    with plain_rounds(WORKLOAD) as rounds:
        space = rounds.space(find_search_space(SPACE))
        assert space.size == SIZE
        wanted = configurations(space)[: SIZE_QUICK if quick else SIZE]
        found = measured(rounds, wanted, passes, seconds)
        if not quick:
            found |= measured(rounds, fastest(found, FASTEST), PASSES_OF_FASTEST, seconds)
            write_table(found, list(space.choices))
    shown = dict.fromkeys([*fastest(found, FASTEST), space.baseline])
    return {
        each.describe(space.baseline): factor([math.log(one) for one in found[each]]) for each in shown if found[each]
    }


def write_table(found: Speedups, names: Sequence[str]) -> None:
    """Write `data/oracle_digits_mlp.json`."""
    document = {
        "schema_version": 1,
        "workload": WORKLOAD.stem,
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": fingerprint().model_dump(mode="json"),
        "configurations": [
            {"knobs": {name: each[name] for name in names}, "speedup": mean(speedups), "passes": speedups}
            for each, speedups in found.items()
        ],
    }
    write_atomically(TABLE, json.dumps(document, indent=1) + "\n")


def read_table() -> Table:
    """The recorded table.

    Raises:
        SystemExit: There is none, or it is of another machine.
    """
    if not TABLE.exists():
        raise SystemExit(f"{TABLE}: no such file. Run oracle.py --record first.")
    document = json.loads(TABLE.read_text(encoding="utf-8"))
    differences = Machine.model_validate_json(json.dumps(document["machine"])).differences(fingerprint())
    if differences:
        raise SystemExit(f"{TABLE}: of another machine ({'; '.join(differences)}). Run oracle.py --record here.")
    return {frozenset(each["knobs"].items()): each["speedup"] for each in document["configurations"]}


def share_of_best(configuration: Mapping[str, KnobValue], table: Table) -> float:
    """The speed of a configuration over the best in the table."""
    names = {name for knobs in table for name, _ in knobs}
    return table[frozenset((name, configuration[name]) for name in names)] / max(table.values())


def recommended(runs: int, budget: str) -> dict[str, Figure]:
    """Tune with seeds from 0 on, and look up what is recommended. A run without a recipe counts as 0."""
    table, found = read_table(), dict[str, Figure]()
    for seed in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            command = tune(WORKLOAD, budget, seed, out, "--space", str(SPACE))
            share, verdict = 0.0, f"no recipe, exit code {command.exit_code}"
            if (out / "recipe.json").exists():
                recipe = json.loads((out / "recipe.json").read_text(encoding="utf-8"))
                share, verdict = share_of_best(recipe["configuration"], table), recipe["evidence"]["verdict"]
        found[f"recommended over best, seed {seed}: {verdict}"] = one(share, 1)
        progress(f"seed {seed}: {verdict}: {share:.3f} {command.remark}")
    found["recommended over best, least"] = one(min(each["value"] for each in found.values()), runs, BAR)
    return found


def main() -> None:
    """Measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--record", action="store_true", help="measure the table")
    made.add_argument("--passes", type=int, help=f"over all configurations; {PASSES} by default")
    made.add_argument("--runs", type=int, help=f"of the tuner; {RUNS} by default")
    made.add_argument("--budget", help=f"of each run; {BUDGET} by default")
    given = made.parse_args()
    if given.record:
        found = record(given.passes or (PASSES_QUICK if given.quick else PASSES), quick=given.quick)
    else:
        runs = given.runs or (RUNS_QUICK if given.quick else RUNS)
        found = recommended(runs, given.budget or (BUDGET_QUICK if given.quick else BUDGET))
    report("oracle", found, given.json)


if __name__ == "__main__":
    main()
