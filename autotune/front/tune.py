"""Tune a training from Python: run it, then write the run's page."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from autotune.data.options import Tracker, take_options
from autotune.front.console import Progress
from autotune.recipe.recipe import Recipe
from autotune.runtime.template_process import import_path
from autotune.script.workload import Workload
from autotune.tuning.events import Began, Notice, Observer, silent
from autotune.tuning.tune import read_request, run_tuning

EXPORT_SECONDS = 120.0  # the longest time that a tracker may take at the end of a run
_EXPORT = "import sys; from autotune.front.cli import main; sys.exit(main())"


@take_options
def tune(
    workload: Workload | str | os.PathLike[str],
    *,
    args: Sequence[str] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    wait: bool = False,
    log_to: Tracker | None = None,
    observe: Observer | None = None,
    **options: Any,
) -> Recipe:
    """Find the fastest stable configuration of a training on this machine.

    Args:
        workload: What is trained: a script, as `"path/to/train.py"` or `"package.module"`; a `Workload` at the top
            level of a module, or `"path/to/file.py[:name]"` or `"package.module[:name]"`. Without a name it is a
            script if the source binds no `workload` at its top level.
        options: See `autotune.data.options.Options`.
        args: `sys.argv[1:]` of the script or the workload's file, in trials. When left out there are none; a `Workload`
            has those of the running program, and a resumed run its own.
        out: The run directory; a new one below `results/` when left out.
        resume: The directory of a run, ended or stopped: it continues with all that was measured. It keeps its options,
            except for `budget`, `trials`, `soak`, `train_samples`, `executor` and the choice of seats.
        wait: Wait until earlier runs on the same devices of this machine have ended. The budget begins then.
        log_to: Export the trials to this tracker once the run has ended, as `autotune export` does. Its package must be
            installed. If it fails or takes over two minutes, a note says so, and the run stands.
        observe: Is called with each event, see `autotune.tuning.events`. When left out, a notebook shows a line for
            each trial, and a program nothing.

    Returns:
        The recipe, which is also written to the run directory.

    Raises:
        InputError: An argument, the workload or the search space cannot be used.
        NoStableConfigurationError: The baseline itself fails.
        TuningInterruptedError: Interrupted before anything was measured.
    """
    if log_to is not None:
        from autotune.report.export import check_installed

        check_installed(log_to)
    request = read_request(workload, args=args, out=out, resume=resume, options=options)
    with contextlib.ExitStack() as drawing:
        if observe is None:
            observe = drawing.enter_context(Progress()) if RichConsole().is_jupyter else silent
        recipe = run_tuning(request, observe, wait=wait)
        from autotune.report.page import try_write_page  # imports pandas, which nothing needs before

        if problem := try_write_page(request.directory.path):
            observe(Notice(text=problem))
        if log_to is not None:
            observe(Began(text=f"exporting the trials to {log_to}"))
            observe(Notice(text=_try_export(request.directory.path, log_to)))
    return recipe


def _try_export(path: Path, tracker: Tracker) -> str:
    """Export a run in a process of its own, and return where its trials are, or why they are not exported."""
    words = ["export", str(path), "--log-to", tracker]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _EXPORT, *words],
        stdin=subprocess.DEVNULL,  # a tracker that asks for a key fails at once
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **import_path()},
        start_new_session=True,
    ) as exporting:
        try:
            told, errors = exporting.communicate(timeout=EXPORT_SECONDS)
            problem = next((line for line in errors.splitlines() if line.startswith("autotune: ")), "")
            if exporting.returncode == 0:
                return f"the trials are in {tracker}: {told.strip()}"
            problem = problem.removeprefix("autotune: ") or f"{tracker} ended its process"
        except subprocess.TimeoutExpired:
            problem = f"{tracker} took over {EXPORT_SECONDS:.0f} s"
        except KeyboardInterrupt:
            problem = "interrupted"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(exporting.pid, signal.SIGKILL)  # what the tracker has started as well
    return f"the trials are not exported: {problem}; to try again: {shlex.join(['autotune', *words])}"
