"""Whether claims of several runs of `claims.py` are biased together, or further off than their intervals say.

    python benchmarks/claims_together.py FILE... [--json FILE]

Measures nothing: takes the files that `claims.py --json` wrote, and prints one table. Five claims of one run tell
hardly more than that they are not far off. Those of several runs also tell a *bias*, the mean of log(claim) -
log(long): whatever makes trials faster or slower than long trainings, for one side of a speed-up only, is in it. And
how large differences are in their own errors (half-widths of both sides over 1.96): 1, or a little less, where
intervals are what they say. A claim that could not be compared does not agree, and is in no other figure.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims import MISS_BAR, NORMAL_QUANTILE, SHARE_BAR, Comparison
from figures import Figure, factor, report, root_mean_square, share

from autotune.measure.intervals import LogInterval, log_interval

CLAIMED, LONG = "claimed speed-up, ", "long speed-up, "


def comparisons_in(file: Path) -> list[Comparison]:
    """The claims that count in what `claims.py` wrote.

    Raises:
        SystemExit: The file is of another benchmark, or is none.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        found: dict[str, dict[str, Any]] = document["figures"] if document["benchmark"] == "claims" else {}
        names = [name.removeprefix(CLAIMED) for name in found if name.startswith(CLAIMED)]
        if not names:
            raise ValueError("no claims in it")
        return [
            Comparison(claim=_interval(found[CLAIMED + name]), long=_interval(found[LONG + name]))
            for name in names
            if found[f"agrees, {name}"]["value"] is not None
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{file} is not what benchmarks/claims.py --json writes ({type(error).__name__}: {error})"
        ) from None


def _interval(figure: dict[str, Any]) -> LogInterval | None:
    return log_interval(figure["value"], *figure["ci95"]) if figure["value"] and figure["ci95"] else None


def figures(comparisons: Sequence[Comparison]) -> dict[str, Figure]:
    """All figures, by name, with their bars; those that claims without a comparison leave empty are left out."""
    differences, in_errors, misses = list[float](), list[float](), list[float]()
    for each in comparisons:
        if each.claim is not None and each.long is not None and each.miss is not None:
            difference = each.claim.value - each.long.value
            differences.append(difference)
            in_errors.append(
                NORMAL_QUANTILE * difference / math.hypot(each.claim.half_width, each.long.half_width)
            )
            misses.append(each.miss)
    agreeing = sum(each.agrees for each in comparisons)
    table = {"share of claims that agree": share(agreeing, len(comparisons), {"min": SHARE_BAR})}
    if differences:
        table |= {
            "median miss": {
                "value": statistics.median(misses),
                "ci95": None,
                "bar": {"max": MISS_BAR},
                "count": len(misses),
            },
            "claim / long, geometric mean": factor(differences),
            "differences in their errors, root mean square": root_mean_square(in_errors),
        }
    return table


def main() -> None:
    """Read, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what claims.py --json wrote")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    comparisons = [each for file in arguments.files for each in comparisons_in(file)]
    if not comparisons:
        raise SystemExit("nothing is claimed in these files: give those of runs that found a gain")
    report("claims_together", figures(comparisons), arguments.json)


if __name__ == "__main__":
    main()
