"""The entry points of the template and the trial: import the workload, describe it, and run one trial of it.

A trial is a fork of the template, or of a process that has imported nothing and imports everything itself. It never
imports Optuna or pandas. Reports go over the pipe, as data; stdout and stderr are the trial's log.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.facts import KerasVersion, WorkloadFacts, WorkloadReference
from autotune.recipe import apply
from autotune.runtime import failures, protocol
from autotune.runtime.fork_server import WaitingProcess
from autotune.runtime.sources import directory_of, file_of, keras_of_sources, own_files, refuse_broken
from autotune.script import trial as script_trial
from autotune.script import workload_fit
from autotune.script.execute import discover, import_packages
from autotune.script.loading import facts_of, load, require_tensorflow, source_files
from autotune.script.shared_start import share_start
from autotune.script.survey import survey as survey_script
from autotune.script.workload import Workload
from autotune.space.configuration import Configuration
from autotune.space.keras_in_use import keras_in_use, keras_module, use_keras
from autotune.training.gauges import enable_compile_logging

__all__ = ["describe_workload", "enable_compile_logging", "import_workload", "run", "share_start"]

KINDS: dict[type, Callable[..., None]] = {Workload: workload_fit.run, WorkloadReference: script_trial.run}
"""The function that runs a trial of each kind of workload."""


def run(
    request: protocol.TrialRequest, channel: protocol.Channel, workload: Workload | None, reference: WorkloadReference
) -> int:
    """Run one trial to its end, and return its exit status: 0 when the tuner ended it, 1 when it failed.

    The workload is imported from `reference` where the template has not imported it.
    """
    try:
        configuration = Configuration(request.configuration)
        trained = _apply(request, configuration, workload, reference)
        run_kind = next(run_kind for kind, run_kind in KINDS.items() if isinstance(trained, kind))
        run_kind(request, channel, trained, configuration)
    except protocol.ChannelClosed:
        return 1
    except BaseException as error:
        channel.send(failures.encode_failure(error))
        return 1
    return 0


def _apply(
    request: protocol.TrialRequest,
    configuration: Configuration,
    workload: Workload | None,
    reference: WorkloadReference,
) -> Workload | WorkloadReference:
    """Put the configuration in force, and return the workload, imported now where the template has not."""
    use_keras(request.keras)
    if request.script is not None:
        os.environ.update(request.script.variables)
        script_trial.prepare(configuration, request.script)
        return reference
    apply.apply_before_import(configuration)
    if workload is None:
        # The user's module may start the runtime: what must precede that is set first.
        apply.apply_before_build(configuration)
        workload = load(reference)
        apply.apply_before_import(configuration)  # again: the module may have set them as well
    apply.apply_before_build(configuration)
    return workload


def import_workload(reference: WorkloadReference) -> tuple[Workload | None, dict[str, str]]:
    """Import TensorFlow and the workload; of a script the installed packages, as its own modules load in trials.

    Returns:
        The workload, None for a script; and the variables that a script sets before it imports TensorFlow.

    Raises:
        WorkloadError: The user's file, TensorFlow or Keras's backend cannot be used.
    """
    workload = None
    variables: dict[str, str] = {}
    packages: list[str] = []
    if reference.script is None:
        workload = load(reference)  # first: it may set what TensorFlow reads while it is imported
        files = source_files(reference)
    else:
        variables, packages = discover(reference)
        os.environ.update(variables)
        refuse_broken(file_of(reference))
        files = own_files(file_of(reference), Path(directory_of(reference)))
    use_keras(keras_of_sources(files, os.environ))
    require_tensorflow()
    is_keras_3 = keras_in_use() is KerasVersion.KERAS_3
    if is_keras_3:
        _require_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")  # before what that would need
    keras = keras_module()  # so that no trial has to
    import tensorflow as tf  # noqa: F401

    if is_keras_3:
        _require_backend(keras.backend.backend())  # a file of settings may name another
    import_packages(packages)
    return workload, variables


def _require_backend(name: str) -> None:
    if name != "tensorflow":
        raise WorkloadError(
            f"Keras uses the backend {name}; autotune tunes the backend tensorflow",
            hint='Set KERAS_BACKEND=tensorflow, or "backend" in ~/.keras/keras.json.',
        )


def describe_workload(
    reference: WorkloadReference,
    workload: Workload | None,
    variables: dict[str, str],
    in_force: dict[str, Any],
    leave_template: Callable[[], None],
    tell: Callable[[str], object],
) -> tuple[WorkloadFacts, WaitingProcess | None]:
    """Return the facts of the workload that the driver needs; a script runs in a fork up to its training."""
    if workload is None:
        return survey_script(reference, variables, leave_template, tell)
    apply.note_layers()
    return facts_of(workload, reference, in_force), None
