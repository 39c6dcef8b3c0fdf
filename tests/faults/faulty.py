"""A workload whose trials go wrong, each batch size in a way of its own; see `fault_table`.

Faults are real: signals, limits, hangs, bytes. Each is announced in a file beside the trial's log just before it is
injected. *Late* ones wait until the tuner lets the trial go on for the first time: until its first slice.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import psutil
import tensorflow as tf

import autotune
from autotune.runtime.logs import LARGEST_LOG_BYTES

sys.path.insert(0, str(Path(__file__).parent))
from fault_table import BASELINE_BATCH_SIZE, BY_BATCH_SIZE, CGROUP_BYTES, CGROUP_VARIABLE

EXAMPLES = 128
FLOOD_BYTES = 2 << 30

fault = ""
let_go_on = threading.Event()


def log() -> Path:
    """The trial's log file."""
    return Path(os.readlink("/proc/self/fd/1"))


def announce(**facts) -> None:
    """Say beside the log that the fault comes now."""
    temporary = log().parent / "witness.tmp"
    temporary.write_text(json.dumps({"fault": fault, **facts}))
    temporary.rename(log().parent / "witness.json")


# ----------------------------------------------------------------------------------------------- faults


def users_own_function():
    """The user's mistake, one frame deeper."""
    raise KeyError("missing column")


def raises(*_):
    """An exception of Python's."""
    announce()
    users_own_function()


def segfaults(*_):
    """Reads address 0."""
    announce()
    ctypes.string_at(0)


def aborts():
    """Calls abort(3)."""
    announce()
    os.abort()


def exits():
    """Leaves without a word."""
    announce()
    os._exit(7)


def is_killed(*_):
    """By a signal that nobody can handle."""
    announce()
    os.kill(os.getpid(), signal.SIGKILL)


def exceeds_cgroup():
    """Joins a control group with a memory limit, and writes to four times as much memory."""
    group = Path(os.environ[CGROUP_VARIABLE])
    (group / "cgroup.procs").write_text(str(os.getpid()))
    announce(group=str(group))
    bytearray(4 * CGROUP_BYTES)


def limit_address_space() -> None:
    """To a quarter of a GiB more than is taken."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
    announce(limit=used + (1 << 28))


def exceeds_rlimit(*_):
    """Asks Python for more than the limit."""
    limit_address_space()
    bytearray(1 << 31)


def exceeds_rlimit_in_cpp():
    """Asks C++ for more than the limit: operator new throws, and nobody catches it."""
    library = ctypes.CDLL("libstdc++.so.6")
    limit_address_space()
    library["_Znwm"](ctypes.c_size_t(1 << 40))


def exhausts_tensors():
    """Asks TensorFlow's allocator for 4 TiB; it gives up after ten seconds of its own."""
    announce()
    tf.random.normal([1 << 40])


def hangs(*_):
    """Waits for ever."""
    announce()
    threading.Event().wait()


def hangs_holding_the_gil():
    """In a C call that never lets another Python thread run."""
    announce()
    ctypes.PyDLL(None).pause()


def family() -> list[int]:
    """A child in a session of its own, its child, one whose parent has gone, and a fork that holds all files open."""
    script = "trap '' TERM INT HUP; echo $$; sleep 1000 & echo $!; setsid sh -c 'sleep 1000 & echo $!'; wait"
    child = subprocess.Popen(["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True)
    fork = os.fork()
    if fork == 0:
        os.setsid()
        ctypes.PyDLL(None).pause()
    return [*(int(child.stdout.readline()) for _ in range(3)), fork]


def hangs_with_a_family():
    """Deaf to SIGTERM, as its family is."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    announce(family=family())
    threading.Event().wait()


def kills_its_supervisor():
    """The process above the one that it was forked from; then nobody is above its family."""
    supervisor = psutil.Process(os.getppid()).ppid()
    announce(family=family(), supervisor=supervisor)
    os.kill(supervisor, signal.SIGKILL)
    threading.Event().wait()


def pipe() -> int:
    """The trial's end of its pipe to the tuner."""
    for each in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own, closed by now
            if stat.S_ISSOCK(os.stat(each).st_mode):
                return each
    raise AssertionError("a trial has a pipe")


def sends_garbage():
    """A frame whose body is no message."""
    announce()
    os.write(pipe(), struct.pack(">I", 1000) + os.urandom(1000))
    threading.Event().wait()


def sends_half_a_message():
    """A frame that ends early, as the trial does."""
    announce()
    os.write(pipe(), struct.pack(">I", 1000) + b'{"kind": "started"')
    os._exit(0)


def sends_too_much():
    """A frame of four gigabytes, it says."""
    announce()
    os.write(pipe(), b"\xff" * 1000)
    threading.Event().wait()


def kills_its_template():
    """The process that it was forked from."""
    announce()
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


def prints_gigabytes():
    """Two gigabytes, none of it text, half on each of stdout and stderr."""
    block = os.urandom(1 << 20)
    for _ in range(FLOOD_BYTES // len(block) // 2):
        os.write(1, block)
        os.write(2, block)
    announce(written=FLOOD_BYTES)
    while os.fstat(1).st_size > LARGEST_LOG_BYTES:  # what is written while the log is being cut may be lost
        threading.Event().wait(0.01)
    print("the last line", flush=True)  # noqa: T201  # standard output is the trial's log


# ------------------------------------------------------------------------------------------------- parts


class Raising(keras.Sequential):
    """Its train step raises while it is traced."""

    def train_step(self, data):
        """Of the user's own making."""
        raises()


def with_layer(layer) -> keras.Model:
    """The smallest network, with one layer more."""
    return keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])


def hangs_in_compile() -> keras.Model:
    """XLA reads its flags when it compiles for the first time: here from a pipe that nobody ever writes to."""
    flags = log().parent / "flags"
    os.mkfifo(flags)
    os.environ["XLA_FLAGS"] = str(flags)
    announce()
    return with_layer(keras.layers.Dense(2))


def fails_a_check() -> keras.Model:
    """XLA aborts over a flag that it does not know when it compiles for the first time."""
    os.environ["XLA_FLAGS"] = "--no_such_flag"
    announce()
    return with_layer(keras.layers.Dense(2))


class Announcing(keras.layers.Layer):
    """Says that training begins."""

    def call(self, x):
        """While it is traced."""
        announce()
        return x


def pairs() -> tf.data.Dataset:
    """(x, y), four numbers to one."""
    rows = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1]))


