"""What to do about what limits a training: three sentences with figures at most. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.record import TrialRecord
from autotune.scripts.facts import ScriptFacts
from autotune.stats.bottleneck import Bottleneck

WORTH_SAYING = 1.05
"""A smaller gain that something could have at most is not told."""
_HELPS = {
    "input": "more num_parallel_calls, prefetch, data_threads or persistent_iterator",
    "launch": "more steps_per_execution, XLA or a larger batch",
    "compute": "another precision, XLA or a larger batch",
    "memory_bandwidth": "XLA, which fuses such operations, or another precision",
    "communication": "fewer or larger exchanges between devices: a larger batch",
    "compute_or_memory": "another precision, XLA or a larger batch",
}


def advice(baseline: TrialRecord, recommended: TrialRecord | None, script: ScriptFacts | None) -> list[str]:
    """What limits the baseline, what could be gained at most, and what limits the recommendation.

    Args:
        baseline: The baseline's trial.
        recommended: The trial that the recipe is of; None where that is the baseline.
        script: Where a script's own calls are.
    """
    said = []
    if baseline.bottleneck is not None and baseline.bottleneck.name != "unknown":
        said.append(_limit("The baseline", baseline, script))
    said += _at_most(baseline)
    if recommended is not None and recommended.bottleneck is not None and recommended.bottleneck.name != "unknown":
        now = recommended.bottleneck
        helps = f"; {_HELPS[now.name]} could help further" if now.name in _HELPS else ""
        said.append(f"With the recipe {_in_words(now)}{helps}.")
    return said[:3]


def _in_words(bottleneck: Bottleneck) -> str:
    if bottleneck.name == "balanced":
        return f"nothing stands out: {bottleneck.why}"
    return f"it is limited by {bottleneck.name.replace('_', ' ')}: {bottleneck.why}"


def _limit(who: str, record: TrialRecord, script: ScriptFacts | None) -> str:
    """`The baseline is limited by input: …`."""
    bottleneck = record.bottleneck
    assert bottleneck is not None
    if bottleneck.name == "balanced":
        return f"{who} is balanced: {bottleneck.why}."
    said = f"{who} is limited by {bottleneck.name.replace('_', ' ')}: {bottleneck.why}"
    top = record.ceilings
    if bottleneck.name == "input":
        if top is not None and top.by_input and top.by_compute:
            said += f"; the pipeline alone makes {top.by_input:,.0f} samples/s, the model could take "
            said += f"{top.by_compute:,.0f}"
        serial = _serial(record, script)
        return f"{said}.{serial}"
    return f"{said}."


def _serial(record: TrialRecord, script: ScriptFacts | None) -> str:
    """Which of the script's calls run serially."""
    sites = script.sites.get("num_parallel_calls", ()) if script is not None else ()
    if record.configuration.get("num_parallel_calls") != 0 or not sites:
        return ""
    return f" {_listed([str(each) for each in sites])} run{'s' if len(sites) == 1 else ''} serially."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _at_most(record: TrialRecord) -> list[str]:
    """What the pipeline's settings can gain at most, where that is known."""
    top, rate = record.ceilings, record.throughput
    if top is None or rate is None or not top.by_compute:
        return []
    most = top.by_compute / rate.value
    if most < WORTH_SAYING:
        return ["No setting of the input pipeline can make this training clearly faster: its steps hardly wait."]
    return [
        f"At this batch size and precision no setting of the input pipeline can make it more than ×{most:.2f} as "
        f"fast: the steps alone make {top.by_compute:,.0f} samples/s."
    ]
