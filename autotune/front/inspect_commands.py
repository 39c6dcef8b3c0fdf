"""The commands that show something. Heavy modules are imported inside them, so that help and errors answer at once."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from autotune.data.errors import ArgumentError, RunDirectoryError
from autotune.data.printable import plural
from autotune.front.app import app
from autotune.space.configuration import read_trials


@app.command
def show(path: Path, /, *, diff: Path | None = None) -> None:
    """Show a recipe, or a run: its trials and its recipe.

    Args:
        path: A recipe.json, or a run directory.
        diff: A script: print the edit of it that makes the recipe permanent.
    """
    from autotune.data.run_directory import RunDirectory
    from autotune.front.closing import show_diff, show_recipe, show_usage
    from autotune.front.tables import show_trials
    from autotune.front.text import say
    from autotune.recipe.recipe import Recipe
    from autotune.report.runs import baseline_of
    from autotune.space.configuration import Configuration
    from autotune.tuning.resume import to_repeat

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


@app.command
def history(
    runs: Annotated[list[Path], Parameter(allow_leading_hyphen=False)],
    /,
    *,
    csv: Path | None = None,
    parquet: Path | None = None,
) -> None:
    """Every trial of one run or many, as a table.

    Args:
        runs: Run directories, or a directory that holds some, such as results/.
        csv: Write the table to this CSV file.
        parquet: Write the table to this Parquet file.
    """
    from autotune.front.tables import show_history
    from autotune.front.text import note
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
    from autotune.front.text import say
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
    from autotune.front.text import say

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
    """Set runs side by side: what each found, and whether they may be compared.

    Args:
        runs: Run directories, or a directory that holds some, such as results/.
    """
    from autotune.front.tables import show_comparison
    from autotune.report.compare import compare_runs

    show_comparison(compare_runs(*runs))


@app.command
def doctor(*, json: bool = False) -> int:
    """Say what keeps TensorFlow from this machine's devices, or makes it slow here, and what to do first.

    The exit code is 1 where something stops TensorFlow from using a device that is there.

    Args:
        json: Print the findings as JSON.
    """
    from autotune.front.doctor_report import look
    from autotune.front.tables import show_findings
    from autotune.machine.doctor import Level, diagnose

    findings = diagnose(look())
    show_findings(findings, as_json=json)
    return 1 if any(each.level is Level.STOPS for each in findings) else 0


@app.command
def knobs() -> None:
    """List every knob: what it does, its values, when it acts."""
    from autotune.front.tables import show_knobs

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
        device: What the training would run on; when left out a GPU, where this machine has one that NVIDIA's driver
            shows.
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
