"""The template process: imports TensorFlow and the user's module once, then forks trials in milliseconds.

    python -m autotune.executors.template CONTROL_FD DRIVER_PID MODE REFERENCE_JSON LAYERS

It starts no TensorFlow runtime, never imports Optuna or pandas, and ends when its control socket closes. DRIVER_PID is
for whoever reads a list of processes. MODE is `new`; `known` where a script has been run before to find out what it
does; or `later`, where each fork imports everything for itself. LAYERS is the directory for what is written by
contained processes (see `containment`); empty where trials may write for real.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import psutil

from autotune.errors import WorkloadError
from autotune.executors import containment, lifeline
from autotune.executors.log import open_log, printable
from autotune.executors.places import CORES_VARIABLE
from autotune.recipe import apply
from autotune.record import Outcome
from autotune.scripts.execute import discover, file_of, import_packages
from autotune.scripts.sources import refuse_broken
from autotune.scripts.survey import survey as survey_script
from autotune.space.variables import without_caches
from autotune.worker import main as worker
from autotune.worker import messages
from autotune.worker.failures import is_out_of_memory
from autotune.worker.retracing import ask_runtime_to_tell
from autotune.workloads.loading import facts_of, load, require_tensorflow
from autotune.workloads.users_errors import cause_of
from autotune.workloads.workload import Workload, WorkloadFacts, WorkloadReference


def main(arguments: list[str]) -> int:
    """Import, report, and serve the driver until it closes the socket."""
    descriptor, _, mode, reference_json, folder = arguments
    if cores := os.environ.pop(CORES_VARIABLE, ""):
        os.sched_setaffinity(0, map(int, cores.split(",")))  # TensorFlow makes as many threads
    os.environ.update(without_caches(os.environ))
    lifeline.leave_a_keeper(int(descriptor))
    layers = Path(folder) if folder else None
    uncontained = "" if layers is None else containment.contain(layers)
    control = messages.Channel(socket.socket(fileno=int(descriptor)))
    reference = WorkloadReference.model_validate_json(reference_json)
    ask_runtime_to_tell()
    workload, ready = None, messages.TemplateReady(workload=None)
    try:
        if mode != "later":
            workload, ready = _imported(reference, known=mode == "known")
        if ready.workload is not None:
            facts = ready.workload.model_copy(update={"uncontained": uncontained})
            ready = ready.model_copy(update={"workload": facts})
    except WorkloadError as error:
        detail = printable(error.detail)[-20000:]
        control.send(messages.TemplateFailed(message=error.message, hint=error.hint, detail=detail))
        return 1
    except Exception as error:
        if is_out_of_memory(error):
            message = f"memory ran out while the workload was imported: {cause_of(error)}"
            control.send(messages.TemplateFailed(message=message, no_memory=True))
            return 1
        if not isinstance(error, ImportError):
            raise
        message = f"cannot import TensorFlow: {error}"
        hint = f"Mend the TensorFlow that is installed in {sys.prefix}: `import tensorflow` fails in it."
        control.send(messages.TemplateFailed(message=message, hint=hint, users=False))
        return 1
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, every page in each fork
    control.send(ready)
    try:
        with contextlib.suppress(messages.ChannelClosed):
            _Server(control, workload, reference, layers).serve()
    finally:
        lifeline.kill_orphans()
    return 0


def _imported(reference: WorkloadReference, *, known: bool) -> tuple[Workload | None, messages.TemplateReady]:
    """Import the workload; for a script what it does not bring itself: its own modules are imported in the trials."""
    workload = None
    variables: dict[str, str] = {}
    packages: list[str] = []
    if reference.script is None:
        workload = load(reference)  # first: it may set what TensorFlow reads while it is imported
    else:
        variables, packages = discover(reference)
        os.environ.update(variables)
        refuse_broken(file_of(reference))
        require_tensorflow()
    _require_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")  # before what that would need
    if reference.script is not None and os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise WorkloadError(
            f"{reference.shown} runs with TF_USE_LEGACY_KERAS, which is Keras 2",
            hint="Leave the variable out, so that tf.keras is Keras 3: Keras 2 cannot be tuned.",
        )
    import keras  # so that no trial has to
    import tensorflow as tf  # noqa: F401

    _require_backend(keras.backend.backend())  # a file of settings may name another
    import_packages(packages)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the file ignores this signal, the ends of trials are lost
    started, in_force = survey()
    if workload is not None:
        apply.note_layers()
        facts: WorkloadFacts | None = facts_of(workload, reference, in_force)
    else:
        facts = None if known else survey_script(reference, variables)
    return workload, messages.TemplateReady(workload=facts, started=started)


def _require_backend(name: str) -> None:
    if name != "tensorflow":
        raise WorkloadError(
            f"Keras runs on {name} here, expected tensorflow: that is what is tuned",
            hint='Set KERAS_BACKEND=tensorflow, or "backend" in ~/.keras/keras.json.',
        )


def survey() -> tuple[messages.StartedByImport | None, dict[str, Any]]:
    """What importing the user's module has started, and the knobs that are in force before a model is built."""
    if device_is_open():
        return "cuda", apply.in_force()
    if threading.active_count() > 1:
        return "threads", apply.in_force()
    reading, writing = os.pipe()
    pid = _fork()  # asking TensorFlow starts CUDA, which no fork survives: a child is sent to ask
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
    """Whether CUDA holds such a file open: of NVIDIA's driver, under WSL 2, on Jetson boards."""
    return path.startswith(("/dev/nvidia", "/dev/dxg", "/dev/nvhost", "/dev/nvmap"))


