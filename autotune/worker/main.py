"""The trial process: applies one configuration, then runs the workload and obeys the tuner.

Runs in a fork of the template (or in a fork that has imported nothing, which then imports everything itself). Never
imports Optuna or pandas. Reports go over the pipe, as data; stdout and stderr are the trial's log.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.recipe import apply
from autotune.scripts import trial as script_trial
from autotune.space.configuration import Configuration
from autotune.worker import failures, keras_fit, messages
from autotune.workloads.loading import load
from autotune.workloads.workload import Workload, WorkloadReference

KINDS: dict[type, Callable[..., None]] = {Workload: keras_fit.run, WorkloadReference: script_trial.run}
"""What runs a trial of each kind of workload."""


def run(
    request: messages.TrialRequest, channel: messages.Channel, workload: Workload | None, reference: WorkloadReference
) -> int:
    """Run one trial to its end; the exit status of its process: 0 when the tuner ended it, 1 when it failed.

    The workload is imported from `reference` where the template has not imported it.
    """
    try:
        configuration = Configuration(request.configuration)
        trained = _applied(request, configuration, workload, reference)
        run_kind = next(run_kind for kind, run_kind in KINDS.items() if isinstance(trained, kind))
        run_kind(request, channel, trained, configuration)
    except messages.ChannelClosed:
        return 1
    except BaseException as error:
        channel.send(failures.told(error))
        return 1
    return 0


def _applied(
    request: messages.TrialRequest,
    configuration: Configuration,
    workload: Workload | None,
    reference: WorkloadReference,
) -> Workload | WorkloadReference:
    """What is trained, imported now where the template has not, with the configuration in force."""
    if request.script is not None:
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
