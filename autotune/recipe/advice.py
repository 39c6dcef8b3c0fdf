"""Say how to use a recipe, what limits a training, and what could still help. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from autotune.data.facts import ScriptFacts, SlowPart
from autotune.data.record import TrialRecord
from autotune.recipe.apply import environment
from autotune.stats.bottleneck import INPUT_MODERATE, NOT_INSTALLED

if TYPE_CHECKING:
    from autotune.recipe.recipe import Recipe

MOST_CAUSES = 2
WORTH_SAYING = 1.05  # the least upper bound on a gain that is worth a sentence
GOOD_SCALING = 0.7  # share of its devices' speed; a training that reaches less gets a notice
_HELPS = {  # knobs that could help against a limit
    "input": ("batched_map", "num_parallel_calls", "prefetch", "data_threads", "persistent_iterator"),
    "launch": ("steps_per_execution", "jit_compile", "batch_size"),
    "compute": ("precision", "jit_compile", "batch_size"),
    "memory_bandwidth": ("jit_compile", "precision"),
    "communication": ("batch_size",),
    "compute_or_memory": ("precision", "jit_compile", "batch_size"),
}
_IN_WORDS = {
    "batched_map": "a map of whole batches",
    "num_parallel_calls": "more num_parallel_calls",
    "steps_per_execution": "more steps_per_execution",
    "jit_compile": "XLA",
    "batch_size": "a larger batch",
    "precision": "another precision",
}
_IN_FORCE = {"jit_compile": (True,), "precision": ("mixed_bfloat16", "mixed_float16")}  # nothing more to try


def usage(recipe: Recipe, path: Path, tuned: str) -> list[str]:
    """Return the command that trains with a recipe, or the lines that training code needs; `tuned`: the workload."""
    if recipe.workload.script is not None:
        given = " ".join(map(shlex.quote, recipe.workload.args))
        return [f"autotune run {shlex.quote(str(path))} {shlex.quote(tuned)} {given}".rstrip()]
    text = str(path)  # as a literal: code to be copied must stay that line, whatever the file is called
    literal = f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)
    before = "import tensorflow" if environment(recipe.configuration) else "the first tensor, dataset or model"
    compiles = "recipe.compile(model, optimizer=…, loss=…)"
    if recipe.configuration.get("strategy", "none") != "none":
        compiles = f"with recipe.scope():\n    model = make_model()\n    {compiles}"
    makes = "dataset = make_dataset(recipe.dataset_config)    # as dataset(config) in the workload"
    return [
        f"recipe = autotune.Recipe.load({literal}).apply()    # before {before}",
        *compiles.splitlines(),
        *([makes] if recipe.workload.takes_config else []),
        "recipe.fit(model, dataset, epochs=…)",
    ]


def advice(
    baseline: TrialRecord,
    recommended: TrialRecord | None,
    script: ScriptFacts | None,
    spread: TrialRecord | None = None,
    unreached: Collection[str] = (),
    gains: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Say why the training is slow as it is, what could be gained at most, and what limits the recommendation.

    There are three sentences with figures at most, and one on a profile that could not be read. `spread` is the trial
    on several devices that scales best, or the recommended one. Knobs that are `unreached` cannot act on this workload.
    `gains`: the speed-up that a knob showed by itself.
    """
    said = _causes(baseline, script, gains)
    limit, now = baseline.bottleneck, recommended.bottleneck if recommended is not None else None
    if said:
        pass
    elif limit is not None and limit.name == "balanced":
        said.append(f"The baseline is balanced: {limit.why}.")
    elif limit is not None and limit.name != "unknown":
        alone = _alone(baseline) if limit.name == "input" else ""
        said.append(f"The baseline is limited by {limit.name.replace('_', ' ')}: {limit.why}{alone}.")
    share = None if spread is None else spread.scaling_efficiency
    if spread is not None and share is not None and share < GOOD_SCALING:
        said.append(
            f"On {spread.configuration['replicas']} devices the training reaches {share:.0%} of linear scaling: "
            "a larger batch or fewer replicas would spend less time on summing gradients."
        )
    said += _at_most(baseline)
    if now is not None and now.name == "balanced":
        said.append(f"With the recipe the training is balanced: {now.why}.")
    elif recommended is not None and now is not None and now.name != "unknown":
        in_force = {name for name, values in _IN_FORCE.items() if recommended.configuration.get(name) in values}
        words = [_IN_WORDS.get(name, name) for name in _HELPS[now.name] if name not in in_force.union(unreached)]
        helps = f"; {_listed(words, 'or')} could help further" if words else ""
        said.append(f"With the recipe it is limited by {now.name.replace('_', ' ')}: {now.why}{helps}.")
    profiles = [record.profile for record in (baseline, recommended) if record is not None]
    if any(profile is not None and profile.reason == NOT_INSTALLED for profile in profiles):
        return [*said[:3], "Install xprof (`pip install xprof`) to tell compute from memory bandwidth in the next run."]
    return said[:3]


def _causes(record: TrialRecord, script: ScriptFacts | None, gains: Mapping[str, float]) -> list[str]:
    """Say what is slow as the script is written, two parts at most: first what takes more of a step."""
    waits, said, why = record.input_wait_fraction or 0.0, list[str](), ""
    if waits >= INPUT_MODERATE and record.bottleneck is not None:
        why = record.bottleneck.why + _alone(record)
    parts = [] if script is None else [part for part in script.slow_parts if why or not part.of_input]
    if record.faults_often:
        what = f"each step has {record.page_faults_per_step:,.0f} page faults: the memory that it frees goes back to "
        place = sum(part.of_input or part.knob == "graph_step" for part in parts)
        parts.insert(place, SlowPart(what=f"{what}the kernel", of_input=False, knob="keep_freed_memory"))
    for part in sorted(parts, key=lambda part: -waits if part.of_input else waits - 1)[:MOST_CAUSES]:
        what = part.what if part.what.split()[0].endswith("()") else part.what[0].upper() + part.what[1:]
        known = [why] if part.of_input and not any(why in sentence for sentence in said) else []
        if part.knob in gains:
            known.append(f"{part.knob} alone gave ×{gains[part.knob]:.2f}")
        said.append(f"{what}{': ' if known else ''}{'; '.join(known)}.")
    return said


def _alone(record: TrialRecord) -> str:
    """Say how fast the pipeline and the model are alone, where the pipeline is slower."""
    top = record.ceilings
    # A training may also wait for a fast pipeline: at the beginning of epochs, and at each short step.
    if top is None or not top.by_input or not top.by_compute or top.by_input >= top.by_compute:
        return ""
    return f"; the pipeline alone reaches {top.by_input:,.0f} samples/s, the model alone {top.by_compute:,.0f}"


def _listed(names: Sequence[str], last: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def _at_most(record: TrialRecord) -> list[str]:
    """Say what the pipeline's settings can gain at most, where that is known."""
    top, rate = record.ceilings, record.throughput
    if top is None or rate is None or not top.by_compute:
        return []
    most = top.by_compute / rate.value
    if most < WORTH_SAYING:
        return ["Input tuning cannot make this training clearly faster: its steps hardly wait for input."]
    return [
        f"At this batch size and precision input tuning can gain ×{most:.2f} at most: the steps alone reach "
        f"{top.by_compute:,.0f} samples/s."
    ]
