"""The commands. Heavy modules are imported inside them, so that help and errors answer at once."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from autotune.data.errors import ArgumentError, RunDirectoryError, TuningInterruptedError
from autotune.data.options import MEMORY_MARGIN, take_options
from autotune.data.printable import plural
from autotune.machine.doctor import Level, diagnose, first_fix

if TYPE_CHECKING:
    import pandas

    from autotune.script.long_run import PreparedRun

app = App(
    name="autotune",
    help="Finds the fastest stable way to run a TensorFlow training on this machine.",
    help_epilogue="With --debug, an error shows its traceback.",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    help_format="plaintext",
)


@app.command(usage="Usage: autotune tune SCRIPT|WORKLOAD [OPTIONS] [-- ARGS]")
@partial(take_options, as_text=True)
def tune(
    workload: str,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    out: str | None = None,
    resume: str | None = None,
    wait: bool = False,
    json: bool = False,
    **options: Any,
) -> int:
    """Find the fastest stable configuration, and write it as a recipe.

    Args:
        workload: A training script as it is, such as train.py or -m package.train. Or a Workload:
            path/to/file.py[:name] or package.module[:name]; the name defaults to `workload`. The file gets what
            follows `--` as its own arguments.
        args: The file's own arguments.
        options: See `Options`.
        out: The run directory; a new one below results/ when left out.
        resume: The directory of a run, ended or stopped: it continues with all that was measured. A budget given with
            it is the time to continue for.
        wait: Wait until earlier runs on the same devices of this machine have ended. The budget begins then.
        json: Print the result as JSON (docs/json.md); progress goes to standard error.
    """
    from autotune.front.closing import resume_command, show_recipe, show_usage
    from autotune.front.console import Progress, messages, terminal
    from autotune.front.tune import tune as tune_workload
    from autotune.recipe.advice import usage
    from autotune.stats.deciding import EndedBy
    from autotune.tuning.resume import to_repeat

    with Progress(messages() if json else terminal()) as progress:
        try:
            recipe = tune_workload(workload, args=args, out=out, resume=resume, wait=wait, observe=progress, **options)
        except KeyboardInterrupt as interrupt:
            hint = "Nothing was measured yet."
            if progress.directory and progress.directory.exists():
                again = resume_command(workload, progress.directory, to_repeat(progress.directory))
                hint = f"To continue the run: {again}"
            raise TuningInterruptedError("interrupted", hint=hint) from interrupt
    assert progress.directory is not None
    path = progress.directory / "recipe.json"
    again, seconds = to_repeat(path.parent), recipe.evidence.go_on_seconds
    if json:
        from autotune.front.documents import print_document

        print_document(
            "tune",
            run=str(path.parent),
            recipe_file=str(path),
            recipe=recipe,
            use=usage(recipe, path, workload) if recipe.changes else [],
            go_on=None if seconds is None else resume_command(workload, path.parent, again, seconds=seconds),
        )
    else:
        show_recipe(recipe, path)
        show_usage(recipe, path, tuned=workload, to_repeat=again)
    interrupted = recipe.evidence.ended_by is EndedBy.INTERRUPTED and not recipe.changes
    return TuningInterruptedError.exit_code if interrupted else 0


@app.command
def demo(*, budget: str = "3m", json: bool = False) -> int:
    """Tune a small training that comes with autotune, to show what a run looks like.

    It writes the training, train_digits.py, and results/ to the current directory.

    Args:
        budget: Wall-clock time for everything.
        json: As for `autotune tune`.
    """
    from autotune.front.demo import copy_example

    return tune(copy_example(), budget=budget, json=json)


@app.command(usage="Usage: autotune run RECIPE [OPTIONS] [SCRIPT [ARGS]]")
def run(
    recipe: Path,
    script: str | None = None,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    skip_missing: bool = False,
    scale_learning_rate: Literal["sqrt", "linear"] | None = None,
    keep_learning_rate: bool = False,
    on_mismatch: Literal["warn", "error", "ignore"] = "warn",
    candidate: bool = False,
    same_training: bool = False,
    larger_batch: bool = False,
    json: bool = False,
) -> Callable[[], int]:
    """Run a script with a recipe's values in the places where it was tuned.

    Its exit code, signals and standard input are the script's own.

    Args:
        recipe: A recipe.json of this script.
        script: The script, such as train.py or -m package.train. What follows it are its own arguments. When left out,
            the script and the arguments that the recipe was tuned with; `-- ARGS` replaces the arguments.
        args: The file's own arguments.
        skip_missing: Continue without a knob whose place in the script is gone.
        scale_learning_rate: Multiply the learning rate by the ratio of the batch sizes (linear), or by its root (sqrt),
            in place of the rule that was tested.
        keep_learning_rate: Leave the learning rate as the script has it.
        on_mismatch: What to do if this machine differs from the recipe's.
        candidate: Train with the best candidate of an undecided run, which is not confirmed to be faster.
        same_training: Train with the fastest configuration that changes nothing about learning.
        larger_batch: Train with the best configuration of another batch size, although it is not recommended.
        json: End standard output with a line of JSON (docs/json.md).
    """
    from autotune.front.console import note
    from autotune.script.long_run import prepare_run

    if script is None:
        from autotune.front.defaults import script_of

        script, args = script_of(recipe, args)
        note(f"running {shlex.join([script, *args])}, which the recipe was tuned with")
    prepared = prepare_run(
        recipe,
        script,
        args or [],
        skip_missing=skip_missing,
        scale=scale_learning_rate,
        keep_learning_rate=keep_learning_rate,
        on_mismatch=on_mismatch,
        candidate=candidate,
        same_training=same_training,
        larger_batch=larger_batch,
    )
    return partial(_run_to_json, prepared, recipe, script) if json else prepared


def _run_to_json(prepared: PreparedRun, recipe: Path, script: str) -> int:
    """Run a script, end standard output with a document about it, and return the script's exit code."""
    code = prepared()
    from autotune.front.documents import print_document

    guard = prepared.long_run.guard
    speeds = {"throughput": guard.throughput, "claimed": guard.claimed}
    with contextlib.suppress(OSError, ValueError):  # the script may have closed it
        sys.stdout.write("\n")  # it may have ended within a line
        print_document("run", on_one_line=True, recipe_file=str(recipe), script=script, exit_code=code, **speeds)
    return code


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
    memory_margin: float = MEMORY_MARGIN,
    json: bool = False,
) -> int:
    """Measure a recipe against its baseline again, here and now: does its claim hold?

    It holds (exit code 0). Or else (exit code 1) it is weaker: faster, but clearly by less than claimed; gone: no gain
    is shown, and clearly less than claimed; unstable: it failed, or failed a stability check; undecided: too little was
    measured to tell, and the reason says what to do.

    Other exit codes: 2 wrong arguments or input, such as a recipe of another workload or baseline; 3 the
    baseline itself fails; 4 internal error; 130 interrupted.

    Args:
        recipe: A recipe.json.
        workload: path/to/file.py[:name] or package.module[:name], as for `autotune tune`. The file gets what follows
            `--` as its own arguments; those of the recipe when left out.
        args: The file's own arguments.
        budget: Wall-clock time for everything.
        seed: Of the order in which slices are taken.
        isolation: As for `autotune tune`.
        memory_margin: As for `autotune tune`: the share of memory that must stay free.
        json: Print the finding as JSON (docs/json.md).
    """
    from autotune.data.options import seconds_of
    from autotune.front.closing import show_verification
    from autotune.front.console import Progress, messages, terminal
    from autotune.stats.deciding import ClaimResult
    from autotune.tuning.verify import verify as verify_recipe

    with Progress(messages() if json else terminal(), budget=seconds_of("budget", budget)) as progress:
        verification = verify_recipe(
            recipe,
            workload,
            args=args,
            budget=budget,
            seed=seed,
            isolation=isolation,
            memory_margin=memory_margin,
            observe=progress,
        )
    if json:
        from autotune.front.documents import print_document

        print_document("verify", recipe_file=str(recipe), **vars(verification))
    else:
        show_verification(verification)
    return 0 if verification.finding is ClaimResult.HOLDS else 1


