"""What benchmarks print and write: one table, one JSON file."""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from autotune.data.files import write_atomically
from autotune.machine.fingerprint import fingerprint
from autotune.stats.intervals import mean_interval

Bar = Mapping[str, float]
Figure = dict[str, Any]


def one(value: float | None, count: int, bar: Bar | None = None, ci95: Sequence[float] | None = None) -> Figure:
    """A figure that is computed already, or could not be."""
    return {"value": value, "ci95": ci95, "bar": bar, "count": count}


def share(count: int, repeats: int, bar: Bar | None = None) -> Figure:
    """A share of repeats with Wilson's interval."""
    interval = binomtest(count, repeats).proportion_ci(method="wilson")
    return {"value": count / repeats, "ci95": [interval.low, interval.high], "bar": bar, "count": repeats}


def mean(values: Sequence[float], bar: Bar | None = None) -> Figure:
    """A mean with Student's interval, where there are several values."""
    interval = mean_interval(values)
    bounds = [interval.low, interval.high] if len(values) > 1 else None
    return {"value": statistics.fmean(values), "ci95": bounds, "bar": bar, "count": len(values)}


def factor(logarithms: Sequence[float], bar: Bar | None = None) -> Figure:
    """A ratio, from logarithms of it: their mean, with Student's interval where there are several."""
    figure = mean(logarithms, bar)
    bounds = figure["ci95"] and [math.exp(each) for each in figure["ci95"]]
    return figure | {"value": math.exp(figure["value"]), "ci95": bounds}


def median(values: Sequence[float], bar: Bar | None = None) -> Figure:
    """A median; None of no values."""
    return one(statistics.median(values) if values else None, len(values), bar)


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all benchmarks take."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="ends within a minute, says less")
    made.add_argument("--json", type=Path, help="write the figures to this file")
    return made


def report(
    benchmark: str, found: Mapping[str, Figure], file: Path | None, details: Mapping[str, Any] | None = None
) -> None:
    """Print the table, and write the file where one was asked for."""
    bars = {
        name: " ".join(f"{key} {value:g}" for key, value in (figure["bar"] or {}).items())
        for name, figure in found.items()
    }
    width, bar_width = (max(map(len, each)) for each in (found, [*bars.values(), "bar"]))
    print(f"{'what':<{width}} {'bar':>{bar_width}} {'value':>7}  {'95% interval':<16} {'of':>5}")
    for name, figure in found.items():
        bounds = "{:.3f} to {:.3f}".format(*figure["ci95"]) if figure["ci95"] else ""
        value = "–" if figure["value"] is None else format(figure["value"], ".3f")
        print(f"{name:<{width}} {bars[name]:>{bar_width}} {value:>7}  {bounds:<16} {figure['count']:>5}")
    write(benchmark, found, file, details)


def write(
    benchmark: str, found: Mapping[str, Figure], file: Path | None, details: Mapping[str, Any] | None = None
) -> None:
    """Write the figures, with the machine that they are of, where a file was asked for.

    Args:
        benchmark: Its name.
        found: The figures.
        file: Replaced whole or not at all.
        details: Further parts of the document.
    """
    if file:
        document = {
            "benchmark": benchmark,
            "machine": fingerprint().model_dump(mode="json"),
            "figures": found,
            **(details or {}),
        }
        write_atomically(file, json.dumps(document, indent=2) + "\n")
