"""Decide whether this process can be forked as it is, fork trials on the driver's request, and report their ends.

A survey runs a script up to its training, as a trial does. Where a trial would do nothing else up to there, the
process that surveys waits at the training. It goes on as the first trial that suits it, so the script runs once for
both.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from autotune.data.record import Outcome
from autotune.machine.telemetry import note_peak_before, peak_host_bytes
from autotune.runtime import containment, protocol, supervisor
from autotune.runtime.logs import open_log
from autotune.runtime.supervisor import exit_now, fork, lead_group
from autotune.space.variables import caches_in

_HARMLESS_DEVICES = frozenset(("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"))
_UNSHAREABLE_FILES = {b"SQLite format 3\0": "an SQLite database", b"\x89HDF\r\n\x1a\n": "an HDF5 file"}
"""First bytes of files that libraries must not use across a fork."""
_SEMAPHORES = "/dev/shm/sem."  # glibc's names for those that processes share
LOOKS, LOOK_SECONDS = 10, 0.01  # for threads that have ended
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class Unforkable(Exception):
    """The process holds something that no fork can have. The text says what, and fits behind "because"."""


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """A regular file that is open at a descriptor."""

    descriptor: int
    path: str
    flags: int  # of `open`
    status: os.stat_result

    @property
    def is_written(self) -> bool:
        """True if it can be written to."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    def reopen(self) -> None:
        """Open the file again at the same descriptor, with an offset that no other process moves.

        A file that is written is opened by its path, so that the process's own layer takes what it writes. A descriptor
        that a library has closed in this fork, or given to another file, is left as it is: matplotlib closes its fonts.
        """
        try:
            is_same = os.path.samestat(os.fstat(self.descriptor), self.status)
            if not is_same or fcntl.fcntl(self.descriptor, fcntl.F_GETFL) != self.flags:
                return
        except OSError:
            return
        source = self.path if self.is_written else f"/proc/self/fd/{self.descriptor}"
        inheritable = os.get_inheritable(self.descriptor)
        opened = os.open(source, self.flags | os.O_CLOEXEC)
        os.lseek(opened, os.lseek(self.descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(opened, self.descriptor, inheritable=inheritable)
        os.close(opened)


@dataclass(frozen=True, kw_only=True)
class ForkState:
    """The state that a fork must restore to continue as this process would."""

    files: tuple[OpenFile, ...] = ()
    random: Any = None  # of Python's generator, which each fork seeds anew
    peak_bytes: int = 0  # of this process's memory, which the kernel counts anew in each fork

    def restore(self) -> None:
        """Restore it in a fork. Raises `OSError` if a file is gone."""
        for file in self.files:
            file.reopen()
        if self.random is not None:
            random.setstate(self.random)
        note_peak_before(self.peak_bytes)


class ForkCheck:
    """Compares this process with what it was when the check was made, before the user's code ran."""

    def __init__(self) -> None:
        self._known = frozenset(_descriptors())
        self._mappings = frozenset(writable_shared_mappings())
        self._threads = len(os.listdir("/proc/self/task"))

    def state(self) -> ForkState:
        """Return the state that each fork must restore. Raises `Unforkable`."""
        gc.collect()  # garbage may hold files, such as a database that nobody has closed
        subprocess._cleanup()  # type: ignore[attr-defined]  # awaits those that the script has dropped
        for child in psutil.Process().children():  # also one that has ended and nobody awaited
            with contextlib.suppress(psutil.Error):
                raise Unforkable(f"a process that it started is there ({child.name()})")
        if signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
            raise Unforkable("it handles SIGCHLD")
        if any(signal.getitimer(timer)[0] for timer in _TIMERS):
            raise Unforkable("a timer is running")
        # Idle pools end whose library handles forks, as OpenBLAS does: they start again when they are needed.
        if (pid := fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        for _ in range(LOOKS):  # the kernel shows a thread that was joined for a moment longer
            if len(os.listdir("/proc/self/task")) <= self._threads:
                break
            time.sleep(LOOK_SECONDS)
        else:
            raise Unforkable("a pool of threads is in use")
        for path in writable_shared_mappings():
            if path not in self._mappings:
                holds = "holds a lock or pool of multiprocessing"
                raise Unforkable(f"it {holds if path.startswith(_SEMAPHORES) else 'shares memory'} ({path})")
        if locks_files():
            raise Unforkable("it holds a lock on a file")
        files = open_files(sorted(descriptor for descriptor in _descriptors() if descriptor not in self._known))
        return ForkState(files=tuple(files), random=random.getstate(), peak_bytes=peak_host_bytes())


def writable_shared_mappings() -> Iterator[str]:
    """Yield the files, or names, of memory that this process shares with others and may write to."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, permissions, *fields = line.split(maxsplit=5)
        if permissions[1] == "w" and permissions[3] == "s":
            yield fields[3] if len(fields) > 3 else "anonymous memory"


def locks_files() -> bool:
    """Return whether this process holds locks on files: no fork inherits them."""
    own = str(os.getpid())
    lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    return any(len(fields) > 4 and fields[1] != "->" and fields[4] == own for fields in map(str.split, lines))


def open_files(descriptors: Sequence[int]) -> Iterator[OpenFile]:
    """Yield the regular files among descriptors. Raises `Unforkable` for one that cannot be opened again."""
    for descriptor in descriptors:
        path, status = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor)
        if path in _HARMLESS_DEVICES:
            continue
        if not stat.S_ISREG(status.st_mode) or path.startswith("/memfd:"):
            raise Unforkable(f"{describe_descriptor(path)} is open")
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        file = OpenFile(descriptor=descriptor, path=path, flags=flags, status=status)
        if file.is_written and status.st_nlink == 0:
            raise Unforkable("a temporary file without a name is open")
        with open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as stream:
            first = stream.read(max(map(len, _UNSHAREABLE_FILES)))
        for magic, name in _UNSHAREABLE_FILES.items():
            if first.startswith(magic):
                raise Unforkable(f"{name} is open ({path})")
        yield file


def describe_descriptor(path: str) -> str:
    """Describe a link of `/proc/self/fd` in words."""
    kind, separator, _ = path.partition(":")
    if separator and not path.startswith("/"):
        return "an event queue" if kind == "anon_inode" else f"a {kind}"
    return path


def _descriptors() -> Iterator[int]:
    """Yield the open descriptors of this process, without the listing's own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            yield int(name)


class WaitingProcess(NamedTuple):
    """A process that waits at its training to go on as the first trial."""

    pid: int  # it leads its process group
    channel: protocol.Channel  # takes the request, and brings the answer
    suits: Callable[[protocol.TrialRequest], bool]  # whether a trial would have come to the training as it did


class ForkServer:
    """Serves the driver. `layers` is the directory for what trials write; None where they write for real."""

    def __init__(self, control: protocol.Channel, layers: Path | None) -> None:
        self.control, self.layers = control, layers
        self._trials: dict[int, int] = {}  # pidfd → pid
        self._waiting: WaitingProcess | None = None

    def tell(self, text: str) -> None:
        """Tell the driver what a survey does."""
        self.control.send(protocol.Surveying(text=text))

    def serve(
        self, state: ForkState, waiting: WaitingProcess | None = None
    ) -> tuple[protocol.TrialRequest, protocol.Channel]:
        """Fork a trial for each request. Returns in the forks only, with the request and the trial's pipe.

        Args:
            state: The state that forks must restore.
            waiting: A process that may go on as the first trial.

        Raises:
            protocol.ChannelClosed: The driver has closed the control socket.
        """
        self._waiting = waiting
        if waiting is not None:
            self._trials[os.pidfd_open(waiting.pid)] = waiting.pid
        children = {child.pid for child in psutil.Process().children()}
        not_trials = frozenset(children.difference(self._trials.values()))
        while True:
            ready = wait([self.control.fileno(), *self._trials])
            for pidfd in [pidfd for pidfd in self._trials if pidfd in ready]:
                self._reap(pidfd, not_trials)
            # After that: a descriptor that is closed now may be given again.
            if self.control.fileno() in ready and (trial := self._start(state, not_trials)):
                return trial

    def _start(
        self, state: ForkState, not_trials: frozenset[int]
    ) -> tuple[protocol.TrialRequest, protocol.Channel] | None:
        request = self.control.receive()
        assert isinstance(request, protocol.TrialRequest)
        template = os.getpid()
        drivers, trials = socket.socketpair()
        with drivers, trials:
            forked = self._hand_over(request, trials, not_trials)
            if forked is None:
                pid = fork()
                if pid == 0:
                    drivers.close()
                    return request, self._become_trial(request, trials, template, state)
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)  # here too, so that the driver can signal the group at once
                self._trials[os.pidfd_open(pid)] = pid
                forked = protocol.Forked(pid=pid)
            self.control.send(forked, drivers)
        return None

    def _hand_over(
        self, request: protocol.TrialRequest, end: socket.socket, not_trials: frozenset[int]
    ) -> protocol.Forked | None:
        """Have the waiting process go on as this trial; None where there is none, or it cannot and is ended."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        pidfd, answers = next(pidfd for pidfd, pid in self._trials.items() if pid == waiting.pid), waiting.channel
        with contextlib.closing(answers), contextlib.suppress(protocol.ChannelClosed):
            if waiting.suits(request):
                answers.send(request, end)
                if answers.fileno() in wait([answers.fileno(), pidfd]):
                    forked = answers.receive()
                    assert isinstance(forked, protocol.Forked)
                    return forked
        with contextlib.suppress(ProcessLookupError):
            os.killpg(waiting.pid, signal.SIGKILL)
        self._reap(pidfd, not_trials)
        return None

    def _become_trial(
        self, request: protocol.TrialRequest, end: socket.socket, template: int, state: ForkState
    ) -> protocol.Channel:
        """Separate this fork from the template, and return its pipe."""
        try:
            lead_group(template)
            self.control.close()
            for pidfd in self._trials:
                os.close(pidfd)
            channel = protocol.Channel(end)
            try:
                containment.renew(request.folders)
                state.restore()
                timing = request.timing  # before XLA first compiles
                os.environ.update(caches_in(timing.compiled, os.environ, timing.compiled_use))
            except OSError as error:
                reason = f"its files cannot be isolated: {error}"
                channel.send(protocol.Failed(outcome=Outcome.ERROR, reason=reason))
                os._exit(1)
            write_to_log(request.log)
        except BaseException:
            traceback.print_exc()
            exit_now(1)
        return channel

    def _reap(self, pidfd: int, not_trials: frozenset[int]) -> None:
        pid = self._trials.pop(pidfd)
        if self._waiting is not None and self._waiting.pid == pid:
            self._waiting = None
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        supervisor.kill_orphans(not_trials | set(self._trials.values()))
        self.control.send(protocol.Exited(pid=pid, status=os.waitstatus_to_exitcode(status)))
        if self.layers is not None:
            containment.remove_layers(self.layers / str(pid))


def write_to_log(path: str, descriptors: Sequence[int] = (1, 2)) -> None:
    """Send the output of this process to a log, which then shows where in the user's code a signal struck."""
    output = open_log(path)
    for descriptor in descriptors:
        os.dup2(output, descriptor)
    os.close(output)
    faulthandler.enable(2, all_threads=False)  # whatever `sys.stderr` is by now


# ---------------------------------------------------------------------------------- in the process that waits


class Output:
    """The output of this process from now on, in a file that other processes write to as well."""

    def __init__(self) -> None:
        self._file = os.fstat(1)

    def move_to(self, log: str, folders: Sequence[str]) -> None:
        """Copy it to a log, and send what follows there, except where the script has redirected it.

        Raises:
            OSError: `folders`, which this process writes to for real from now on, cannot be shown in it.
        """
        containment.make_writable(folders)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the script may have closed it
                stream.flush()
        unchanged = [descriptor for descriptor in (1, 2) if self._is_open_as(descriptor)]
        for descriptor in unchanged[:1]:
            with open(f"/proc/self/fd/{descriptor}", "rb") as printed, open(open_log(log), "ab") as stream:
                printed.seek(self._file.st_size)
                shutil.copyfileobj(printed, stream)
        write_to_log(log, unchanged)

    def _is_open_as(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file)
        except OSError:  # the script has closed it
            return False