@app.command
def show(path: Path | None = None, /, *, diff: Path | None = None, json: bool = False) -> None:
    """Show a recipe, or a run: its trials and its recipe.

    Args:
        path: A recipe.json, or a run directory; the newest run below results/ when left out.
        diff: A script: print the edit of it that makes the recipe permanent.
        json: Print recipe and trials as JSON (docs/json.md).
    """
    from autotune.data.run_directory import RunDirectory
    from autotune.front.closing import show_diff, show_recipe, show_trials, show_usage
    from autotune.front.console import say
    from autotune.front.defaults import run_or_newest
    from autotune.recipe.recipe import Recipe
    from autotune.space.configuration import Configuration, baseline_of, read_trials
    from autotune.tuning.resume import to_repeat

    if json and diff is not None:
        raise ArgumentError("--json and --diff were both given", hint="Give one of them.")
    path = run_or_newest(path)
    if json:
        return _show_json(path)
    if diff is not None:
        from autotune.script.patch import script_diff

        file = path / "recipe.json" if os.path.isdir(path) else path
        return show_diff(*script_diff(Recipe.load(file), diff))
    if not os.path.isdir(path):  # Path.is_dir raises on a name that is too long
        return show_recipe(Recipe.load(path), path)
    directory = RunDirectory(path)
    run = directory.read_run()
    records = list(read_trials(directory))
    show_trials(records, baseline_of(directory, run, records) or Configuration({}))
    if not os.path.exists(directory.recipe_file):
        return say("No recipe: the run has not ended, or it was cut off.")
    recipe = Recipe.load(directory.recipe_file)
    show_recipe(recipe, directory.recipe_file)
    if recipe.evidence.go_on_seconds is not None and run.workload is not None:
        show_usage(recipe, directory.recipe_file, tuned=run.workload.reference, to_repeat=to_repeat(path))
    return None


