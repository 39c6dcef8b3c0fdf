"""The commands. Heavy modules are imported inside them, so that help and errors answer at once."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import App, Parameter
from cyclopts import Group as CommandGroup
from cyclopts.types import PositiveInt

from autotune.data.errors import ArgumentError, RunDirectoryError, TuningInterruptedError
from autotune.data.options import (
    MEMORY_MARGIN,
    USUAL_BUDGET,
    VERIFY_SECONDS,
    Group,
    LongRunOptions,
    Tracker,
    take_options,
)
from autotune.data.printable import plural
from autotune.version import DISTRIBUTION, __version__

if TYPE_CHECKING:
    import pandas

    from autotune.script.long_run import PreparedRun


app = App(
    name="autotune",
    help="Finds the fastest stable way to run a TensorFlow training on this machine.",
    version=f"autotune {__version__} (distribution {DISTRIBUTION})",
    help_epilogue="With --debug, an error shows its traceback.",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    help_format="markdown",  # plaintext keeps the line breaks of docstrings
    default_parameter=Parameter(negative=""),  # no `--no-…` beside an option that is off
)
EXAMPLE = "train_shapes.py"
_GROUPS = {name: CommandGroup(name, sort_key=place) for place, name in enumerate(get_args(Group))}


def _in_group(name: Group) -> Parameter:
    return Parameter(group=_GROUPS[name], show_choices=False, show_default=lambda value: value if value else None)


def print_json(command: str, **fields: Any) -> None:
    """Print the document of a command; see `documents`."""
    from autotune.front.documents import print_document

    print_document(command, **fields)


def run_or_newest(run: Path | None) -> Path:
    """Return the run directory that was given; else the newest one below `results`, and say which that is."""
    from autotune.data.run_directory import follow_latest
    from autotune.front.console import note

    if run is not None:
        return follow_latest(run)
    newest = _newest()
    note(f"the newest run is {newest}")
    return newest


def _newest() -> Path:
    from autotune.data.run_directory import RESULTS, newest_runs

    found = newest_runs(Path(RESULTS), most=1)
    if not found:
        raise RunDirectoryError(f"no run was given, and {RESULTS}/ in this directory holds none")
    return found[0].path


def script_of(path: Path, args: list[str] | None) -> tuple[str, list[str]]:
    """Return the script that the recipe at a path was tuned with, and these arguments; its own arguments when None.

    Raises:
        ArgumentError: No `run.json` beside the recipe names the script, or the recipe masks one of the arguments.
        RecipeError: The recipe cannot be read.
    """
    from autotune.data.run_directory import RunDirectory
    from autotune.recipe.recipe import read_recipes, select_nearest

    selection = select_nearest(read_recipes(path))
    recipe, recipe_file = selection.recipe, selection.path
    try:
        workload = RunDirectory(recipe_file.parent).read_run().workload
    except RunDirectoryError:
        workload = None
    if workload is None or workload.fingerprint != recipe.workload.fingerprint:
        raise ArgumentError(
            f"SCRIPT is missing: no run.json beside {recipe_file} names the script that the recipe was tuned with"
        )
    return workload.reference, [*recipe.workload.arguments] if args is None else args


@app.command(usage="Usage: autotune tune SCRIPT|WORKLOAD [OPTIONS] [-- ARGS]")
@partial(take_options, mark=lambda option: _in_group(option.group))
def tune(
    workload: str,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    out: Annotated[str | None, _in_group("Everyday")] = None,
    resume: Annotated[str | None, _in_group("Everyday")] = None,
    wait: Annotated[bool, _in_group("Search")] = False,
    json: Annotated[bool, _in_group("Everyday")] = False,
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
        resume: The directory of a run, ended or stopped, to continue with all that was measured.
        wait: Wait until earlier runs on the same devices of this machine have ended. The budget begins then.
        json: Print the result as JSON (docs/history.md); progress goes to standard error.
    """
    from autotune.front.console import Progress, messages, terminal
    from autotune.front.results import show_answer
    from autotune.front.tune import tune as tune_workload
    from autotune.recipe.advice import answer_at, resume_command
    from autotune.stats.deciding import EndedBy

    with Progress(messages() if json else terminal()) as progress:
        try:
            recipe = tune_workload(workload, args=args, out=out, resume=resume, wait=wait, observe=progress, **options)
        except KeyboardInterrupt as interrupt:
            hint = "Nothing was measured yet."
            if progress.directory and progress.directory.exists():
                hint = f"To continue the run: {resume_command(workload, progress.directory)}"
            raise TuningInterruptedError("interrupted", hint=hint) from interrupt
    assert progress.directory is not None
    path = progress.directory / "recipe.json"
    answer = answer_at(recipe, path, workload)
    if json:
        print_json("tune", run=str(path.parent), recipe_file=str(path), recipe=recipe, answer=answer)
    else:
        show_answer(answer, path)
    interrupted = recipe.evidence.ended_by is EndedBy.INTERRUPTED and not recipe.changes
    return TuningInterruptedError.exit_code if interrupted else 0


