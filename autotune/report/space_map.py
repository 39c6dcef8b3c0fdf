"""The map of a search space, knob by value: tried, ruled out and why, or not reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autotune.data.models import KnobValue
from autotune.data.printable import one_line
from autotune.data.record import Phase, TrialRecord
from autotune.data.run_directory import RunRecord
from autotune.space.configuration import format_value


class Spot(NamedTuple):
    """A value of a knob. It was not reached where it has neither a ratio nor a reason."""

    value: str
    ratio: float = 0.0  # the best speed-up of a trial with it
    trial: int | None = None  # that one
    why: str = ""  # it has none
    kinds: tuple[str, ...] = ()  # of `now` and `chosen`


def map_space(
    run: RunRecord, records: Sequence[TrialRecord], recommended: Mapping[str, KnobValue] | None
) -> dict[str, list[Spot]]:
    """Return the values of the knobs that vary, then what does not vary. `records`: with repeats."""
    if run.search_space is None or run.baseline is None:
        return {}
    left_out, mapped = dict(run.search_space.left_out), dict[str, list[Spot]]()
    for name, choices in run.search_space.choices.items():
        start, marks = f"{name}=", {"now": run.baseline, "chosen": recommended or {}}
        reasons = {key.removeprefix(start): left_out.pop(key) for key in [*left_out] if key.startswith(start)}
        values = {format_value(value): value for value in choices}
        best: dict[str, TrialRecord] = {}
        for record in records:
            if name not in record.configuration:
                continue
            value = format_value(record.configuration[name])
            asked = format_value((record.asked or record.configuration).get(name, record.configuration[name]))
            if asked != value:
                values.pop(asked, None)  # another value was in force
            values[value] = record.configuration[name]
            if _ratio(record):
                best[value] = max(best.get(value, record), record, key=_ratio)
            elif record.reason:
                reasons.setdefault(value, record.reason.splitlines()[0])
        numbers = all(type(value) is int for value in values.values())
        mapped[name] = []
        for value in [*(sorted(values, key=int) if numbers else values), *(reasons.keys() - values.keys())]:
            kinds = tuple(kind for kind, of in marks.items() if name in of and format_value(of[name]) == value)
            spot = Spot(value, why=one_line(reasons.get(value, "")), kinds=kinds)
            if known := best.get(value):
                spot = spot._replace(ratio=_ratio(known), trial=known.trial, why="")
            mapped[name].append(spot)
    for why in dict.fromkeys(left_out.values()):
        mapped[", ".join(name for name in left_out if left_out[name] == why)] = [Spot("ruled out", why=one_line(why))]
    return mapped


def _ratio(record: TrialRecord) -> float:
    if record.phase is Phase.BASELINE:
        return 1.0
    return 0.0 if record.speedup is None else record.speedup.value
