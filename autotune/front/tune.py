"""Tune a training from Python: run it, then write the run's page."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from autotune.data.options import take_options
from autotune.front.console import Progress
from autotune.recipe.recipe import Recipe
from autotune.script.workload import Workload
from autotune.tuning.events import Notice, Observer, silent
from autotune.tuning.tune import read_request, run_tuning


@take_options
def tune(
    workload: Workload | str | os.PathLike[str],
    *,
    args: Sequence[str] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    wait: bool = False,
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
        observe: Is called with each event, see `autotune.tuning.events`. When left out, a notebook shows a line for
            each trial, and a program nothing.

    Returns:
        The recipe, which is also written to the run directory.

    Raises:
        InputError: An argument, the workload or the search space cannot be used.
        NoStableConfigurationError: The baseline itself fails.
        TuningInterruptedError: Interrupted before anything was measured.
    """
    request = read_request(workload, args=args, out=out, resume=resume, options=options)
    with contextlib.ExitStack() as drawing:
        if observe is None:
            observe = drawing.enter_context(Progress()) if RichConsole().is_jupyter else silent
        recipe = run_tuning(request, observe, wait=wait)
        from autotune.report.page import try_write_page  # imports pandas, which nothing needs before

        if problem := try_write_page(request.directory.path):
            observe(Notice(text=problem))
    return recipe