@app.command
def demo(*, budget: str = USUAL_BUDGET, json: bool = False) -> int:
    """Tune a training of about a minute that comes with autotune, to show what a run looks like.

    It writes the training, train_shapes.py, and results/ to the current directory.

    Args:
        budget: Wall-clock time for everything.
        json: As for `autotune tune`.
    """
    from autotune.data.files import shipped_directory, write_atomically

    source, copy = shipped_directory("examples") / EXAMPLE, Path(EXAMPLE)
    if not os.path.lexists(copy):  # nothing is written through a link that leads nowhere yet
        write_atomically(copy, source.read_bytes())
    elif not copy.is_file() or copy.read_bytes() != source.read_bytes():
        raise ArgumentError(f"{EXAMPLE} is here already, and is not the demo's")
    return tune(EXAMPLE, budget=budget, json=json)


@app.command(usage="Usage: autotune run RECIPE|FOLDER [OPTIONS] [SCRIPT [ARGS]]")
@partial(take_options, of=LongRunOptions, mark=lambda _: Parameter())
def run(
    recipe: Path,
    script: str | None = None,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    json: bool = False,
    **options: Any,
) -> Callable[[], int]:
    """Run a script with a recipe's values in the places where it was tuned.

    Its exit code, signals and standard input are the script's own.

    Args:
        recipe: A recipe.json of this script, or its run directory; or a folder of recipes, of which the one of this
            kind of machine is taken.
        script: The script, such as train.py or -m package.train. What follows it are its own arguments. When left out,
            the script and the arguments that the recipe was tuned with; `-- ARGS` replaces the arguments.
        args: The file's own arguments.
        options: See `LongRunOptions`.
        json: End standard output with a line of JSON (docs/history.md).
    """
    from autotune.front.console import note
    from autotune.script.long_run import prepare_run

    if script is None:
        script, args = script_of(recipe, args)
        note(f"running {shlex.join([script, *args])}, which the recipe was tuned with")
    prepared = prepare_run(recipe, script, args or [], LongRunOptions(**options))
    if json:
        return partial(_run_to_json, prepared, script)
    return prepared


def _run_to_json(prepared: PreparedRun, script: str) -> int:
    """Run a script, end standard output with a document about it, and return the script's exit code."""
    from autotune.front.console import note

    code, run = prepared(), prepared.long_run
    file = None if prepared.recipe_file is None else str(prepared.recipe_file)
    speeds = {name: None if run is None else getattr(run.guard, name) for name in ("throughput", "claimed")}
    try:
        sys.stdout.write("\n")  # it may have ended within a line
        print_json("run", on_one_line=True, recipe_file=file, script=script, exit_code=code, **speeds)
    except Exception as error:  # the script may have closed standard output, or left Python unable to import
        with contextlib.suppress(Exception):
            note(f"no JSON was printed: {type(error).__name__}: {error}")
    return code


