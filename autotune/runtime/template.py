"""The template process: imports TensorFlow and the user's module once, then forks trials in milliseconds.

    python -m autotune.runtime.template CONTROL_FD DRIVER_PID MODE REFERENCE_JSON LAYERS ENTRY_POINT

It starts no TensorFlow runtime, never imports Optuna or pandas, and ends when its control socket closes. DRIVER_PID is
for whoever reads a list of processes. MODE is `new`; `known` for a script that was run before to find out what it does;
or `later`, where each fork imports everything for itself. LAYERS is the directory for what contained processes write
(see `containment`); empty where trials may write for real. ENTRY_POINT is the module that knows the workload, see
`EntryPoint`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

import psutil

from autotune.data.errors import WorkloadError
from autotune.data.facts import WorkloadFacts, WorkloadReference
from autotune.data.printable import printable
from autotune.data.record import Outcome
from autotune.recipe import apply
from autotune.runtime import containment, protocol, supervisor
from autotune.runtime.failures import is_out_of_memory, summarize_error
from autotune.runtime.places import CORES_VARIABLE
from autotune.runtime.waiting import WaitingProcess, lead_group, write_to_log
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
    ) -> tuple[WorkloadFacts, WaitingProcess | None]:
        """Return what the driver may know of the workload without TensorFlow.

        A script is surveyed in a fork, which first calls `leave_template` and may then wait for the first trial.
        """

    def run(
        self, request: protocol.TrialRequest, channel: protocol.Channel, workload: Any, reference: WorkloadReference
    ) -> int:
        """Run one trial to its end, and return the exit status."""


def main(arguments: list[str]) -> int:
    """Import, report, and serve the driver until it closes the socket."""
    descriptor, _, mode, reference_json, folder, name = arguments
    if cores := os.environ.pop(CORES_VARIABLE, ""):
        os.sched_setaffinity(0, map(int, cores.split(",")))  # TensorFlow makes as many threads
    os.environ.update(without_caches(os.environ))
    supervisor.fork_supervisor(int(descriptor))
    layers = Path(folder) if folder else None
    uncontained = "" if layers is None else containment.contain(layers)
    control = protocol.Channel(socket.socket(fileno=int(descriptor)))
    reference = WorkloadReference.model_validate_json(reference_json)
    entry: EntryPoint = importlib.import_module(name)  # a module with these functions
    entry.enable_compile_logging()
    workload, ready, waiting = None, protocol.TemplateReady(workload=None), None
    try:
        if mode != "later":
            workload, ready, waiting = _import_workload(entry, reference, control, known=mode == "known")
    except Exception as error:
        control.send(_encode_import_failure(error))
        return 1
    if ready.workload is not None:
        facts = ready.workload.model_copy(update={"uncontained": uncontained})
        ready = ready.model_copy(update={"workload": facts})
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, every page in each fork
    control.send(ready)
    try:
        with contextlib.suppress(protocol.ChannelClosed):
            _Server(control, entry, workload, reference, layers, waiting).serve()
    finally:
        supervisor.kill_orphans()
    return 0


def _encode_import_failure(error: Exception) -> protocol.TemplateFailed:
    """Return the message that reports a failed import. Raises what nobody expected."""
    if isinstance(error, WorkloadError):
        detail = printable(error.detail)[-20000:]
        return protocol.TemplateFailed(message=error.message, hint=error.hint, detail=detail)
    if is_out_of_memory(error):
        message = f"memory ran out while the workload was imported: {summarize_error(error)}"
        return protocol.TemplateFailed(message=message, no_memory=True)
    if not isinstance(error, ImportError):
        raise error
    hint = f"Repair the TensorFlow that is installed in {sys.prefix}: `import tensorflow` fails in it."
    return protocol.TemplateFailed(message=f"cannot import TensorFlow: {error}", hint=hint, users=False)


def _import_workload(
    entry: EntryPoint, reference: WorkloadReference, control: protocol.Channel, *, known: bool
) -> tuple[Any, protocol.TemplateReady, WaitingProcess | None]:
    """Import TensorFlow and what the workload needs, and describe the workload unless it is known."""
    workload, variables = entry.import_workload(reference)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the file ignores this signal, the ends of trials are lost
    started, in_force = inspect_import()
    if known:
        return workload, protocol.TemplateReady(workload=None, started=started), None
    facts, waiting = entry.describe_workload(reference, workload, variables, in_force, control.close)
    return workload, protocol.TemplateReady(workload=facts, started=started, waits=waiting is not None), waiting


def inspect_import() -> tuple[protocol.StartedByImport | None, dict[str, Any]]:
    """Return what importing the user's module has started, and the knobs in force before a model is built."""
    if is_gpu_open():
        return "cuda", apply.in_force()
    if threading.active_count() > 1:
        return "threads", apply.in_force()
    reading, writing = os.pipe()
    pid = _fork()  # a child asks TensorFlow: that starts CUDA, which no fork survives
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(writing, json.dumps([apply.runtime_has_started(), apply.in_force()]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        runtime, in_force = json.loads(stream.read() or "[true, {}]")
    os.waitpid(pid, 0)
    return "runtime" if runtime else None, in_force


def is_gpu_file(path: str) -> bool:
    """Return whether CUDA holds such a file open: of NVIDIA's driver, under WSL 2, on Jetson boards."""
    return path.startswith(("/dev/nvidia", "/dev/dxg", "/dev/nvhost", "/dev/nvmap"))


def is_gpu_open(descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Return whether a process, by its list of descriptors, holds a GPU's file open: no fork survives that."""
    for name in os.listdir(descriptors):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if is_gpu_file(os.readlink(descriptors / name)):
                return True
    return False


def _fork() -> int:
    with warnings.catch_warnings():
        # TensorFlow's import leaves four idle threads; none holds a lock, because no runtime was started.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class _Server:
    """Forks trials on request and reports their ends."""

    def __init__(
        self,
        control: protocol.Channel,
        entry: EntryPoint,
        workload: Any,
        reference: WorkloadReference,
        layers: Path | None,  # for what trials write
        waiting: WaitingProcess | None,
    ) -> None:
        self._control, self._entry, self._layers = control, entry, layers
        self._workload, self._reference, self._waiting = workload, reference, waiting
        self._trials = {} if waiting is None else {waiting.pidfd: waiting.pid}  # pidfd → pid
        children = {child.pid for child in psutil.Process().children()}
        self._children_of_module = frozenset(children.difference(self._trials.values()))

    def serve(self) -> NoReturn:
        """Serve until the control socket closes, which raises `ChannelClosed`."""
        while True:
            ready = wait([self._control.fileno(), *self._trials])
            for pidfd in [pidfd for pidfd in self._trials if pidfd in ready]:
                self._reap(pidfd)
            if self._control.fileno() in ready:  # after that: a descriptor that is closed now may be given again
                self._start()

    def _start(self) -> None:
        request = self._control.receive()
        assert isinstance(request, protocol.TrialRequest)
        drivers, trials = socket.socketpair()
        with drivers, trials:
            forked = self._hand_over(request, trials)
            if forked is None:
                pid = _fork()
                if pid == 0:
                    drivers.close()
                    self._run_trial(request, trials)
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)  # here too, so that the driver can signal the group at once
                self._trials[os.pidfd_open(pid)] = pid
                forked = protocol.Forked(pid=pid)
            self._control.send(forked, drivers)

    def _hand_over(self, request: protocol.TrialRequest, end: socket.socket) -> protocol.Forked | None:
        """Have the waiting process go on as this trial; None where there is none, or it cannot and is ended."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        forked = waiting.hand_over(request, end)
        if forked is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(waiting.pid, signal.SIGKILL)
            self._reap(waiting.pidfd)
        return forked

    def _run_trial(self, request: protocol.TrialRequest, end: socket.socket) -> NoReturn:
        status, template = 1, os.getppid()
        try:
            lead_group(template)
            self._control.close()
            for pidfd in self._trials:
                os.close(pidfd)
            recorded = [] if request.losses is None else [os.path.dirname(request.losses.folder)]
            try:
                containment.renew([os.path.dirname(request.log), *recorded])
            except OSError as error:
                reason = f"its writes cannot be isolated: {error}"
                protocol.Channel(end).send(protocol.Failed(outcome=Outcome.ERROR, reason=reason))
                os._exit(status)
            write_to_log(request.log)
            status = self._entry.run(request, protocol.Channel(end), self._workload, self._reference)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the workload may have closed it, or the disk is full
                    stream.flush()
            os._exit(status)

    def _reap(self, pidfd: int) -> None:
        pid = self._trials.pop(pidfd)
        if self._waiting is not None and self._waiting.pid == pid:
            self._waiting = None
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        supervisor.kill_orphans(self._children_of_module | set(self._trials.values()))
        self._control.send(protocol.Exited(pid=pid, status=os.waitstatus_to_exitcode(status)))
        if self._layers is not None:
            containment.remove_layers(self._layers / str(pid))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