def _show_json(path: Path) -> None:
    from autotune.front.documents import print_document
    from autotune.recipe.recipe import Recipe
    from autotune.report.history import load_history, rows_of

    is_run = os.path.isdir(path)  # Path.is_dir raises on a name that is too long
    file = path / "recipe.json" if is_run else path
    has_recipe = not is_run or file.exists()
    print_document(
        "show",
        run=str(path) if is_run else None,
        recipe_file=str(file) if has_recipe else None,
        recipe=Recipe.load(file) if has_recipe else None,
        trials=rows_of(load_history(path, every_column=True)) if is_run else [],
    )


@app.command
def history(
    runs: Annotated[list[Path], Parameter(allow_leading_hyphen=False)],
    /,
    *,
    csv: Path | None = None,
    parquet: Path | None = None,
    json: bool = False,
) -> None:
    """Show every trial of one run or many as a table.

    Args:
        runs: Run directories, or a directory that holds some, such as results/.
        csv: Write the table, with all its columns, to this CSV file.
        parquet: Write it to this Parquet file.
        json: Print it as JSON (docs/json.md).
    """
    from autotune.front.tables import show_history
    from autotune.report.history import load_history, rows_of

    frame = load_history(*runs, every_column=True)
    if json:
        from autotune.front.documents import print_document

        print_document("history", trials=rows_of(frame))
    if not _write_files(frame, "trial", csv, parquet) and not json:
        show_history(frame)


def _write_files(frame: pandas.DataFrame, noun: str, csv: Path | None, parquet: Path | None) -> bool:
    """Write a table to the files that were asked for; return whether there were any."""
    from autotune.front.console import note
    from autotune.report.history import write_csv, write_parquet

    for file, write in ((csv, write_csv), (parquet, write_parquet)):
        if file is not None:
            write(frame, file)
            note(f"{plural(len(frame), noun)} written to {file}")
    return csv is not None or parquet is not None


@app.command
def report(run: Path | None = None, /) -> None:
    """Write a run's page, report.html: the answer, the search, what each knob did, where time goes, every trial.

    A run that is unfinished or damaged has one, too: it says what is missing.

    Args:
        run: A run directory; the newest below results/ when left out.
    """
    from autotune.front.console import say
    from autotune.front.defaults import run_or_newest
    from autotune.report.page import write_page

    say(write_page(run_or_newest(run)))


@app.command
def dashboard(run: Path | None = None, /, *, port: int = 8080) -> None:
    """Show a run's study in optuna-dashboard, on this machine's loopback address, until Ctrl-C.

    Args:
        run: A run directory; the newest below results/ when left out.
        port: Of the loopback address.
    """
    from autotune.data.run_directory import RunDirectory
    from autotune.front.console import say
    from autotune.front.defaults import run_or_newest

    run = run_or_newest(run)
    directory = RunDirectory(run)
    directory.read_run()
    if not directory.study_file.exists():
        raise RunDirectoryError(f"{run} has no study.db", hint="It is written with the first trial of the search.")
    if importlib.util.find_spec("optuna_dashboard") is None:
        raise ArgumentError("optuna-dashboard is not installed", hint="Run pip install 'autotune[dashboard]'.")
    import optuna_dashboard

    from autotune.report.effects import open_study_file

    say(f"http://127.0.0.1:{port}/ shows {run}; Ctrl-C ends it")
    try:
        optuna_dashboard.run_server(open_study_file(directory), host="127.0.0.1", port=port)
    except OSError as error:
        raise ArgumentError(f"port {port} cannot be used: {error.strerror}", hint="Give another --port.") from error