def through(function, *, late: bool):
    """The usual dataset, each element handed through a function of Python's; when late, from the first slice on."""
    turn = threading.Lock()

    def inject(x):
        if not late or let_go_on.is_set():
            with turn:
                changed = function(x)
            return x if changed is None else changed
        return x

    def hand(x, y):
        return tf.ensure_shape(tf.numpy_function(inject, [x], tf.float32), (4,)), y

    return lambda: pairs().map(hand)


def infinite(x):
    """Numbers whose squared error is no number any more."""
    announce()
    return np.full_like(x, 3e38)


INJECTIONS = {
    "raises_in_model": {"model": raises},
    "raises_in_dataset": {"dataset": raises},
    "raises_in_train_step": {"model": lambda: Raising([keras.Input((4,)), keras.layers.Dense(1)])},
    "raises_in_pipeline_late": {"dataset": through(raises, late=True)},
    "segfaults": {"model": segfaults},
    "segfaults_late": {"dataset": through(segfaults, late=True)},
    "aborts": {"model": aborts},
    "exits": {"model": exits},
    "is_killed_late": {"dataset": through(is_killed, late=True)},
    "fails_a_check": {"model": fails_a_check},
    "exceeds_cgroup": {"model": exceeds_cgroup},
    "exceeds_rlimit": {"model": exceeds_rlimit},
    "exceeds_rlimit_in_pipeline": {"dataset": through(exceeds_rlimit, late=False)},
    "exceeds_rlimit_in_cpp": {"model": exceeds_rlimit_in_cpp},
    "exhausts_tensors": {"model": exhausts_tensors},
    "hangs_in_python": {"model": hangs},
    "hangs_holding_the_gil": {"model": hangs_holding_the_gil},
    "hangs_in_compile": {"model": hangs_in_compile},
    "hangs_in_pipeline": {"dataset": through(hangs, late=False)},
    "hangs_in_pipeline_late": {"dataset": through(hangs, late=True)},
    "hangs_with_a_family": {"model": hangs_with_a_family},
    "is_nan": {"loss": lambda y, p: tf.reduce_mean(p) * float("nan"), "model": lambda: with_layer(Announcing())},
    "becomes_inf_late": {"dataset": through(infinite, late=True)},
    "sends_garbage": {"model": sends_garbage},
    "sends_half_a_message": {"model": sends_half_a_message},
    "sends_too_much": {"model": sends_too_much},
    "kills_its_template": {"model": kills_its_template},
    "kills_its_supervisor": {"model": kills_its_supervisor},
    "prints_gigabytes": {"model": prints_gigabytes},
}


def dataset(config) -> tf.data.Dataset:
    """The trial's fault is known from here on: this is called first."""
    global fault
    fault = BY_BATCH_SIZE.get(config.batch_size, "")
    signal.signal(signal.SIGCONT, lambda *_: let_go_on.set())
    return INJECTIONS.get(fault, {}).get("dataset", pairs)()


def model() -> keras.Model:
    """The smallest network, unless the fault is here."""
    return INJECTIONS.get(fault, {}).get("model", lambda: None)() or with_layer(keras.layers.Dense(2))


def compile_arguments() -> dict:
    """Plain SGD."""
    return {"optimizer": "sgd", "loss": INJECTIONS.get(fault, {}).get("loss", "mse")}


workload = autotune.Workload(model=model, dataset=dataset, compile=compile_arguments, batch_size=BASELINE_BATCH_SIZE)
