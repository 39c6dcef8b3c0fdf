"""Say how to go on after a run: with its recipe, what limits the training, and what could still help."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from autotune.data.errors import RunDirectoryError
from autotune.data.facts import ScriptFacts, SlowPart
from autotune.data.figures import Bottleneck
from autotune.data.printable import duration, one_line
from autotune.data.record import Phase, TrialRecord
from autotune.data.run_directory import RunDirectory, options_of
from autotune.recipe.answer import Answer, Command, CommandName
from autotune.recipe.apply import environment
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration
from autotune.stats.bottleneck import CEILING_RATIO, INPUT_MODERATE, MAIN_SHARE, NOT_INSTALLED
from autotune.stats.deciding import Verdict


def answer_at(recipe: Recipe, path: Path, tuned: str) -> Answer:
    """Return the answer with its commands, which name the workload as `tuned`.

    They train with the recipe in a file, or continue its run.
    """
    script, seconds, run = recipe.workload.script, recipe.evidence.go_on_seconds, path.parent
    is_baseline = not recipe.changes and "global_batch" not in recipe.baseline
    go_on = [] if seconds is None else [resume_command(tuned, run, seconds=seconds)]
    steps: list[tuple[CommandName, str, Sequence[str]]]
    if seconds is not None and recipe.evidence.verdict is Verdict.UNDECIDED:
        steps = [("go on", f"To continue for about {duration(seconds)} with everything measured so far:", go_on)]
        candidate, least = recipe.candidate, 1 + recipe.evidence.min_gain
        if candidate is not None and candidate.may_be_faster and candidate.speedup.value >= least:
            command = _variant(recipe, run, tuned, "candidate")
            steps.append(("candidate", "To train with the best candidate, which is not confirmed:", [command]))
    elif is_baseline and script is not None:
        steps = [("", "The recipe is the baseline: run the script as it is.", [])]
    elif is_baseline:
        uncovered = "NumPy arrays passed to fit, or a tf.distribute strategy: they were not measured."
        steps = [("", "The recipe is the baseline. Training code that trains like it needs no change.", [])]
        steps += [("", f"This does not cover {uncovered}", [])]
    elif script is None:
        steps = [("", "In your training code:", usage(recipe, path, tuned))]
    else:
        steps = [("train", "To train with it:", usage(recipe, run, tuned))]
        steps += [("edit", "To make it permanent:", [shlex.join(["autotune", "show", str(run), "--diff", tuned])])]
    if seconds is not None and recipe.evidence.verdict is not Verdict.UNDECIDED:
        steps.append(("go on", f"To measure what there was no time for, in about {duration(seconds)} more:", go_on))
    larger = recipe.larger_batch
    sizes = [Configuration(of).update_size for of in (recipe.configuration, recipe.baseline)]
    if larger is not None and (larger.confirmed if sizes[0] == sizes[1] else recipe.same_training is not None):
        other = "larger-batch" if sizes[0] == sizes[1] else "same-training"
        command = _variant(recipe, run, tuned, other)
        steps.append(("other", f"To take the {other.replace('-', ' ')} instead:", [command]))
    commands = [Command(name=name, heading=heading, lines=tuple(lines)) for name, heading, lines in steps]
    return recipe.answer.model_copy(update={"commands": tuple(commands)})


def _variant(recipe: Recipe, path: Path, tuned: str, option: str) -> str:
    """Return the line that trains with another answer of a recipe: `candidate`, `larger-batch` or `same-training`."""
    first = usage(recipe, path, tuned)[0]
    if recipe.workload.script is not None:
        return first.replace("autotune run", f"autotune run --{option}", 1)
    return first.replace(".apply()", f".with_{option.replace('-', '_')}().apply()", 1)


def resume_command(tuned: str, directory: Path, *, seconds: float | None = None) -> str:
    """Return the shell command that continues a run: for so many seconds, or for the rest of its own budget."""
    words = ["autotune", "tune", tuned, "--resume", str(directory)]
    words += [] if seconds is None else ["--budget", f"{seconds:.0f}s"]
    if os.path.exists(directory / "run.json"):
        with contextlib.suppress(RunDirectoryError):  # the command reports the damage
            words += options_of(RunDirectory(directory).read_run()).to_repeat
    return one_line(shlex.join(words))


# ---------------------------------------------------------------------------------------------- what limits a training


MOST_CAUSES = 2
WORTH_SAYING = 1.05  # the least upper bound on a gain that is worth a sentence
GOOD_SCALING = 0.7  # share of its devices' speed; a training that reaches less gets a notice
LIMITS = {
    "input": "Input-bound",
    "launch": "Launch-bound",
    "compute": "Compute-bound",
    "memory_bandwidth": "Memory-bound",
    "communication": "Communication-bound",
}
SURELY_WAITS = 0.4  # share of a step that waits for input, where the pipeline and the step alone were not timed
SAVED = 0.25  # share of the time that a change must surely save before it names the limit
_PIPELINE = frozenset(
    [
        "batched_map",
        "num_parallel_calls",
        "prefetch",
        "prefetch_to_device",
        "data_threads",
        "cache",
        "workers",
        "use_multiprocessing",
        "max_queue_size",
    ]
)
_CALLS = frozenset({"steps_per_execution", "persistent_iterator", "data_autotune"})
_HELPS = {  # knobs that could help against a limit, first what usually gains most
    "input": ("batched_map", "num_parallel_calls", "prefetch", "data_threads", "persistent_iterator"),
    "launch": ("steps_per_execution", "jit_compile", "batch_size"),
    "compute": ("precision", "jit_compile", "batch_size"),
    "memory_bandwidth": ("jit_compile", "precision"),
    "communication": ("batch_size",),
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


def diagnose(baseline: TrialRecord, trials: Sequence[TrialRecord] = ()) -> Bottleneck:
    """Return the limit of the baseline, by its own figures and by the trials' changes; `unknown` unless they show it.

    A wait for input counts where the pipeline alone is slower than the step alone, or where it takes most of the step.
    What a trial surely saved counts for more than what was seen of the steps.
    """
    seen = baseline.bottleneck or Bottleneck(name="unknown", why="neither its input wait nor its calls were measured")
    top, waits = baseline.ceilings, baseline.input_wait_fraction
    by_input, by_compute = (top.by_input, top.by_compute) if top is not None else (None, None)
    ratio = by_input / by_compute if by_input and by_compute else None
    if seen.name == "input":
        is_sure = ratio < 1 if ratio is not None else max(waits or 0.0, seen.share or 0.0) >= SURELY_WAITS
        if not is_sure:
            seen = seen.model_copy(update={"name": "unknown"})
    elif (waits or 0.0) >= SURELY_WAITS and (ratio is None or ratio < CEILING_RATIO):
        # A profile does not see the wait of a generator or a PyDataset.
        seen = Bottleneck(name="input", share=waits, why=f"the step waits for input {waits:.0%} of its time")
    feeds_fast = ratio >= CEILING_RATIO if ratio is not None else waits is not None and waits < INPUT_MODERATE
    usual = Configuration(baseline.configuration)
    for trial in sorted(trials, key=lambda trial: trial.phase is Phase.CONFIRM):
        changed, speedup = Configuration(trial.configuration).differences(usual).keys(), trial.speedup
        if not trial.outcome.measured or speedup is None or not changed:
            continue
        saved = 1 - 1 / speedup.low if speedup.low > 1 else 0.0
        why = f"{Configuration(trial.configuration).describe(usual)} alone gave {speedup.shown()}"
        if saved >= SAVED and changed <= _PIPELINE and saved > (seen.share or 0.0):
            seen = Bottleneck(name="input", share=saved, why=why)
        is_of_calls = changed <= (_CALLS | _PIPELINE if feeds_fast else {"steps_per_execution"})
        if saved >= SAVED and is_of_calls and "steps_per_execution" in changed:
            if seen.name not in LIMITS or saved >= MAIN_SHARE > (seen.share or 0.0):
                seen = Bottleneck(name="launch", share=saved, why=why)
        elif changed == {"steps_per_execution"} and speedup.high < WORTH_SAYING and baseline.profile is None:
            seen = seen.model_copy(update={"name": "unknown" if seen.name == "launch" else seen.name})
    return seen if seen.name in LIMITS else Bottleneck(name="unknown", why=seen.why)


def advice(
    baseline: TrialRecord,
    recommended: TrialRecord | None,
    script: ScriptFacts | None,
    trials: Sequence[TrialRecord] = (),
    spread: TrialRecord | None = None,
    unreached: Collection[str] = (),
) -> list[str]:
    """Say what limits the training as it is, or that this cannot be told; then what could be gained, and what is left.

    There are three sentences with figures at most, and one on a profile that could not be read. `spread` is the trial
    on several devices that scales best, or the recommended one. Knobs that are `unreached` cannot act on this workload.
    """
    limit = diagnose(baseline, trials)
    profiles = [record.profile for record in (baseline, recommended) if record is not None]
    is_unread = any(profile is not None and profile.reason == NOT_INSTALLED for profile in profiles)
    causes = _causes(baseline, script, trials, limit)
    own = [what for kind, what in causes if kind == limit.name][:MOST_CAUSES]
    others = [
        f"{what[0].upper() if '()' not in what.split()[0] else what[0]}{what[1:]}."
        for kind, what in causes
        if kind != limit.name
    ]
    said = others[: MOST_CAUSES - len(own)]
    if limit.name in LIMITS:
        alone = _alone(baseline) if limit.name == "input" else ""
        said.insert(0, f"{LIMITS[limit.name]}: {'; '.join([*own, limit.why + alone])}.")
    elif not said:
        hint = ": `pip install xprof` lets the next run tell" if is_unread else ""
        said, is_unread = [f"The bottleneck is unknown ({limit.why}){hint}."], False
    share = None if spread is None else spread.scaling_efficiency
    if spread is not None and share is not None and share < GOOD_SCALING:
        said.append(
            f"On {spread.configuration['replicas']} devices the training reaches {share:.0%} of linear scaling: "
            "a larger batch or fewer replicas would spend less time on summing gradients."
        )
    said += _at_most(baseline)
    now = Bottleneck(name="unknown", why="") if recommended is None else diagnose(recommended)
    if recommended is not None and now.name in LIMITS:
        usual = Configuration(baseline.configuration)
        done = {name for name, values in _IN_FORCE.items() if recommended.configuration.get(name) in values}
        done.update(unreached, *(Configuration(trial.configuration).differences(usual) for trial in trials))
        sites = {} if script is None else script.sites
        words = [
            _IN_WORDS.get(name, name) + (f" ({sites[name][0]})" if sites.get(name) else "")
            for name in _HELPS[now.name]
            if name not in done
        ]
        left = f"; not tried yet: {', '.join(words)}" if words else ""
        said.append(f"With the recipe it is {LIMITS[now.name].lower()}: {now.why}{left}.")
    if is_unread:
        return [*said[:3], "Install xprof (`pip install xprof`) to tell compute from memory bandwidth in the next run."]
    return said[:3]


def _causes(
    record: TrialRecord, script: ScriptFacts | None, trials: Sequence[TrialRecord], limit: Bottleneck
) -> list[tuple[str, str]]:
    """Return the slow parts of the script as written: the limit that each makes, and its line; the slowest first."""
    seen = limit.share or 0.0 if limit.name == "input" else 0.0  # by a profile, or by what a change has saved
    waits = max(record.input_wait_fraction or 0.0, seen)
    usual, gains = Configuration(record.configuration), dict[str, float]()
    for trial in sorted(trials, key=lambda trial: trial.phase is Phase.CONFIRM):
        changed = Configuration(trial.configuration).differences(usual)
        if len(changed) == 1 and trial.outcome.measured and trial.speedup is not None:
            gains[next(iter(changed))] = trial.speedup.value
    parts = (
        []
        if script is None
        else [part for part in script.slow_parts if waits >= INPUT_MODERATE or part.limit != "input"]
    )
    if record.faults_often:
        what = f"each step has {record.page_faults_per_step:,.0f} page faults: the memory that it frees goes back to "
        place = sum(part.limit != "memory_bandwidth" for part in parts)
        parts.insert(place, SlowPart(what=f"{what}the kernel", limit="memory_bandwidth", knob="keep_freed_memory"))
    return [
        (part.limit, part.what + (f" ({part.knob} alone gave ×{gains[part.knob]:.2f})" if part.knob in gains else ""))
        for part in sorted(parts, key=lambda part: -waits if part.limit == "input" else waits - 1)
    ]


def _alone(record: TrialRecord) -> str:
    """Say how fast the pipeline and the model are alone, where the pipeline is slower."""
    top = record.ceilings
    # A training may also wait for a fast pipeline: at the beginning of epochs, and at each short step.
    if top is None or not top.by_input or not top.by_compute or top.by_input >= top.by_compute:
        return ""
    return f"; the pipeline alone reaches {top.by_input:,.0f} samples/s, the model alone {top.by_compute:,.0f}"


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