@app.command
def compare(
    runs: Annotated[list[Path], Parameter(allow_leading_hyphen=False)],
    /,
    *,
    csv: Path | None = None,
    parquet: Path | None = None,
    json: bool = False,
) -> None:
    """Show runs side by side: what each found, and whether they may be compared.

    Args:
        runs: Run directories, or a directory that holds some, such as results/.
        csv: Write the table, with all its columns, to this CSV file.
        parquet: Write it to this Parquet file.
        json: Print it as JSON (docs/json.md).
    """
    from autotune.front.tables import show_comparison
    from autotune.report.compare import compare as compare_runs
    from autotune.report.history import rows_of

    frame = compare_runs(*runs)
    if json:
        from autotune.front.documents import print_document

        print_document("compare", runs=rows_of(frame))
    if not _write_files(frame, "run", csv, parquet) and not json:
        show_comparison(frame)


@app.command
def doctor(*, self_test: str | None = None, json: bool = False) -> int:
    """Say what keeps TensorFlow from this machine's devices, or makes it slow here, and what to do first.

    The exit code is 1 if something stops TensorFlow from using a device that is there, or the self-test fails.

    Args:
        self_test: For so long, such as 60s, also measure what is known: a training against itself, and against the same
            with a planted delay. It says the smallest gain that 2, 5 and 10 minutes can show here.
        json: Print the findings as JSON (docs/json.md).
    """
    from autotune.data.options import seconds_of
    from autotune.front.console import Progress, messages, terminal
    from autotune.front.doctor_report import look
    from autotune.front.tables import show_findings, show_self_test

    seconds = None if self_test is None else seconds_of("self_test", self_test)
    findings, tested = diagnose(look()), None
    if not json:
        show_findings(findings)
    if seconds is not None:
        from autotune.tuning.self_test import run_self_test

        with Progress(messages() if json else terminal(), budget=seconds) as progress:
            tested = run_self_test(seconds, observe=progress)
    if json:
        from autotune.front.documents import print_document

        print_document("doctor", findings=findings, first=first_fix(findings) or None, self_test=tested)
    elif tested is not None:
        show_self_test(tested)
    is_stopped = any(finding.level is Level.STOPS for finding in findings)
    return 1 if is_stopped or (tested is not None and not tested.passed) else 0


@app.command
def knobs(*, json: bool = False) -> None:
    """List every knob: what it does, its values, when it acts.

    Args:
        json: Print them as JSON (docs/json.md).
    """
    from autotune.front.tables import show_knobs

    if json:
        from autotune.front.documents import print_document
        from autotune.space.knobs import KNOBS

        print_document("knobs", knobs=list(KNOBS.values()))
    else:
        show_knobs()


@app.command
def space(
    file: str,
    /,
    *,
    batch_size: int = 32,
    examples: int | None = None,
    device: Literal["cpu", "gpu"] | None = None,
    cores: int | None = None,
    seat_devices: int = 1,
) -> None:
    """Check a search space, and show what it resolves to on this machine.

    Args:
        file: A TOML file, or the name of a shipped search space.
        batch_size: The baseline's batch size.
        examples: Examples per epoch; unknown when left out.
        device: What the training would run on; when left out a GPU if NVIDIA's driver shows one here.
        cores: Processor cores; this machine's when left out.
        seat_devices: Devices that one trial would use.
    """
    counts = {"--batch-size": batch_size, "--examples": examples, "--cores": cores, "--seat-devices": seat_devices}
    for option, count in counts.items():
        if count is not None and count < 1:
            raise ArgumentError(f"{option} is {count}", hint="It must be at least 1.")
    from autotune.front.tables import show_space
    from autotune.machine.fingerprint import available_cores
    from autotune.machine.gpu import lowest_capability, read_gpus
    from autotune.space.configuration import baseline_configuration
    from autotune.space.knobs import Device
    from autotune.space.space_file import find_search_space

    written = find_search_space(file)
    gpus = read_gpus().gpus
    on = Device(device or ("gpu" if gpus else "cpu"))
    named: dict[str, object] = {"jit_compile": on is Device.GPU, **({"strategy": "none"} if seat_devices > 1 else {})}
    resolved = written.resolve(
        baseline=baseline_configuration(batch_size, named, on, where="--batch-size"),
        device=on,
        cores=available_cores() if cores is None else cores,
        examples=examples,
        dataset_takes_config=True,
        capability=lowest_capability(gpus),
        devices=seat_devices,
    )
    show_space(written.source, resolved)


for position, name in enumerate(
    ("doctor", "demo", "tune", "run", "show", "report", "verify", "history", "compare", "dashboard", "knobs", "space")
):
    app[name].sort_key = position  # the order of use, in which `--help` lists them
app.register_install_completion_command(help="Install completion for bash, zsh or fish.")
