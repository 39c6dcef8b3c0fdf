"""Whether two records are of the same training: a model of the same size, data of the same shape, the same call sites.

Moved lines, another learning rate or batch size, or a renamed script make no other training. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from autotune.data.facts import KnownWorkload, ScriptFacts, Site

_FIRST_AXIS = re.compile(r"shape=\((None|\d+)")  # of a tensor of the batch: the batch size, where it is fixed
_Key = tuple[str, str, str, int]


def first_difference(workload: KnownWorkload, other: KnownWorkload) -> str:
    """Return what first sets two trainings apart, with the call site; empty where they are the same.

    They differ where the baseline of one has not started.
    """
    return next(_differences(workload, other), "")


def _differences(workload: KnownWorkload, other: KnownWorkload) -> Iterator[str]:
    """Yield each difference in half a sentence."""
    if workload.keras is not other.keras:
        yield f"one trains with {workload.keras.label}, the other with {other.keras.label}"
    if workload.script is not None and other.script is not None:
        yield from _script_differences(workload, other)
    elif (workload.script is None) != (other.script is None):
        yield "one was tuned as a script, the other as a Workload"
    else:
        if workload.name != other.name:
            yield f"one is {workload.name}, the other {other.name}"
        if (workload.batched, workload.takes_config) != (other.batched, other.takes_config):
            yield "their dataset() batches or takes a config in one only"
    if workload.parameters is None or other.parameters is None or workload.element is None or other.element is None:
        yield "the baseline of one was never started, so its model and data are unknown"
        return
    if workload.parameters != other.parameters:
        yield f"their models have {workload.parameters:,} and {other.parameters:,} weights"
    elements = [_FIRST_AXIS.sub("shape=(batch", known.element or "") for known in (workload, other)]
    if elements[0] != elements[1] or workload.batch_ranks != other.batch_ranks:
        yield f"their batches are {elements[0]} and {elements[1]}"
    if workload.drop_remainder != other.drop_remainder:
        yield "one of them drops a smaller last batch"


def _script_differences(workload: KnownWorkload, other: KnownWorkload) -> Iterator[str]:
    """Yield the differences in how two scripts train, and in the calls that lead to the training."""
    scripts = [known.script for known in (workload, other) if known.script is not None]
    if scripts[0].trains is not scripts[1].trains:
        yield f"one trains by {scripts[0].trains}, the other by {scripts[1].trains}"
    calls = [_calls(script, f"{known.name}.py") for script, known in zip(scripts, (workload, other), strict=True)]
    for call, site in {**calls[0], **calls[1]}.items():
        if not all(call in of_script for of_script in calls):
            yield f"{site} leads to the training of one only"
    if list(calls[0]) != list(calls[1]):
        yield "their pipelines make the same calls in another order"


def _calls(script: ScriptFacts, own_file: str) -> dict[tuple[str, _Key], Site]:
    """Return the calls that lead to the training, by what they do and where; the script's own file has no name."""
    sites = {name: (getattr(script, name),) for name in ("fit_site", "compile_site", "step_function")}
    return {
        (name, ("" if site.file == own_file else site.key[0], *site.key[1:])): site
        for name, found in [*sites.items(), *sorted(script.sites.items())]
        for site in found
        if site is not None and name not in ("cache", "batched_map")  # not all runs know these
    }
