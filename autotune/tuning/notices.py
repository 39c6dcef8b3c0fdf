"""Take the settings of the shell and of the user's file into the baseline, and tell what users should know. Pure.

The baseline is what the user would run anyway. It includes a thread count or dtype policy that importing the file
sets, and variables of the shell that TensorFlow reads, whether the workload names them or not.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

from autotune.data.errors import BudgetError, WorkloadError
from autotune.data.facts import NO_XLA, ScriptFacts, Trains, WorkloadFacts
from autotune.data.options import MIN_GAIN
from autotune.data.printable import duration, plural, time_in_words
from autotune.data.record import Slice, TrialRecord
from autotune.recipe.answer import LARGEST_BOUND
from autotune.runtime.executor import WarmUp
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import ALLOW_PRECISION, KNOBS, PRECISION_KNOBS, STRATEGY_KNOBS, Device, Stage
from autotune.stats.disturbance import gpu_load_of, load_of
from autotune.stats.intervals import process_prior
from autotune.stats.stability import MOST_RETRACES, MOST_SKIPPED, RETRACING_ADVICE
from autotune.tuning import costs
from autotune.tuning.policy import FEWEST_PROCESSES, gain_shown_in

WORTH_SHARE = 0.02  # of a training that tuning it may cost
LONG_BEFORE_SHARE = 1 / 3  # of a trial, which a script may take before it trains without a notice
LONG_BEFORE_SECONDS = 2.0  # of the same: less is not worth a change of the script
MUCH_OTHER_LOAD = 0.15  # share of the processor that others may take while the baseline is timed without a notice
NAMED_MINUTES = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 90, 120, 240, 480)  # budgets to name
SMALL_GAIN = 0.1  # as a share, that a budget which is named should show
NOTABLE_ENDS = 0.1  # share of its time that a training may spend between epochs without a notice
_SET_CARDINALITY = "set the cardinality: dataset.apply(tf.data.experimental.assert_cardinality(N))"


def adopt_imported_settings(
    baseline: Configuration, facts: WorkloadFacts, *, where: str
) -> tuple[Configuration, tuple[str, ...]]:
    """Return the baseline with what was in force after the import, and a notice for each knob taken over."""
    # Raises WorkloadError.
    notices = []
    for name, found in facts.in_force.items():
        if name not in baseline or baseline[name] == found:
            continue
        knob, named = KNOBS[name], name in facts.baseline
        at_import = knob.stage in (Stage.IMPORT, Stage.START)
        by_shell = at_import and knob.read(os.environ) != baseline[name]
        if knob.variable is not None and os.environ.get(knob.variable) == str(found):
            by_shell = not named  # what the workload names is set over it
            if named:
                continue
        if named and (by_shell or (found == knob.default and not at_import)):
            continue  # the file sets nothing, and the trials set what the workload names
        if not by_shell and (at_import or named or found not in knob.domain):
            raise WorkloadError(
                f"importing {where} sets {name}={found!r}, but the baseline has {baseline[name]!r}",
                hint=f"Remove that line: {name} is a knob. Set it in Workload(baseline={{{name!r}: …}}) instead. It "
                f"takes {knob.domain.describe()}.",
            )
        baseline = baseline.replace(**{name: found})
        setting = f"sets {name}={format_value(found)}, so the baseline has it too"
        if by_shell:
            notices.append(f"the environment {setting}")
        else:
            notices.append(f"importing {where} {setting}; training code must call recipe.apply() after that import")
    return baseline, tuple(notices)


def refuse_knobs_that_cannot_act(facts: WorkloadFacts, *, where: str) -> None:
    """Refuse a baseline that names a knob which its own dataset does not read. Raises WorkloadError."""
    for name, value in facts.baseline.items():
        knob = KNOBS[name]
        if knob.needs_dataset_config and value != knob.default and not facts.takes_config:
            raise WorkloadError(
                f"{where}: Workload(baseline=…) names {name}, which reaches the data only through dataset(config)",
                hint=f"Write `def dataset(config)` and use config.{name} there, or remove {name} from baseline.",
            )


def chosen_precision(baseline: Configuration) -> dict[str, str]:
    """Return the knobs of precision that do not vary because the workload has set them, and why."""
    chosen = {name: baseline[name] for name in PRECISION_KNOBS if name in baseline}
    return {
        name: f"the workload chooses {name}={format_value(value)}; {ALLOW_PRECISION}"
        for name, value in chosen.items()
        if value != KNOBS[name].default
    }


def not_varied_notes(not_reached: Mapping[str, str], devices: int = 1, device: Device = Device.CPU) -> Iterator[str]:
    """Yield a notice for each reason why knobs do not vary."""
    by_reason: dict[str, list[str]] = {}
    for name, why in not_reached.items():
        if device in KNOBS[name].devices and (devices > 1 or name not in STRATEGY_KNOBS):
            by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield f"not varied: {', '.join(names)}: {why}"


def script_notes(script: ScriptFacts, ready_seconds: float) -> Iterator[str]:
    """Yield notices of how a script is tuned; `ready_seconds` is the time until its baseline was warm."""
    if len({fit.site and fit.site.key for fit in script.fits}) > 1:
        chosen = script.fits[script.fit - 1]
        yield (
            f"the script calls fit {len(script.fits)} times; tuning the call in {chosen.line}. Earlier calls run three "
            "steps per trial. --fit N selects another"
        )
    if script.left_out:
        seconds = script.writing_seconds
        share = "no figure contains their time" if seconds is None else f"they add {seconds:.2g} s to an epoch"
        yield f"trials omit these writers: {', '.join(script.left_out)}; {share}"
    yield from script.batch_notes
    if script.ends_early:
        whole = plural(script.epochs or 1, "epoch")
        yield f"{script.ends_early} may end the training before its {whole}: no total time is claimed"
    if script.tunes_steps:
        steps = script.baseline["steps_per_execution"]
        yield f'the script compiles with steps_per_execution="auto": the baseline has {steps}, which Keras settled on'
    if script.baseline.get("jit_compile") is True and script.not_reached.get("jit_compile") == NO_XLA:
        yield f"the script compiles with jit_compile=True. {NO_XLA}: remove it"
    if script.shared_seconds:
        yield f"the script's first {script.shared_seconds:.0f} s, before TensorFlow starts, run once for all trials"
    if script.before_seconds > max(LONG_BEFORE_SECONDS, LONG_BEFORE_SHARE * ready_seconds):
        reason = f"{script.repeats_start}. Change that, or " if script.repeats_start else ""
        yield (
            f"the script runs {script.before_seconds:.0f} s before it trains, in every trial: {reason}save the "
            "prepared data to a file first, and load that file in the script"
        )
    if script.work_varies:
        yield (
            "the script calls the model a varying number of times per weight update. Speeds are in updates/s, and a "
            "gain smaller than their own variation is not claimed"
        )
    if script.trains is Trains.LOOP:
        yield (
            "the script has a custom training loop: losses are not compared with float32, and weights are checked "
            "once for NaN and infinity"
        )


def samples_of(script: ScriptFacts | None, examples: int | None) -> int | None:
    """Return the samples of a script's own training; None where that is not known, or it may end early."""
    if script is None or script.ends_early or not script.epochs or not examples:
        return None
    return script.epochs * examples


