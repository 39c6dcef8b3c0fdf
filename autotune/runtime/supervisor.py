"""Make sure that no child process outlives autotune; fork helpers that return an answer.

Above each template stands its *supervisor*, forked before anything heavy is imported. It adopts processes whose parent
ends. When the template or the driver ends, the supervisor kills everything below it. If the supervisor is killed, the
kernel kills template and trials, and the driver kills every process that carries the mark. Two kinds of process escape:
one that wiped its environment, once its supervisor was killed; and one in its own session, if supervisor and driver are
killed at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import psutil

from autotune.runtime.containment import call_libc

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_SECONDS = 1.0  # for a template whose pipe has closed; one that still imports does not notice
SWEEP_SECONDS = 5.0  # only a process stuck in the kernel takes longer to end
FAMILY_VARIABLE = "AUTOTUNE_FAMILY"  # the mark that all descendants of a template inherit


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; end at once if it is dead already."""
    call_libc("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Have this process adopt descendants whose parent ends."""
    call_libc("prctl", _PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def fork_supervisor(pipe: int) -> None:
    """Fork, and return in the child; this process stays behind as its supervisor. Call it with one thread only.

    The supervisor exits as the child does: with its status, or with a signal's number plus 128. The driver holds the
    other end of the pipe.
    """
    supervisor = os.getpid()
    adopt_orphans()
    child = os.fork()
    if child == 0:
        die_with_parent(supervisor)
        adopt_orphans()  # those of the trials, as long as it lives
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor ends with the template or the driver, not before
    watched = select.poll()
    watched.register(os.pidfd_open(child), select.POLLIN)
    watched.register(pipe, 0)  # poll reports a hang-up without being asked
    watched.poll()
    watched.unregister(pipe)
    watched.poll(GRACE_SECONDS * 1000)
    _, status = os.waitpid(child, os.WNOHANG)
    kill_orphans()
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def kill_orphans(alive: Set[int] = frozenset()) -> None:
    """Kill the descendants of this process, except `alive` and their process groups."""
    # The group of a living trial works for it, as by `os.system("server &")`.
    me = psutil.Process()
    while orphans := [child.pid for child in me.children() if not {child.pid, os.getpgid(child.pid)} & alive]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def kill_family(family: str) -> None:
    """Kill all processes that carry this mark, and wait until they are gone."""
    ends = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < ends:  # look again: a killed process may have forked
        found = psutil.process_iter(["environ"])  # None for other users' processes
        members = [member for member in found if (member.info["environ"] or {}).get(FAMILY_VARIABLE) == family]
        if not members:
            return
        for member in members:
            with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user now
                member.kill()
        psutil.wait_procs(members, timeout=max(0.0, ends - time.monotonic()))


# ---------------------------------------------------------------------------------------------------- forks


def fork() -> int:
    """Fork a process in which TensorFlow's runtime has not started."""
    with warnings.catch_warnings():
        # TensorFlow's import leaves four idle threads; none holds a lock, because no runtime was started.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def exit_now(status: int) -> NoReturn:
    """End this process at once: no `finally` and no `atexit` of the user's runs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's code may have closed it, or the disk is full
            stream.flush()
    os._exit(status)


def lead_group(parent: int) -> None:
    """Lead a process group that ends with `parent`, leaves no core, and is killed first for want of memory."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    with contextlib.suppress(OSError):
        # When memory runs out, the kernel kills this process, not the driver.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def fork_and_collect(
    *, setup: Callable[[int], object] = lead_group, keep_alive_key: str = "", on_progress: Callable[[str], object] = str
) -> int | dict[str, Any]:
    """Fork. Return the write end of a pipe in the child; in the parent, wait for the child and return its answer.

    The answer is empty where there is none, or `{"killed_by": 11}` by a signal. What the fork has started is killed.

    Args:
        setup: Makes the fork lead a process group that ends with its argument, this process.
        keep_alive_key: The key of an answer after which the fork lives on.
        on_progress: Gets the texts that the fork sends as `doing` before its answer.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = fork()
    if pid == 0:
        try:
            os.close(reading)
            setup(parent)
        except BaseException:
            traceback.print_exc()
            exit_now(1)
        return writing
    os.close(writing)
    answer: dict[str, Any] = {}
    for answer in _receive_answers(reading, os.pidfd_open(pid)):
        if "doing" not in answer:
            break
        on_progress(answer.pop("doing"))
    if keep_alive_key in answer:
        return answer
    status = 0
    with contextlib.suppress(ChildProcessError):
        _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return answer or ({"killed_by": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {})


def _receive_answers(pipe: int, pidfd: int) -> Iterator[dict[str, Any]]:
    """Yield what a fork sends until it ends, and close both descriptors. Its children may hold the pipe for ever."""
    text, part = b"", b"\n"
    try:
        while part:
            part = os.read(pipe, 1 << 16) if pipe in wait([pipe, pidfd]) else b""
            *lines, text = (text + part).split(b"\n")
            yield from map(json.loads, lines)
    finally:
        os.close(pipe)
        os.close(pidfd)


def run_in_fork(run: Callable[[int], object], **how: Any) -> dict[str, Any]:
    """Run a function in a fork, with a pipe for `send_answer`; return the answer, see `fork_and_collect`."""
    fork_result = fork_and_collect(**how)
    if isinstance(fork_result, dict):
        return fork_result
    try:
        run(fork_result)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def send_answer(pipe: int, answer: Mapping[str, Any]) -> None:
    """Answer the process that has forked this one: a line of JSON. Its children can open the pipe by `/proc`."""
    with open(pipe, "wb", closefd=False) as stream:
        stream.write(json.dumps(answer).encode() + b"\n")
