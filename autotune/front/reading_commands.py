"""The commands that read what runs have left, or that list what there is. Importing it registers them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from autotune.data.errors import ArgumentError
from autotune.data.options import Tracker
from autotune.data.printable import plural
from autotune.front.commands import app, print_json

if TYPE_CHECKING:
    import pandas

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
    from autotune.data.run_directory import RunDirectory, follow_latest, to_repeat
    from autotune.front.closing import show_answer, show_diff
    from autotune.front.console import note, say
    from autotune.front.defaults import run_or_newest
    from autotune.front.tables import show_folder, show_history
    from autotune.recipe.advice import answer_at
    from autotune.recipe.recipe import holds_recipes, read_recipes, select_nearest

    for option, is_given in {"--json": json, "--csv": csv is not None, "--parquet": parquet is not None}.items():
        if is_given and diff is not None:
            raise ArgumentError(f"{option} and --diff were both given", hint="Give one of them.")
    path, *others = runs or [run_or_newest(None)]
    path = follow_latest(path)
    is_run = os.path.lexists(path / "run.json")
    holds_runs = os.path.isdir(path) and not is_run and not holds_recipes(path)
    if diff is not None and (others or holds_runs):
        raise ArgumentError("--diff is for a single recipe", hint="Give one run or recipe.")
    if others or holds_runs or csv is not None or parquet is not None:
        from autotune.report.history import load_history

        frame = load_history([path, *others], every_column=True)
        nothing: dict[str, Any] = {"run": None, "recipe_file": None, "recipe": None, "answer": None, "recipes": {}}
        return None if _write("show", frame, "trial", csv, parquet, json, **nothing) else show_history(frame)
    if diff is not None:
        from autotune.script.patch import script_diff

        selection = select_nearest(read_recipes(path))
        if selection.text:
            note(selection.text)
        chosen = selection.recipe
        if not chosen.changes and chosen.learning_rate_rule is None:
            return note("The recipe is the baseline: run the script as it is.")
        return show_diff(chosen, *script_diff(chosen, diff))
    run, trials = None, None
    if is_run:
        from autotune.report.history import load_history

        run, trials = RunDirectory(path).read_run(), load_history(path, every_column=True)
    source = None if is_run and not os.path.exists(path / "recipe.json") else read_recipes(path)
    (file, recipe) = (None, None) if source is None or source.is_folder else source.files[0]
    answer = None if recipe is None else recipe.answer
    if recipe is not None and file is not None and run is not None and run.workload is not None:
        answer = answer_at(recipe, file, run.workload.reference, to_repeat(path))
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
    from autotune.front.defaults import run_or_newest
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
    from autotune.front.defaults import run_or_newest
    from autotune.report.export import check_installed, export_run

    check_installed(log_to)
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
    from autotune.front.defaults import runs_or_all
    from autotune.front.tables import show_comparison
    from autotune.report.compare import compare as compare_runs

    frame = compare_runs(runs_or_all(runs))
    if not _write("compare", frame, "run", csv, parquet, json):
        show_comparison(frame)


@app.command
def knobs(
    *,
    space: str | None = None,
    batch_size: int | None = None,
    examples: int | None = None,
    device: Literal["cpu", "gpu"] | None = None,
    cores: int | None = None,
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
    from autotune.front.tables import show_knobs
    from autotune.space.knobs import KNOBS

    only_with_space = {"--batch-size": batch_size, "--examples": examples, "--device": device, "--cores": cores}
    if space is None and (given := [name for name, value in only_with_space.items() if value is not None]):
        raise ArgumentError(f"{given[0]} was given without --space", hint="Name a search space, such as --space quick.")
    if space is not None and json:
        raise ArgumentError("--space and --json were both given", hint="Give one of them.")
    if space is not None:
        _show_space(space, 32 if batch_size is None else batch_size, examples, device, cores)
    elif json:
        print_json("knobs", knobs=list(KNOBS.values()))
    else:
        show_knobs()


def _show_space(file: str, batch_size: int, examples: int | None, device: str | None, cores: int | None) -> None:
    for option, count in {"--batch-size": batch_size, "--examples": examples, "--cores": cores}.items():
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
