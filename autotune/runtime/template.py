"""The template process: imports TensorFlow and the user's module once, then forks trials in milliseconds.

    python -m autotune.runtime.template CONTROL_FD DRIVER_PID MODE REFERENCE_JSON LAYERS ENTRY_POINT

It starts no TensorFlow runtime, never imports Optuna or pandas, and ends when its control socket closes. DRIVER_PID is
for whoever reads a list of processes. MODE is `new`; `known` for a script that was run before to find out what it does;
`shared` for a known one whose start is run once, for all trials; or `later`, where each fork imports everything for
itself. LAYERS is the directory for what contained processes write (see `containment`); empty where trials may write for
real. ENTRY_POINT is the module that knows the workload, see `EntryPoint`.

Where the start of a script can be shared, a fork of the template runs it up to its first call of TensorFlow's runtime,
and serves the driver in the template's place.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from autotune.data.errors import WorkloadError
from autotune.data.facts import WorkloadFacts, WorkloadReference
from autotune.data.record import Outcome
from autotune.machine.gpu import is_gpu_open
from autotune.recipe import apply
from autotune.runtime import containment, protocol, supervisor
from autotune.runtime.failures import encode_failure, is_out_of_memory, summarize_error
from autotune.runtime.fork_server import ForkServer, ForkState, WaitingProcess
from autotune.runtime.supervisor import exit_now, run_in_fork, send_answer
from autotune.space.variables import without_caches


class EntryPoint(Protocol):
    """The module that imports, describes and runs workloads. The driver passes its name: this room imports none."""

    def enable_compile_logging(self) -> None:
        """Have TensorFlow log compilations, before it is imported."""

    def import_workload(self, reference: WorkloadReference) -> tuple[Any, dict[str, str]]:
        """Import TensorFlow, and a `Workload` or a script's packages; also return the variables that a script sets."""

    def describe_workload(
        self,
        reference: WorkloadReference,
        workload: Any,
        variables: dict[str, str],
        in_force: dict[str, Any],
        leave_template: Callable[[], None],
        tell: Callable[[str], object],
    ) -> tuple[WorkloadFacts, WaitingProcess | None]:
        """Return the facts of the workload that need no TensorFlow.

        A script is surveyed in a fork, which first calls `leave_template` and may then wait for the first trial. `tell`
        is called in this process with what the fork runs.
        """

    def share_start(
        self, reference: WorkloadReference, variables: dict[str, str], server: ForkServer, pipe: int, *, known: bool
    ) -> str:
        """Run the start of a script, survey it unless known, answer `{"serves": pid}` and serve; or say why not."""

    def run(
        self, request: protocol.TrialRequest, channel: protocol.Channel, workload: Any, reference: WorkloadReference
    ) -> int:
        """Run one trial to its end, and return the exit status."""


def main(arguments: list[str]) -> int:
    """Import, report, and serve the driver until it closes the socket."""
    descriptor, _, mode, reference_json, folder, name = arguments
    os.environ.update(without_caches(os.environ))
    supervisor.fork_supervisor(int(descriptor))
    layers = Path(folder) if folder else None
    uncontained = "" if layers is None else containment.contain(layers)
    control = protocol.Channel(socket.socket(fileno=int(descriptor)))
    reference = WorkloadReference.model_validate_json(reference_json)
    entry: EntryPoint = importlib.import_module(name)  # a module with these functions
    entry.enable_compile_logging()
    server = ForkServer(control, layers)
    workload, ready, waiting = None, protocol.TemplateReady(workload=None), None
    try:
        if mode != "later":
            workload, variables = entry.import_workload(reference)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the file ignores it, the ends of trials are lost
            started, in_force = inspect_import()
            reason = ""
            if mode != "known" and started is None and reference.script is not None and containment.is_active():
                status, reason = _share_start(entry, reference, variables, server, known=mode == "shared")
                if status is not None:
                    return status
            facts = None
            if mode == "new":
                facts, waiting = entry.describe_workload(
                    reference, workload, variables, in_force, control.close, server.tell
                )
                script = facts.script and facts.script.model_copy(update={"repeats_start": reason})
                facts = facts.model_copy(update={"uncontained": uncontained, "script": script})
            ready = protocol.TemplateReady(workload=facts, started=started, waits=waiting is not None)
    except Exception as error:
        control.send(_encode_import_failure(error))
        return 1
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, every page in each fork
    control.send(ready)
    try:
        request, channel = server.serve(ForkState(), waiting)
    except BaseException as error:
        supervisor.kill_orphans()
        if isinstance(error, protocol.ChannelClosed):
            return 0
        raise
    status = 1
    try:
        status = entry.run(request, channel, workload, reference)
    finally:
        exit_now(status)


def _encode_import_failure(error: Exception) -> protocol.Failed:
    """Return the message that reports a failed import. Raises what nobody expected."""
    if isinstance(error, WorkloadError):
        return encode_failure(error)
    if is_out_of_memory(error):
        reason = f"memory ran out while the workload was imported: {summarize_error(error)}"
        return protocol.Failed(outcome=Outcome.OOM, reason=reason)
    if not isinstance(error, ImportError):
        raise error
    hint = f"Repair the TensorFlow that is installed in {sys.prefix}: `import tensorflow` fails in it."
    return protocol.Failed(outcome=Outcome.ERROR, reason=f"cannot import TensorFlow: {error}", hint=hint)


def _share_start(
    entry: EntryPoint, reference: WorkloadReference, variables: dict[str, str], server: ForkServer, *, known: bool
) -> tuple[int | None, str]:
    """Have a fork of this process run the script's start, and serve the driver from there until it ends.

    Returns:
        The exit status of the fork, None where it did not serve; and why it did not.
    """
    others = frozenset(child.pid for child in psutil.Process().children())

    def lead(template: int) -> None:
        os.setpgid(0, 0)
        supervisor.die_with_parent(template)

    def run(pipe: int) -> None:
        reason = ""
        try:
            supervisor.adopt_orphans()
            containment.renew([str(server.layers)], for_forks=True)  # layers that its own forks read
            reason = entry.share_start(reference, variables, server, pipe, known=known)
        except BaseException as error:
            traceback.print_exc()  # the template goes on without
            reason = f"trials cannot share that, because {summarize_error(error)}"
        finally:
            send_answer(pipe, {"reason": reason})
            exit_now(0)

    answer = run_in_fork(run, setup=lead, keep_alive_key="serves")
    status = os.waitpid(answer["serves"], 0)[1] if "serves" in answer else None
    supervisor.kill_orphans(others)
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code < 0 else code, ""
    if "killed_by" in answer:
        why = f"{signal.Signals(answer['killed_by']).name} ended the process that ran it"
        return None, f"trials cannot share that, because {why}"
    return None, str(answer.get("reason", ""))


def inspect_import() -> tuple[protocol.StartedByImport | None, dict[str, Any]]:
    """Return the runtime that importing the user's module has started, and the knobs in force after it."""
    if is_gpu_open():
        return "cuda", apply.in_force()
    if threading.active_count() > 1:
        return "threads", apply.in_force()

    def ask(pipe: int) -> None:  # that starts CUDA, which no fork survives
        send_answer(pipe, {"started": apply.runtime_has_started(), "in_force": apply.in_force()})

    answer = run_in_fork(ask)
    return "runtime" if answer.get("started", True) else None, answer.get("in_force", {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