def device_is_open(descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Whether this process, or another by its list of open files, holds a GPU's file open: no fork survives that."""
    for name in os.listdir(descriptors):
        with contextlib.suppress(OSError):  # the listing's own, closed by now
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
        control: messages.Channel,
        workload: Workload | None,
        reference: WorkloadReference,
        layers: Path | None,  # for what trials write
    ) -> None:
        self._control = control
        self._layers = layers
        self._workload = workload
        self._reference = reference
        self._trials: dict[int, int] = {}  # pidfd → pid
        self._of_the_module = frozenset(child.pid for child in psutil.Process().children())

    def serve(self) -> NoReturn:
        """Until the control socket closes, which raises `ChannelClosed`."""
        while True:
            for ready in wait([self._control.fileno(), *self._trials]):
                if ready in self._trials:
                    self._reap(ready)
                else:
                    self._start()

    def _start(self) -> None:
        request = self._control.receive()
        assert isinstance(request, messages.TrialRequest)
        drivers, trials = socket.socketpair()
        with drivers, trials:
            pid = _fork()
            if pid == 0:
                drivers.close()
                self._run_trial(request, trials)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here too, so that the driver can signal the group at once
            self._trials[os.pidfd_open(pid)] = pid
            self._control.send(messages.Forked(pid=pid), drivers)

    def _run_trial(self, request: messages.TrialRequest, end: socket.socket) -> NoReturn:
        status, template = 1, os.getppid()
        try:
            os.setpgid(0, 0)
            lifeline.die_with_parent(template)
            with contextlib.suppress(OSError):
                # When memory runs out, the kernel kills this process, not the driver.
                Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
            self._control.close()
            for pidfd in self._trials:
                os.close(pidfd)
            recorded = [] if request.losses is None else [os.path.dirname(request.losses.folder)]
            try:
                containment.renew([os.path.dirname(request.log), *recorded])
            except OSError as error:
                reason = f"what it writes cannot be kept apart: {error}"
                messages.Channel(end).send(messages.Failed(outcome=Outcome.ERROR, reason=reason))
                os._exit(status)
            output = open_log(request.log)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            faulthandler.enable(all_threads=False)  # the log says where in the user's code a signal struck
            status = worker.run(request, messages.Channel(end), self._workload, self._reference)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the workload may have closed it, or the disk is full
                    stream.flush()
            os._exit(status)

    def _reap(self, pidfd: int) -> None:
        pid = self._trials.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        lifeline.kill_orphans(self._of_the_module | set(self._trials.values()))
        self._control.send(messages.Exited(pid=pid, status=os.waitstatus_to_exitcode(status)))
        if self._layers is not None:
            containment.remove_layers(self._layers / str(pid))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
