"""What the environment and the user's file set by themselves, taken into the baseline. Pure.

The baseline is what the user would run anyway. Where importing their file sets a thread count or a dtype policy,
or the shell sets a variable that TensorFlow reads, that is a part of it, whether the workload names it or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.errors import WorkloadError
from autotune.executors.executor import WarmUp
from autotune.recipe.apply import environment
from autotune.record import Slice
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, Device, Stage, knobs_on
from autotune.stats.stability import MOST_RETRACES, MOST_SKIPPED, RETRACING_ADVICE
from autotune.workloads.workload import WorkloadFacts

NOTABLE_ENDS = 0.1
"""Share of its time that a training may spend between epochs without a word."""
SAY_HOW_LONG = "Let it say so: dataset.apply(tf.data.experimental.assert_cardinality(N))"
"""The usual way where a dataset is read from records or made by a generator; N elements."""


def as_imported(
    baseline: Configuration, facts: WorkloadFacts, *, where: str
) -> tuple[Configuration, tuple[str, ...]]:
    """The baseline with what was in force after the import, and a notice for each knob taken over.

    Args:
        baseline: What the workload names, and TensorFlow's defaults.
        facts: What the template found.
        where: The workload, for messages.

    Raises:
        WorkloadError: Importing sets what the workload's own `baseline` denies, or what no knob's value stands for.
    """
    notices = []
    for name, found in facts.in_force.items():
        if name not in baseline or baseline[name] == found:
            continue
        imported_too_early = KNOBS[name].stage is Stage.IMPORT
        if name in facts.baseline and found == KNOBS[name].default and not imported_too_early:
            continue  # the file sets nothing: the trials set what the workload names
        if imported_too_early and environment({name: baseline[name]}):  # the shell's, so not the file's
            if name in facts.baseline:
                continue  # the trials' templates get what the workload names
            notices.append(f"the environment sets {name}={format_value(found)}, so the baseline has it too")
        elif imported_too_early or name in facts.baseline or found not in KNOBS[name].domain:
            raise _set_by_file(name, found, baseline, where)
        else:
            notices.append(
                f"importing {where} sets {name}={format_value(found)}, so the baseline has it too; training "
                "code must call recipe.apply() after that import"
            )
        baseline = baseline.replace(**{name: found})
    return baseline, tuple(notices)


def _set_by_file(name: str, found: object, baseline: Configuration, where: str) -> WorkloadError:
    return WorkloadError(
        f"importing {where} sets {name} to {found!r}, and the baseline says {baseline[name]!r}",
        hint=f"{name} is a knob: take that line out of the file, and say Workload(baseline={{{name!r}: …}}) where "
        f"it should not be TensorFlow's default. It takes {KNOBS[name].domain.describe()}.",
    )


def refuse_knobs_that_cannot_act(facts: WorkloadFacts, *, where: str) -> None:
    """Refuse a baseline that names what its own dataset never hears of.

    Raises:
        WorkloadError: It does.
    """
    for name, value in facts.baseline.items():
        if (
            KNOBS[name].needs_dataset_config
            and value != KNOBS[name].default
            and not facts.dataset_takes_config
        ):
            raise WorkloadError(
                f"{where}: Workload(baseline=…) names {name}, which reaches the data only through dataset(config)",
                hint=f"Write `def dataset(config)` and use config.{name} there, or take {name} out of baseline.",
            )


def oddities(facts: WorkloadFacts, warm: WarmUp, device: Device) -> Iterator[str]:
    """A notice for each thing that the workload asks for and the timing leaves out."""
    exist = {each.name for each in knobs_on(device)}
    for name in facts.baseline:
        if name not in exist:
            yield f"Workload(baseline=…) names {name}, which does nothing on the {device}: left out"
    for name, value in warm.started.set_by_dataset.items():
        yield (
            f"the workload's dataset() sets {name}={format_value(value)} itself, so the baseline has it too, and it "
            "is not varied; take that line out to have it tuned"
        )
    if warm.started.endless and facts.validates:
        yield (
            "the training data has no end, so there are no epochs, and what validation costs is left out: a "
            "training with few steps_per_epoch will gain less than is claimed"
        )
    yield from _slow_ends(facts, warm)
    if warm.started.endless or warm.ready.timed_by == "epochs":
        return
    if warm.started.examples is None:
        yield (
            "the training data does not say how long it is, and counting took too long, so what lies between epochs is "
            f"left out, validation too: a training with short epochs will gain less than is claimed. {SAY_HOW_LONG}"
        )
    elif warm.started.validation_uncounted:
        yield (
            "the validation data does not say how long it is, and counting took too long: where epochs are timed by "
            f"steps, only its beginning is charged. {SAY_HOW_LONG}"
        )


def _slow_ends(facts: WorkloadFacts, warm: WarmUp) -> Iterator[str]:
    """A notice where much of the baseline's time passes between epochs."""
    ready, validation = warm.ready, facts.validates
    if ready.timed_by == "epochs":
        spent, epoch = ready.epoch_overhead_seconds, ready.epoch_seconds
    else:
        spent = None if ready.boundary is None else ready.boundary.seconds
        examples = warm.started.examples_per_epoch
        epoch = (
            None if ready.boundary is None or not examples else examples * ready.boundary.seconds_per_example
        )
        validation = False  # its cost is known apart
    if spent and epoch and not validation and spent > NOTABLE_ENDS * epoch:
        yield (
            f"the baseline spends {min(1.0, spent / epoch):.0%} of its time between epochs, where Keras makes a new "
            "iterator; persistent_iterator avoids that"
        )


def instabilities(slices: Sequence[Slice]) -> Iterator[str]:
    """A notice for each thing that makes the baseline, and so the user's own training, unstable.

    Args:
        slices: The baseline's own.
    """
    seconds, steps = sum(each.seconds for each in slices), sum(each.steps for each in slices)
    retraces = sum(each.retraces or 0 for each in slices)
    if retraces > MOST_RETRACES:
        yield (
            f"the workload retraces: {retraces} times in {seconds:.1f} s of the baseline after its warm-up; "
            f"configurations that do so as well are not refused for it. To mend it, {RETRACING_ADVICE}"
        )
    skipped = sum(each.skipped_steps or 0 for each in slices)
    if skipped > MOST_SKIPPED * steps:
        yield (
            f"the baseline's loss scale skips {skipped} of {steps} steps after its warm-up: its gradients overflow in "
            "float16. mixed_bfloat16 has no such limit"
        )
