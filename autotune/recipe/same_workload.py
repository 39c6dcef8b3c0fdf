"""Whether two records are of the same training: a model of the same size, data of the same shape, the same call sites.

Moved lines, another learning rate or batch size, or a renamed script make no other training. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from autotune.data.facts import KerasVersion, ScriptFacts, Site

_FIRST_AXIS = re.compile(r"shape=\((None|\d+)")  # of a tensor of the batch: the batch size, where it is fixed
_Key = tuple[str, str, str, int]


class KnownWorkload(Protocol):
    """The facts by which a training is known again, as a run's record and a recipe hold them."""

    @property
    def name(self) -> str:
        """See `WorkloadRecord`."""

    @property
    def batched(self) -> bool:
        """See `WorkloadRecord`."""

    @property
    def drop_remainder(self) -> bool:
        """See `WorkloadRecord`."""

    @property
    def takes_config(self) -> bool:
        """See `WorkloadRecord`."""

    @property
    def element(self) -> str | None:
        """See `WorkloadRecord`."""

    @property
    def batch_ranks(self) -> tuple[int | None, ...] | None:
        """See `WorkloadRecord`."""

    @property
    def parameters(self) -> int | None:
        """See `WorkloadRecord`."""

    @property
    def keras(self) -> KerasVersion:
        """See `WorkloadRecord`."""

    @property
    def script(self) -> ScriptFacts | None:
        """See `WorkloadRecord`."""


def is_same_workload(workload: KnownWorkload, other: KnownWorkload) -> bool:
    """Return whether both are of the same training. False where the baseline of one has not started."""
    return next(_differences(workload, other), None) is None


def first_difference(workload: KnownWorkload, other: KnownWorkload) -> str:
    """Return what first sets two trainings apart, with the call site; empty where they are the same."""
    return next(_differences(workload, other), "")


def _differences(workload: KnownWorkload, other: KnownWorkload) -> Iterator[str]:
    """Yield each difference in half a sentence."""
    if workload.keras is not other.keras:
        yield f"one trains with {workload.keras.label}, the other with {other.keras.label}"
    if workload.script is not None and other.script is not None:
        yield from _script_differences(workload, other, workload.script, other.script)
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


def _script_differences(
    workload: KnownWorkload, other: KnownWorkload, script: ScriptFacts, other_script: ScriptFacts
) -> Iterator[str]:
    """Yield the differences in how two scripts train, and in the calls that lead to the training."""
    if script.trains is not other_script.trains:
        yield f"one trains by {script.trains}, the other by {other_script.trains}"
    own_files = f"{workload.name}.py", f"{other.name}.py"
    for place in ("fit_site", "compile_site", "step_function"):
        sites: list[Site | None] = [getattr(facts, place) for facts in (script, other_script)]
        keys = [None if site is None else _key(site, own) for site, own in zip(sites, own_files, strict=True)]
        if keys[0] != keys[1]:
            shown = [str(site or "nothing") for site in sites]
            yield f"where one has {shown[0]}, the other has {shown[1]}"
    pipelines = _pipeline(script, own_files[0]), _pipeline(other_script, own_files[1])
    for (knob, key), site in [*pipelines[0].items(), *pipelines[1].items()]:
        if not all((knob, key) in pipeline for pipeline in pipelines):
            yield f"{site} leads to the training of one only"
    if list(pipelines[0]) != list(pipelines[1]):
        yield "their pipelines make the same calls in another order"


def _pipeline(script: ScriptFacts, own_file: str) -> dict[tuple[str, _Key], Site]:
    """Return the calls that lead to the training, by knob and position."""
    return {
        (knob, _key(site, own_file)): site
        for knob in sorted(script.sites)
        for site in script.sites[knob]
        if knob != "cache"  # only a run with --allow-cache knows it
    }


def _key(site: Site, own_file: str) -> _Key:
    """Return a call site's position; the script's own file has no name."""
    return ("" if site.file == own_file else site.file, *site.key[1:])