def worth_notes(training: str, whole: float, budget: float) -> Iterator[str]:
    """Say whether a budget is in proportion to the training.

    Args:
        training: The training, or one call of `fit`, of which a script may make many.
        whole: Seconds that it takes with the baseline.
        budget: Seconds.
    """
    takes = f"{training} takes {time_in_words(whole)} with the current settings"
    if budget > whole:
        yield f"{takes}, less than the budget: tuning pays off only for longer or repeated trainings"
    elif budget > WORTH_SHARE * whole:
        yield f"{takes}: the budget of {time_in_words(budget)} is {budget / whole:.0%} of that"


def budget_note(budget: float, baseline: TrialRecord, *, spent: float, min_gain: float = MIN_GAIN) -> str:
    """Say what gains a budget can show on this machine as it is now, and which longer one shows small gains.

    `spent` are the seconds until the `baseline` was timed, and those kept for the end. Raises BudgetError.
    """
    pair = costs.pair_seconds([baseline, baseline])
    least = costs.least_trial_seconds(baseline, Configuration(baseline.configuration), 0.0)
    trial = least or costs.start_seconds(baseline) + costs.LEAST_MEASURED_SECONDS
    claim = spent + trial + FEWEST_PROCESSES * pair
    named = [*NAMED_MINUTES, 60 * math.ceil(claim / 3600)]
    if budget < spent + trial:
        problem = f"the baseline takes {time_in_words(spent)} and one trial {time_in_words(trial)}"
        hint = f"Give --budget {next(minutes for minutes in named if 60 * minutes >= claim)}m or more."
        raise BudgetError(f"a budget of {time_in_words(budget)} is too short for one trial: {problem}", hint=hint)
    logs = [math.sqrt(2) * math.log(timed.examples / timed.seconds) for timed in baseline.slices]  # as of pairs
    is_busy = any(other_load(baseline.slices))
    known = [[[logs]], *([[]] if is_busy else [])]
    priors = (process_prior(trials, rounds=costs.rounds([baseline, baseline])) for trials in known)
    prior = max(priors, key=lambda prior: prior.deviation)  # few slices may not show that others disturb them

    def shown_in(seconds: float) -> float:
        gain = math.expm1(gain_shown_in(seconds, pair, prior, min_gain=min_gain))
        return math.ceil(100 * gain) / 100 if seconds >= claim and gain <= LARGEST_BOUND else math.inf

    here = shown_in(budget)
    text = "this machine is busy: " if is_busy else "on this machine as it is now, "
    text += f"{duration(budget)} {f'can show gains above {here:.0%}' if here < math.inf else 'can show no gain'}"
    longer = {minutes: shown_in(60.0 * minutes) for minutes in named if 60 * minutes > budget}
    for wanted in (SMALL_GAIN, min(here / 2, LARGEST_BOUND)) if here > SMALL_GAIN else ():
        for minutes, gain in longer.items():
            if gain <= wanted:
                return f"{text}; --budget {minutes}m shows {gain:.0%}"
    return text


