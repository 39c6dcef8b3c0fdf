"""The commands. Heavy modules are imported inside them, so that help and errors answer at once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from autotune.data.errors import ArgumentError, RunDirectoryError, TuningInterruptedError
from autotune.data.options import MEMORY_MARGIN, VERIFY_SECONDS, take_options
from autotune.data.printable import plural
from autotune.machine.doctor import diagnose
from autotune.recipe.selection import OnMismatch

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
    """
    from autotune.front.closing import resume_command, show_recipe, show_usage
    from autotune.front.console import Progress
    from autotune.front.tune import tune as tune_workload
    from autotune.stats.deciding import EndedBy
    from autotune.tuning.resume import to_repeat

    with Progress() as progress:
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
    show_recipe(recipe, path)
    show_usage(recipe, path, tuned=workload, to_repeat=to_repeat(progress.directory))
    interrupted = recipe.evidence.ended_by is EndedBy.INTERRUPTED and not recipe.changes
    return TuningInterruptedError.exit_code if interrupted else 0


@app.command(usage="Usage: autotune run RECIPE|BOOK [OPTIONS] SCRIPT [ARGS]")
def run(
    recipe: Path,
    script: str,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    skip_missing: bool = False,
    scale_learning_rate: Literal["sqrt", "linear"] | None = None,
    keep_learning_rate: bool = False,
    on_mismatch: OnMismatch | None = None,
    candidate: bool = False,
    same_training: bool = False,
    larger_batch: bool = False,
) -> Callable[[], int]:
    """Run a script with a recipe's values in the places where it was tuned.

    Its exit code, signals and standard input are the script's own.

    Args:
        recipe: A recipe.json of this script; or a book, whose recipe of this kind of machine is taken.
        script: The script, such as train.py or -m package.train. What follows it are its own arguments.
        args: The file's own arguments.
        skip_missing: Continue without a knob whose place in the script is gone.
        scale_learning_rate: Multiply the learning rate by the ratio of the batch sizes (linear), or by its root (sqrt),
            in place of the rule that was tested.
        keep_learning_rate: Leave the learning rate as the script has it.
        on_mismatch: What to do if no recipe was measured on this kind of machine. error: stop. nearest: warn, and train
            with the nearest. baseline: warn, and train as the script has it. ignore: train with the nearest. When left
            out, nearest for a recipe and baseline for a book.
        candidate: Train with the best candidate of an undecided run, which is not confirmed to be faster.
        same_training: Train with the fastest configuration that changes nothing about learning.
        larger_batch: Train with the best configuration of another batch size, although it is not recommended.
    """
    from autotune.script.long_run import prepare_run

    return prepare_run(
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


@app.command(usage="Usage: autotune verify RECIPE|BOOK SCRIPT|WORKLOAD [OPTIONS] [-- ARGS]")
def verify(
    recipe: Path,
    workload: str,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    budget: str = f"{VERIFY_SECONDS:.0f}s",
    seed: int = 0,
    isolation: Literal["template", "spawn"] = "template",
    memory_margin: float = MEMORY_MARGIN,
) -> int:
    """Measure a recipe against its baseline again, here and now: does its claim hold?

    It holds (exit code 0). Or else (exit code 1) it is weaker: faster, but clearly by less than claimed; gone: no gain
    is shown, and clearly less than claimed; unstable: it failed, or failed a stability check; undecided: too little was
    measured to tell, and the reason says what to do.

    Other exit codes: 2 wrong arguments or input, such as a recipe of another workload or baseline; 3 the
    baseline itself fails; 4 internal error; 130 interrupted.

    Args:
        recipe: A recipe.json; or a book, whose recipe of this kind of machine is taken, or else the nearest.
        workload: path/to/file.py[:name] or package.module[:name], as for `autotune tune`. The file gets what follows
            `--` as its own arguments; those of the recipe when left out.
        args: The file's own arguments.
        budget: Wall-clock time for everything.
        seed: Of the order in which slices are taken.
        isolation: As for `autotune tune`.
        memory_margin: As for `autotune tune`: the share of memory that must stay free.
    """
    from autotune.data.options import seconds_of
    from autotune.front.closing import show_verification
    from autotune.front.console import Progress
    from autotune.stats.deciding import ClaimResult
    from autotune.tuning.verify import verify as verify_recipe

    with Progress(budget=seconds_of("budget", budget)) as progress:
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
    show_verification(verification)
    return 0 if verification.finding is ClaimResult.HOLDS else 1


@app.command
def show(path: Path, /, *, diff: Path | None = None) -> None:
    """Show a recipe, a book, or a run: its trials and its recipe.

    Args:
        path: A recipe.json, a book, or a run directory.
        diff: A script: print the edit of it that makes the recipe permanent.
    """
    from autotune.data.run_directory import RunDirectory
    from autotune.front.books import show_book
    from autotune.front.closing import show_diff, show_recipe, show_trials, show_usage
    from autotune.front.console import note, say
    from autotune.recipe.recipe import Recipe, choose_recipe, load_recipes
    from autotune.space.configuration import Configuration, baseline_of, read_trials
    from autotune.tuning.resume import to_repeat

    if diff is not None:
        from autotune.script.patch import script_diff

        file = path / "recipe.json" if os.path.isdir(path) else path
        recipe, selection = choose_recipe(load_recipes(file), "ignore", source=str(file))
        if selection.text:
            note(selection.text)
        return show_diff(*script_diff(recipe, diff))
    if not os.path.isdir(path):  # Path.is_dir raises on a name that is too long
        loaded = load_recipes(path)
        return show_recipe(loaded, path) if isinstance(loaded, Recipe) else show_book(loaded, path)
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


@app.command(usage="Usage: autotune merge RECIPE|BOOK|FOLDER... -o BOOK")
def merge(
    recipes: Annotated[list[Path], Parameter(allow_leading_hyphen=False)],
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
) -> None:
    """Make one book of the recipes of a training on several kinds of machine.

    Of the recipes of one kind of machine (devices, TensorFlow's minor version, Keras) the newest is kept.

    Args:
        recipes: Recipes, books, run directories, or folders, of which each .json file is read.
        out: The book's file, such as train.book.json. An older book is replaced.
    """
    from autotune.front.books import show_book
    from autotune.front.console import note
    from autotune.recipe.book import merge_recipes, save_book

    merged = merge_recipes(recipes)
    save_book(merged.book, out)
    for text in merged.notes:
        note(text)
    show_book(merged.book, out)


@app.command
def history(
    runs: Annotated[list[Path], Parameter(allow_leading_hyphen=False)],
    /,
    *,
    csv: Path | None = None,
    parquet: Path | None = None,
) -> None:
    """Show every trial of one run or many as a table.

    Args:
        runs: Run directories, or a directory that holds some, such as results/.
        csv: Write the table to this CSV file.
        parquet: Write the table to this Parquet file.
    """
    from autotune.front.closing import show_history
    from autotune.front.console import note
    from autotune.report.history import load_history, write_csv, write_parquet

    frame = load_history(*runs)
    for file, write in ((csv, write_csv), (parquet, write_parquet)):
        if file is not None:
            write(frame, file)
            note(f"{plural(len(frame), 'trial')} written to {file}")
    if csv is None and parquet is None:
        show_history(frame)


@app.command
def report(run: Path, /) -> None:
    """Write a run's page, report.html: the answer, the search, what each knob did, where time goes, every trial.

    A run that is unfinished or damaged has one, too: it says what is missing.

    Args:
        run: A run directory.
    """
    from autotune.front.console import say
    from autotune.report.page import write_page

    say(write_page(run))


@app.command
def dashboard(run: Path, /, *, port: int = 8080) -> None:
    """Show a run's study in optuna-dashboard, on this machine's loopback address, until Ctrl-C.

    Args:
        run: A run directory.
        port: Of the loopback address.
    """
    from autotune.data.run_directory import RunDirectory
    from autotune.front.console import say

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
def compare(runs: Annotated[list[Path], Parameter(allow_leading_hyphen=False)], /) -> None:
    """Show runs side by side: what each found, and whether they may be compared.

    Args:
        runs: Run directories, or a directory that holds some, such as results/.
    """
    from autotune.front.closing import show_comparison
    from autotune.report.compare import compare as compare_runs

    show_comparison(compare_runs(*runs))


@app.command
def doctor(*, json: bool = False) -> int:
    """Say what keeps TensorFlow from this machine's devices, or makes it slow here, and what to do first.

    The exit code is 1 if something stops TensorFlow from using a device that is there.

    Args:
        json: Print the findings as JSON.
    """
    from autotune.front.closing import show_findings
    from autotune.front.doctor_report import look
    from autotune.machine.doctor import Level

    findings = diagnose(look())
    show_findings(findings, as_json=json)
    return 1 if any(finding.level is Level.STOPS for finding in findings) else 0


@app.command
def knobs() -> None:
    """List every knob: what it does, its values, when it acts."""
    from autotune.front.closing import show_knobs

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
    from autotune.front.closing import show_space
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
