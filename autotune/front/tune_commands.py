"""The commands that train. Heavy modules are imported inside them, so that help and errors answer at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from autotune.data.errors import TuningInterruptedError
from autotune.front.app import app


@app.command(usage="Usage: autotune tune SCRIPT|WORKLOAD [OPTIONS] [-- ARGS]")
def tune(
    workload: str,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    budget: str | None = None,
    space: str | None = None,
    thorough: bool = False,
    trials: int | None = None,
    out: str | None = None,
    resume: str | None = None,
    seed: int = 0,
    min_gain: float = 0.02,
    trial_timeout: str | None = None,
    isolation: Literal["template", "spawn"] = "template",
    pairing: Literal["auto", "bracketed"] = "auto",
    max_batch: int | None = None,
    fixed_batch: bool = False,
    global_batch: int | None = None,
    memory_margin: float = 0.1,
    soak: str | None = None,
    objective: Literal["throughput", "energy"] = "throughput",
    profile: Literal["all", "finalists", "none"] = "finalists",
    fit: int | None = None,
    loss: str | None = None,
    allow_writes: bool = False,
    allow_cache: bool = False,
    train_samples: int | None = None,
    executor: Literal["local", "ray"] = "local",
    seats: int | None = None,
    devices: str | None = None,
    seat_devices: int = 1,
    all_seats: bool = False,
    ray_address: str | None = None,
    ray_upload: bool = False,
    wait: bool = False,
) -> int:
    """Find the fastest stable configuration, and write it as a recipe.

    Args:
        workload: A training script as it is, such as train.py or -m package.train. Or a Workload:
            path/to/file.py[:name] or package.module[:name]; the name defaults to `workload`. What follows `--` is
            handed to the file as its own arguments.
        args: The file's own arguments.
        budget: Wall-clock time for everything: 90s, 10m, 1h30m. When left out, the run ends as soon as the answer is
            settled, after ten minutes at most.
        space: A search-space file, or a shipped one: quick, cpu, gpu, gpu_thorough, several_gpus. Chosen by device when
            left out.
        thorough: Search the device's wider space, such as gpu_thorough.
        trials: At most so many trials in the search.
        out: The run directory; a new one below results/ when left out.
        resume: The directory of a run, ended or stopped: it goes on with all that was measured. A budget given with it
            is the time to go on with.
        seed: Makes the samples repeatable, given the same results.
        min_gain: Smallest gain worth a recommendation: 0.02 is two percent.
        trial_timeout: Time that one trial may take; planned from the baseline when left out.
        isolation: template: fork trials from a process that has imported everything. spawn: import afresh for each.
        pairing: auto: the baseline stays alive beside each candidate. bracketed: never two processes at once.
        max_batch: No batch size above this one is tried.
        fixed_batch: The batch size stays the baseline's.
        global_batch: Examples per update of the weights, kept while the batch size is tuned: gradients are accumulated.
        memory_margin: Share of the memory, host's and device's, that must stay free at the peak: 0.1 is ten percent.
        soak: Time at the end in which the winner trains without a pause and is watched for leaks and hangs, such as
            60s.
        objective: What is compared: throughput, samples per second; or energy, samples per joule of the GPUs.
        profile: Whose steps are profiled: all trials', the baseline's and the leaders' (finalists), or none.
        fit: Which model.fit of a script is tuned, from 1; the longest when left out.
        loss: Which number that a script's own training step returns is the loss: a key, or the place in a tuple.
        allow_writes: A script may write to files that exist, in each trial.
        allow_cache: Keeping what a script's maps have made in memory may be tried.
        train_samples: Samples that the long training will take, to say whether tuning is worth it; a script's epochs
            when left out.
        executor: local: trials run on this machine. ray: on a Ray cluster, see docs/clusters.md.
        seats: How many trials run at the same time, each on a part of the cores. With Ray, the most seats that are
            used.
        devices: GPUs of this machine on which trials run at the same time: all, or indices and UUIDs such as 0,1.
        seat_devices: GPUs that one trial uses.
        all_seats: Keep seats that slow one another down.
        ray_address: The cluster's address; RAY_ADDRESS, or a Ray of this machine's own, when left out.
        ray_upload: Ray copies the working directory to the hosts. Else they share a file system.
        wait: Wait until earlier runs on the same devices of this machine have ended. The budget begins then.
    """
    given = dict(locals())
    from autotune.front.closing import resume_command, show_recipe, show_usage
    from autotune.front.progress import Progress
    from autotune.stats.deciding import EndedBy
    from autotune.tuning.resume import to_repeat
    from autotune.tuning.tune import tune as run

    with Progress() as progress:
        try:
            recipe = run(**given, observe=progress)
        except KeyboardInterrupt as interrupt:
            hint = "Nothing was measured yet."
            if progress.directory and progress.directory.exists():
                again = resume_command(workload, progress.directory, to_repeat(progress.directory))
                hint = f"To go on with what was measured: {again}"
            raise TuningInterruptedError("interrupted", hint=hint) from interrupt
    assert progress.directory is not None
    path = progress.directory / "recipe.json"
    show_recipe(recipe, path)
    show_usage(recipe, path, tuned=workload, to_repeat=to_repeat(progress.directory))
    interrupted = recipe.evidence.ended_by is EndedBy.INTERRUPTED and not recipe.changes
    return TuningInterruptedError.exit_code if interrupted else 0


@app.command(usage="Usage: autotune run RECIPE [OPTIONS] SCRIPT [ARGS]")
def run(
    recipe: Path,
    script: str,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    skip_missing: bool = False,
    scale_learning_rate: Literal["sqrt", "linear"] | None = None,
    on_mismatch: Literal["warn", "error", "ignore"] = "warn",
    candidate: bool = False,
) -> Callable[[], int]:
    """Run a script with a recipe's values in the places where it was tuned.

    Its exit code, signals and standard input are the script's own.

    Args:
        recipe: A recipe.json of this script.
        script: The script, such as train.py or -m package.train. What follows it are its own arguments.
        args: The file's own arguments.
        skip_missing: Go on without a knob whose place in the script is gone.
        scale_learning_rate: Multiply the learning rate by the ratio of the batch sizes (linear), or by its root (sqrt).
        on_mismatch: What to do where this machine differs from the recipe's.
        candidate: Train with the best candidate of an undecided run, which is not confirmed to be faster.
    """
    from autotune.script.long_run import prepare_run

    return prepare_run(
        recipe,
        script,
        args or [],
        skip_missing=skip_missing,
        scale=scale_learning_rate,
        on_mismatch=on_mismatch,
        candidate=candidate,
    )


@app.command(usage="Usage: autotune verify RECIPE SCRIPT|WORKLOAD [OPTIONS] [-- ARGS]")
def verify(
    recipe: Path,
    workload: str,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    budget: str = "100s",
    seed: int = 0,
    isolation: Literal["template", "spawn"] = "template",
    memory_margin: float = 0.1,
) -> int:
    """Measure a recipe against its baseline again, here and now: does its claim hold?

    It holds (exit code 0). Or else (exit code 1) it is weaker: faster, but clearly by less than claimed; gone: no gain
    is shown, and clearly less than claimed; unstable: it failed, or broke a stability rule; undecided: too little was
    measured to tell, and the reason says what to do.

    Other exit codes: 2 wrong arguments or input, such as a recipe of another workload or baseline; 3 the
    baseline itself fails; 4 internal error; 130 interrupted.

    Args:
        recipe: A recipe.json.
        workload: path/to/file.py[:name] or package.module[:name], as for `autotune tune`. What follows `--` is handed
            to the file as its own arguments; those of the recipe when left out.
        args: The file's own arguments.
        budget: Wall-clock time for everything.
        seed: Of the order in which slices are taken.
        isolation: As for `autotune tune`.
        memory_margin: As for `autotune tune`: the share of memory that must stay free.
    """
    how = dict(locals())
    del how["recipe"], how["workload"]
    from autotune.data.options import seconds_of
    from autotune.front.closing import show_verification
    from autotune.front.progress import Progress
    from autotune.stats.deciding import ClaimResult
    from autotune.tuning.verify import verify as run

    with Progress(budget=seconds_of("budget", budget)) as progress:
        verification = run(recipe, workload, **how, observe=progress)
    show_verification(verification)
    return 0 if verification.finding is ClaimResult.HOLDS else 1