@app.command(usage="Usage: autotune verify RECIPE|FOLDER SCRIPT|WORKLOAD [OPTIONS] [-- ARGS]")
def verify(
    recipe: Path,
    workload: str,
    /,
    *,
    args: Annotated[list[str] | None, Parameter(parse=False)] = None,
    budget: str = f"{VERIFY_SECONDS:.0f}s",
    seed: int = 0,
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
        recipe: A recipe.json or its run directory; or a folder of recipes, of which the one of this kind of machine is
            taken, or else the nearest.
        workload: path/to/file.py[:name] or package.module[:name], as for `autotune tune`. The file gets what follows
            `--` as its own arguments; those of the recipe when left out.
        args: The file's own arguments.
        budget: Wall-clock time for everything.
        seed: Of the order in which slices are taken.
        memory_margin: As for `autotune tune`: the share of memory that must stay free.
        json: Print the finding as JSON (docs/history.md).
    """
    from autotune.data.options import seconds_of
    from autotune.front.console import Progress, messages, terminal
    from autotune.front.results import show_verification
    from autotune.recipe.recipe import find_recipe
    from autotune.stats.deciding import ClaimResult
    from autotune.tuning.events import Notice
    from autotune.tuning.verify import verify as verify_recipe

    with Progress(messages() if json else terminal(), budget=seconds_of("budget", budget)) as progress:
        selection = find_recipe(recipe, lambda text: progress(Notice(text=text)), nearest=True)
        verification = verify_recipe(
            selection.recipe,
            workload,
            args=args,
            budget=budget,
            seed=seed,
            memory_margin=memory_margin,
            observe=progress,
        )
    if json:
        print_json("verify", recipe_file=str(selection.path), **vars(verification))
    else:
        show_verification(verification)
    return 0 if verification.finding is ClaimResult.HOLDS else 1


@app.command
def doctor(*, self_test: str | None = None, json: bool = False) -> int:
    """Say what keeps TensorFlow from this machine's devices, or makes it slow here, and what to do first.

    The exit code is 1 if something stops TensorFlow from using a device that is there, or if the self-test finds that
    autotune is wrong on a quiet machine.

    Args:
        self_test: For so long, such as 60s, also measure what is known: a training against itself, and against the same
            with a planted delay. It says the smallest gain that 2, 5 and 10 minutes can show here.
        json: Print the findings as JSON (docs/history.md).
    """
    from autotune.data.options import seconds_of
    from autotune.front.console import Progress, messages, terminal
    from autotune.front.results import show_findings, show_self_test
    from autotune.machine.doctor import Level, diagnose, first_fix, look
    from autotune.runtime.containment import why_unavailable

    seconds = None if self_test is None else seconds_of("self_test", self_test)
    findings, tested = diagnose(look(why_unavailable)), None
    if not json:
        show_findings(findings)
    if seconds is not None:
        from autotune.tuning.self_test import run_self_test

        with Progress(messages() if json else terminal(), budget=seconds) as progress:
            tested = run_self_test(seconds, observe=progress)
    if json:
        print_json("doctor", findings=findings, first=first_fix(findings) or None, self_test=tested)
    elif tested is not None:
        show_self_test(tested)
    fails = tested is not None and tested.fails
    return 1 if fails or any(finding.level is Level.STOPS for finding in findings) else 0


Runs = Annotated[list[Path] | None, Parameter(allow_leading_hyphen=False)]


@app.command
def show(
    runs: Runs = None,
    /,
    *,
    diff: Path | None = None,
    csv: Path | None = None,
    parquet: Path | None = None,
    json: bool = False,
) -> None:
    """Show a recipe, a folder of recipes, or runs: their trials, and the recipe of a single run.

    Args:
        runs: A recipe.json, a folder of recipes, or a run directory; the newest run below results/ when left out. Of
            several runs, or a directory that holds some, the trials are shown.
        diff: A script: print the edit of it that makes the recipe permanent, and nothing else.
        csv: Write the trials of all runs, with all their columns, to this CSV file.
        parquet: Write them to this Parquet file.
        json: Print recipe and trials as JSON (docs/history.md).
    """
    from autotune.data.run_directory import RunDirectory, follow_latest
    from autotune.front.console import say
    from autotune.front.results import show_answer, show_folder, show_history
    from autotune.recipe.advice import answer_at
    from autotune.recipe.recipe import holds_recipes, read_recipes

    path, *others = runs or [run_or_newest(None)]
    path = follow_latest(path)
    is_run = os.path.lexists(path / "run.json")
    holds_runs = os.path.isdir(path) and not is_run and not holds_recipes(path)
    is_table = bool(others) or holds_runs or csv is not None or parquet is not None
    if diff is not None:
        if is_table or json:
            raise ArgumentError("--diff is for a single recipe, and excludes --json, --csv and --parquet")
        return _show_diff(path, diff)
    run, trials = None, None
    if is_run or is_table:
        from autotune.report.history import load_history

        trials = load_history([path, *others], every_column=True)
        if is_table:
            nothing: dict[str, Any] = {"run": None, "recipe_file": None, "recipe": None, "answer": None, "recipes": {}}
            return None if _write("show", trials, "trial", csv, parquet, json, **nothing) else show_history(trials)
        run = RunDirectory(path).read_run()
    source = None if is_run and not os.path.exists(path / "recipe.json") else read_recipes(path)
    (file, recipe) = (None, None) if source is None or source.is_folder else source.files[0]
    answer = None if recipe is None else recipe.answer
    if recipe is not None and file is not None and run is not None and run.workload is not None:
        answer = answer_at(recipe, file, run.workload.reference)
    if json:
        from autotune.report.history import rows_of

        return print_json(
            "show",
            answer=answer,
            run=str(path) if is_run else None,
            recipe_file=None if file is None else str(file),
            recipe=recipe,
            recipes={str(file.path): file.recipe for file in source.files} if source and source.is_folder else {},
            trials=[] if trials is None else rows_of(trials),
        )
    if trials is not None:
        show_history(trials)
    if source is None:
        return say("No recipe: the run has not ended, or it was cut off.")
    return show_folder(source) if file is None or answer is None else show_answer(answer, file)


def _show_diff(path: Path, script: Path) -> None:
    """Print the edit of a script that makes a recipe permanent."""
    from autotune.front.console import note
    from autotune.front.results import show_diff
    from autotune.recipe.recipe import find_recipe
    from autotune.script.patch import script_diff

    recipe = find_recipe(path, note, nearest=True).recipe
    if not recipe.changes and recipe.learning_rate_rule is None:
        return note("The recipe is the baseline: run the script as it is.")
    return show_diff(recipe, *script_diff(recipe, script))


def _write(
    command: str, frame: pandas.DataFrame, noun: str, csv: Path | None, parquet: Path | None, json: bool, **fields: Any
) -> bool:
    """Write the table of a command, a row for each `noun`, to files and as JSON; return whether that was asked for."""
    from autotune.front.console import note
    from autotune.report.history import rows_of, write_csv, write_parquet

    for file, write in ((csv, write_csv), (parquet, write_parquet)):
        if file is not None:
            write(frame, file)
            note(f"{plural(len(frame), noun)} written to {file}")
    if json:
        print_json(command, **{f"{noun}s": rows_of(frame)}, **fields)
    return json or csv is not None or parquet is not None


@app.command
def report(run: Path | None = None, /, *, open: bool = False) -> None:
    """Write a run's page, report.html: losses over time, each change, the search space, every trial.

    A run that is unfinished or damaged has one, too: it says what is missing.

    Args:
        run: A run directory; the newest below results/ when left out.
        open: Open it in the browser.
    """
    import webbrowser

    from autotune.front.console import note, say
    from autotune.report.page import write_page

    page = write_page(run_or_newest(run))
    say(page)
    if open and not webbrowser.open(page.absolute().as_uri()):
        note("no browser could be opened: open that file yourself")


@app.command
def export(run: Path | None = None, /, *, log_to: Tracker) -> None:
    """Export a run to an experiment tracker: each trial becomes one of the tracker's own runs.

    Exporting a run again updates its trials.

    Args:
        run: A run directory; the newest below results/ when left out.
        log_to: The tracker, whose package must be installed and whose own settings say where it writes. TensorBoard's
            files go to the run directory.
    """
    from autotune.front.console import say
    from autotune.report.export import export_run

    say(export_run(run_or_newest(run), log_to))


@app.command
def compare(runs: Runs = None, /, *, csv: Path | None = None, parquet: Path | None = None, json: bool = False) -> None:
    """Show runs and recipes in one table: what each found, and whether their speeds may be compared.

    Args:
        runs: Run directories, or a directory that holds some; recipes, and folders of recipes; results/
            when left out.
        csv: Write the table, with all its columns, to this CSV file.
        parquet: Write it to this Parquet file.
        json: Print it as JSON (docs/history.md).
    """
    from autotune.data.run_directory import RESULTS
    from autotune.front.results import show_comparison
    from autotune.report.history import compare as compare_runs

    if not runs:
        _newest()  # there is one
        runs = [Path(RESULTS)]
    frame = compare_runs(runs)
    if not _write("compare", frame, "run", csv, parquet, json):
        show_comparison(frame)


@app.command
def knobs(
    *,
    space: str | None = None,
    batch_size: PositiveInt | None = None,
    examples: PositiveInt | None = None,
    device: Literal["cpu", "gpu"] | None = None,
    cores: PositiveInt | None = None,
    json: bool = False,
) -> None:
    """List every knob: what it does, its values, when it acts. Or show what a search space resolves to here.

    Args:
        space: A TOML file, or the name of a shipped search space: check it, and show its knobs and their values.
        batch_size: With --space, the baseline's batch size; 32 when left out.
        examples: With --space, examples per epoch; unknown when left out.
        device: With --space, what the training would run on; a GPU if NVIDIA's driver shows one, when left out.
        cores: With --space, processor cores; this machine's when left out.
        json: Print the knobs as JSON (docs/history.md).
    """
    from autotune.front.results import show_knobs
    from autotune.space.knobs import KNOBS

    only_with_space = {"--batch-size": batch_size, "--examples": examples, "--device": device, "--cores": cores}
    if space is None and (given := [name for name, value in only_with_space.items() if value is not None]):
        raise ArgumentError(f"{given[0]} was given without --space")
    if space is not None and json:
        raise ArgumentError("--space and --json were both given")
    if space is not None:
        _show_space(space, 32 if batch_size is None else batch_size, examples, device, cores)
    elif json:
        print_json("knobs", knobs=list(KNOBS.values()))
    else:
        show_knobs()


def _show_space(file: str, batch_size: int, examples: int | None, device: str | None, cores: int | None) -> None:
    from autotune.front.results import show_space
    from autotune.machine.fingerprint import available_cores
    from autotune.machine.gpu import lowest_capability, read_gpus
    from autotune.space.configuration import baseline_configuration
    from autotune.space.knobs import Device
    from autotune.space.space_file import find_search_space

    written = find_search_space(file)
    gpus = read_gpus().gpus
    on = Device(device or ("gpu" if gpus else "cpu"))
    resolved = written.resolve(
        baseline=baseline_configuration(batch_size, {"jit_compile": on is Device.GPU}, on, where="--batch-size"),
        device=on,
        cores=available_cores() if cores is None else cores,
        examples=examples,
        dataset_takes_config=True,
        capability=lowest_capability(gpus),
    )
    show_space(written.source, resolved)


# The order of use, for `--help`.
IN_ORDER = "doctor demo tune run show report verify compare export knobs"
for position, name in enumerate(IN_ORDER.split()):
    app[name].sort_key = position
app.register_install_completion_command(help="Install completion for bash, zsh or fish.")
