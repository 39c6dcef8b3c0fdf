"""The template process: imports TensorFlow and the user's module once, then forks trials in milliseconds.

    python -m autotune.executors.template CONTROL_FD TUNER_PID PRELOAD REFERENCE_JSON

It starts no TensorFlow runtime, never imports Optuna or pandas, and ends when its control socket closes. TUNER_PID
is for whoever reads a list of processes.
With PRELOAD `0` it imports nothing of the user's: each fork then imports everything for itself (a
fresh interpreter per trial, for modules that start the runtime by being imported).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NoReturn

import psutil

from autotune.errors import WorkloadError
from autotune.executors import lifeline, log
from autotune.recipe import apply
from autotune.worker import main as worker
from autotune.worker import messages
from autotune.worker.retracing import ask_runtime_to_tell
from autotune.workloads.loading import facts_of, load
from autotune.workloads.workload import Workload, WorkloadReference


def main(arguments: list[str]) -> int:
    """Import, report, and serve the tuner until it closes the socket."""
    descriptor, _, preload, reference_json = arguments
    lifeline.leave_a_keeper(int(descriptor))
    control = messages.Channel(socket.socket(fileno=int(descriptor)), messages.to_template)
    reference = WorkloadReference.model_validate_json(reference_json)
    ask_runtime_to_tell()
    workload = None
    try:
        facts, started = None, None
        if preload == "1":
            workload = load(reference)  # first: it may set what TensorFlow reads while it is imported
            # Where it ignores that its children end, nobody learns how a trial did.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _require_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")  # before what that would need
            import keras  # so that no trial has to
            import tensorflow as tf  # noqa: F401

            _require_backend(keras.backend.backend())  # a file of settings may name another
            started, in_force = survey()
            facts = facts_of(workload, reference, in_force)
            apply.note_layers()
    except WorkloadError as error:
        control.send(
            messages.TemplateFailed(
                message=log.printable(error.message)[:4000],
                hint=error.hint,
                detail=log.printable(error.detail)[-20000:],
            )
        )
        return 1
    except ImportError as error:
        control.send(
            messages.TemplateFailed(
                message=f"cannot import TensorFlow: {error}",
                hint=f"Mend the TensorFlow that is installed in {sys.prefix}: `import tensorflow` fails in it.",
                users=False,
            )
        )
        return 1
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, every page in each fork
    control.send(messages.TemplateReady(workload=facts, started=started))
    try:
        with contextlib.suppress(messages.ChannelClosed):
            _Server(control, workload, reference).serve()
    finally:
        lifeline.kill_orphans(frozenset())
    return 0


def _require_backend(name: str) -> None:
    if name != "tensorflow":
        raise WorkloadError(
            f"Keras runs on {name} here, expected tensorflow: that is what is tuned",
            hint='Set KERAS_BACKEND=tensorflow, or "backend" in ~/.keras/keras.json.',
        )


def survey() -> tuple[messages.StartedByImport | None, dict[str, Any]]:
    """What importing the user's module has done to this process.

    Asking TensorFlow wakes CUDA, which no fork survives: a child is sent to ask. A thread count can only be
    changed before the runtime starts; that is blind to CUDA, which `list_physical_devices` wakes
    without starting the runtime: hence the look at the open files.

    Returns:
        What can no longer be forked, `runtime` (TensorFlow's), `cuda` (a device was opened), `threads` (Python's, of
        which a fork has none, so that who waits for one waits for ever) or None; and what the knobs that act before a
        model is built stand at (empty where it cannot be told).
    """
    if _device_is_open():
        return "cuda", apply.in_force()
    if threading.active_count() > 1:
        return "threads", apply.in_force()
    reading, writing = os.pipe()
    pid = _fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            found = {"started": apply.runtime_has_started(), "in_force": apply.in_force()}
            os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    answer: dict[str, Any] = json.loads(text) if text else {"started": True, "in_force": {}}
    return "runtime" if answer["started"] else None, answer["in_force"]


def is_gpu_file(path: str) -> bool:
    """Whether CUDA holds such a file open: of NVIDIA's driver, under WSL 2, on Jetson boards."""
    return path.startswith(("/dev/nvidia", "/dev/dxg", "/dev/nvhost", "/dev/nvmap"))


def _device_is_open() -> bool:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if is_gpu_file(os.readlink(f"/proc/self/fd/{descriptor}")):
                return True
    return False


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns at forks with several OS threads. TensorFlow's import leaves four idle
        # ones; none holds a lock that the child needs, because no runtime was started.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class _Server:
    """Forks trials on request and reports their ends."""

    def __init__(
        self,
        control: messages.Channel[messages.TrialRequest | messages.Sweep],
        workload: Workload | None,
        reference: WorkloadReference,
    ) -> None:
        self._control = control
        self._workload = workload
        self._reference = reference
        self._trials: dict[int, int] = {}  # pidfd → pid
        self._logs: dict[int, Path] = {}  # pid → where it writes
        self._of_the_module = frozenset(child.pid for child in psutil.Process().children())

    def serve(self) -> NoReturn:
        """Until the control socket closes, which raises `ChannelClosed`."""
        while True:
            control = self._control.fileno()
            # Not `select`, which ends at descriptor 1,023: the user's module may hold more files open.
            poll = select.poll()
            for each in (control, *self._trials):
                poll.register(each, select.POLLIN)
            ready = [each for each, _ in poll.poll(1000 * log.LOOK_SECONDS if self._trials else None)]
            for file in self._logs.values():
                log.cap(file)
            for descriptor in ready:
                if descriptor == control:
                    self._obey()
                elif descriptor in self._trials:
                    self._reap(descriptor)

    def _obey(self) -> None:
        command, descriptors = self._control.receive_with_descriptors()
        if isinstance(command, messages.Sweep):
            if command.pid in self._trials.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.pid, signal.SIGKILL)
            lifeline.kill_orphans(self._of_the_module | set(self._trials.values()))
            return
        pid = self._fork(command, descriptors[0])
        os.close(descriptors[0])
        self._trials[os.pidfd_open(pid)] = pid
        self._logs[pid] = Path(command.log)
        self._control.send(messages.Forked(pid=pid))

    def _fork(self, request: messages.TrialRequest, descriptor: int) -> int:
        pid = _fork()
        if pid == 0:
            status = 1
            try:
                status = self._run_trial(request, descriptor)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here too, so that the tuner can signal the group at once
        return pid

    def _run_trial(self, request: messages.TrialRequest, descriptor: int) -> int:
        template = os.getppid()
        os.setpgid(0, 0)
        lifeline.die_with_parent(template)
        lifeline.be_the_first_to_go()
        self._control.close()
        for pidfd in self._trials:
            os.close(pidfd)
        output = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        faulthandler.enable(all_threads=False)  # the log then says where in the user's code a signal struck
        channel = messages.Channel(socket.socket(fileno=descriptor), messages.to_trial)
        return worker.run(request, channel, self._workload, self._reference)

    def _reap(self, pidfd: int) -> None:
        pid = self._trials.pop(pidfd)
        os.close(pidfd)
        log.cap(self._logs.pop(pid))
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        lifeline.kill_orphans(self._of_the_module | set(self._trials.values()))
        code = os.waitstatus_to_exitcode(status)
        self._control.send(
            messages.Exited(pid=pid, signal=-code) if code < 0 else messages.Exited(pid=pid, code=code)
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