def baseline_warnings(facts: WorkloadFacts, warm: WarmUp, device: Device) -> Iterator[str]:
    """Yield a notice for each thing that the workload asks for and the timing leaves out."""
    started = warm.started
    for name in facts.baseline:
        if device not in KNOBS[name].devices:
            yield f"Workload(baseline=…) names {name}, which does nothing on the {device}: omitted"
    if facts.baseline.get("jit_compile") is True and not started.jit_compile:
        yield (
            "Workload(baseline=…) names jit_compile=true, but Keras turns XLA off for this model (a layer without "
            "support, run_eagerly, or op determinism): the baseline is without it"
        )
    for text in started.not_knobs:
        if facts.script is not None and text.startswith("tf."):
            continue  # the script's own
        yield f"{text} is in force in all trials, the baseline's too: set it in your training as well"
    for name, value in started.set_by_dataset.items():
        yield (
            f"the workload's dataset() sets {name}={format_value(value)} itself: the baseline has it, and it is not "
            "varied; remove that line to have it tuned"
        )
    script = facts.script
    if script is None or (script.fit_calls == 1 and "persistent_iterator" not in script.not_reached):
        yield from _slow_ends(facts, warm)
    if started.endless:
        if facts.validates:
            yield (
                "the training dataset is infinite, so there are no epochs and validation is not measured: a training "
                "with few steps_per_epoch gains less than claimed"
            )
    elif warm.ready.timed_by == "epochs":
        return
    elif started.examples is None:
        yield (
            "the training dataset has unknown cardinality, and counting it took too long. The time between epochs and "
            "validation is therefore not measured: a training with short epochs gains less than claimed. To "
            f"fix this, {_SET_CARDINALITY}"
        )
    elif started.validation_uncounted:
        yield (
            "the validation dataset has unknown cardinality, and counting it took too long: if epochs are timed by "
            "steps, only its beginning counts. For an infinite dataset, pass validation_steps to fit(). Otherwise "
            f"{_SET_CARDINALITY}"
        )


def _slow_ends(facts: WorkloadFacts, warm: WarmUp) -> Iterator[str]:
    """Yield a notice if much of the baseline's time passes between epochs, validation not counted."""
    ready, examples = warm.ready, warm.started.examples_per_epoch
    spent, epoch = ready.epoch_overhead_seconds, ready.epoch_seconds
    if ready.timed_by == "steps":
        if ready.boundary is None or not examples:
            return
        spent, epoch = ready.boundary.seconds, examples * ready.boundary.seconds_per_example
    elif facts.validates:
        return
    if spent and epoch and spent > NOTABLE_ENDS * epoch:
        yield (
            f"the baseline spends {min(1.0, spent / epoch):.0%} of its time between epochs, where Keras makes a new "
            "iterator; persistent_iterator avoids that"
        )


def refit_notes(script: ScriptFacts | None, slices: Sequence[Slice]) -> Iterator[str]:
    """Yield a notice if much of the baseline's time passes between calls of `fit`."""
    charged = sum(measured.charged_seconds for measured in slices)
    share = charged / max(1e-9, charged + sum(measured.seconds for measured in slices))
    if script is not None and script.fit_site is not None and share > NOTABLE_ENDS:
        yield (
            f"{script.fit_site} is called in a loop, and {share:.0%} of the baseline's time is spent between its "
            "calls, which counts. One call with more epochs would save fit's part of that"
        )


def other_load(slices: Sequence[Slice]) -> Iterator[str]:
    """Yield a notice for the processor, and for the GPU, if others take much of it while the baseline trains."""
    for device, loads in (("processor", map(load_of, slices)), ("GPU", map(gpu_load_of, slices))):
        known = [load for load in loads if load is not None]
        if known and (share := statistics.median(known)) > MUCH_OTHER_LOAD:
            yield (
                f"other processes take {share:.0%} of the {device} while the baseline trains: end them, or tune later"
            )


def instabilities(slices: Sequence[Slice]) -> Iterator[str]:
    """Yield a notice for each thing that makes the baseline, and so the user's own training, unstable."""
    seconds, steps = sum(measured.seconds for measured in slices), sum(measured.steps for measured in slices)
    retraces = sum(measured.retraces or 0 for measured in slices)
    if retraces > MOST_RETRACES:
        yield (
            f"the workload retraces: {retraces} times in {seconds:.1f} s of the baseline after its warm-up; "
            f"configurations are not rejected for this. To fix it, {RETRACING_ADVICE}"
        )
    skipped = sum(measured.skipped_steps or 0 for measured in slices)
    if skipped > MOST_SKIPPED * steps:
        yield (
            f"the baseline's loss scale skips {skipped} of {steps} steps after its warm-up: its gradients overflow in "
            "float16. mixed_bfloat16 has no such limit"
        )
