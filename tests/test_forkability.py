"""What a process may hold when it is forked in the middle of a script, and what its forks get of their own."""

import fcntl
import gc
import mmap
import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import subprocess
import threading

import pytest
from test_containment import in_fork

from autotune.machine.telemetry import peak_host_bytes
from autotune.runtime.fork_server import ForkCheck, Unforkable, describe_descriptor


def refusal(hold):
    """Return why a process that holds something cannot be forked; empty where it can."""

    def holds():
        check = ForkCheck()
        held = hold()  # noqa: F841  # until the check has ended
        try:
            check.state()
        except Unforkable as error:
            return str(error)
        return ""

    return in_fork(holds)


def test_a_process_that_holds_nothing_can_be_forked():
    assert refusal(lambda: None) == ""
    assert refusal(lambda: open(os.devnull, "w")) == ""  # noqa: SIM115


def thread():
    started = threading.Thread(target=threading.Event().wait, daemon=True)
    started.start()


def timer():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000.0)


def database(folder):
    connection = sqlite3.connect(folder / "rows.db")
    connection.execute("create table rows (a)")
    connection.commit()
    connection.execute("select * from rows")
    return connection


def hdf5(folder):
    (folder / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    return (folder / "a.h5").open("rb")


def nameless(folder):
    stream = (folder / "temporary").open("w")
    (folder / "temporary").unlink()
    return stream


def lock(folder):
    stream = (folder / "lock").open("w")
    fcntl.lockf(stream, fcntl.LOCK_EX)
    return stream


@pytest.mark.parametrize(
    ("hold", "reason"),
    [
        (lambda _: thread(), "a pool of threads is in use"),
        (lambda _: timer(), "a timer is running"),
        (lambda _: signal.signal(signal.SIGCHLD, signal.SIG_IGN), "it handles SIGCHLD"),
        (lambda _: subprocess.Popen(["cat"], stdin=subprocess.PIPE), "a process that it started is there (cat)"),
        (lambda _: os.pipe(), "a pipe is open"),
        (lambda _: socket.socket(), "a socket is open"),
        (lambda folder: os.open(folder, os.O_RDONLY), "{folder} is open"),
        (lambda _: os.memfd_create("made"), "/memfd:made (deleted) is open"),
        (lambda _: mmap.mmap(-1, 4096), "it shares memory (/dev/zero (deleted))"),
        (database, "an SQLite database is open ({folder}/rows.db)"),
        (hdf5, "an HDF5 file is open ({folder}/a.h5)"),
        (nameless, "a temporary file without a name is open"),
        (lock, "it holds a lock on a file"),
    ],
)
def test_what_no_fork_can_have_is_named(tmp_path, hold, reason):
    assert refusal(lambda: hold(tmp_path)) == reason.format(folder=tmp_path)


def test_a_pool_that_a_variable_still_names_is_named():
    assert refusal(multiprocessing.get_context("fork").Lock).startswith("it holds a lock or pool of multiprocessing (")


def test_what_only_garbage_holds_is_closed(tmp_path):
    def drop():
        gc.disable()
        cycle = [database(tmp_path)]
        cycle.append(cycle)

    assert refusal(drop) == ""


def test_an_event_queue_is_named():
    assert describe_descriptor("anon_inode:[eventpoll]") == "an event queue"


def test_each_fork_reads_and_writes_on_where_the_script_was(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"0123456789")

    def script():
        check = ForkCheck()
        read = os.open(tmp_path / "rows.csv", os.O_RDONLY)
        written = os.open(tmp_path / "log.txt", os.O_RDWR | os.O_CREAT)
        os.read(read, 4)
        os.write(written, b"begun ")
        state = check.state()

        def trial():
            state.restore()
            os.write(written, b"trial")
            return os.read(read, 3).decode()

        return [in_fork(trial), in_fork(trial), os.lseek(read, 0, os.SEEK_CUR)]

    assert in_fork(script) == ["456", "456", 4]
    assert (tmp_path / "log.txt").read_text() == "begun trial"


def test_a_fork_keeps_what_a_library_closes_or_opens_anew_in_it(tmp_path):
    for name in ("font.ttf", "rows.csv", "words.txt", "other.txt"):
        (tmp_path / name).write_text(f"{name} 0123456789")

    def script():
        check = ForkCheck()
        font, rows, words = (os.open(tmp_path / name, os.O_RDONLY) for name in ("font.ttf", "rows.csv", "words.txt"))
        log = os.open(tmp_path / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.write(log, b"begun")
        os.read(rows, 9)
        os.read(words, 10)

        def in_each_fork():
            os.dup2(os.open(tmp_path / "other.txt", os.O_RDONLY), rows)
            os.close(font)
            os.close(log)

        os.register_at_fork(after_in_child=in_each_fork)
        state = check.state()

        def trial():
            state.restore()
            closed = [number for number in (font, log) if not os.path.exists(f"/proc/self/fd/{number}")]
            return [len(closed), os.read(rows, 5).decode(), os.read(words, 3).decode()]

        return [in_fork(trial), in_fork(trial)]

    assert in_fork(script) == [[2, "other", "012"]] * 2


def test_each_fork_draws_the_numbers_that_the_script_would():
    def script():
        check = ForkCheck()
        random.seed(7)
        state = check.state()

        def trial():
            state.restore()
            return random.random()

        drawn = [in_fork(trial), in_fork(trial)]
        return [*drawn, random.random()]

    first, second, own = in_fork(script)
    assert first == second == own


def test_memory_freed_at_the_start_counts_in_every_fork():
    def script():
        check, before = ForkCheck(), peak_host_bytes()
        large = b"x" * (64 << 20)
        del large
        state = check.state()

        def trial():
            state.restore()
            return peak_host_bytes()

        return in_fork(trial) - before

    assert in_fork(script) > 48 << 20
