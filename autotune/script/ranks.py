"""The workers of one training on this host: a script under MultiWorkerMirroredStrategy runs in a process for each.

How many there are is what `TF_CONFIG` says. Trials start them all; worker 0 is timed, and the others train along.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.printable import with_article
from autotune.machine.gpu import visible_gpus
from autotune.runtime.lifeline import die_with_parent
from autotune.script.interpose import around

VARIABLE = "TF_CONFIG"
FIT_FAILS = WorkloadError(
    "fit of Keras 3 fails under a MultiWorkerMirroredStrategy of several workers (keras#20585)",
    hint="Train by a loop with strategy.run, which does work, or tune one worker: leave TF_CONFIG out.",
)
_OF_THIS_HOST = ("localhost", "127.0.0.1", "[::1]")


def workers_asked_for() -> int:
    """How many workers `TF_CONFIG` names; 0 without any. Raises `WorkloadError` where one is on another host."""
    try:
        named = [str(each) for job in ("chief", "worker") for each in _cluster().get(job, ())]
    except (ValueError, AttributeError, TypeError):
        return 0  # TensorFlow says what is wrong with it
    here = (*_OF_THIS_HOST, socket.gethostname(), socket.getfqdn())
    elsewhere = [each for each in named if each.rpartition(":")[0] not in here]
    if elsewhere and len(named) > 1:
        raise WorkloadError(
            f"{VARIABLE} names {elsewhere[0]}, a worker on another host, and a trial runs on one host",
            hint=f"Name as many workers of localhost in {VARIABLE} as one host has, or leave it out.",
        )
    return len(named)


def _cluster() -> dict[str, Any]:
    """The addresses that `TF_CONFIG` names, by their job."""
    found: dict[str, Any] = json.loads(os.environ.get(VARIABLE) or "{}").get("cluster", {})
    return found


def start_others(workers: int, died: Callable[[str], object]) -> int:
    """Go on as one of so many workers, in a process each; the number of this one, from 0.

    To be called before TensorFlow's runtime starts. Worker 0 is this process. The others end with it.

    Args:
        workers: How many there are.
        died: Is called in worker 0, in a thread, with the reason, once another worker has ended.

    Raises:
        WorkloadError: The workers cannot share the GPUs.
    """
    cards = [each.uuid for each in visible_gpus()]
    if 0 < len(cards) < workers:
        raise WorkloadError(
            f"{VARIABLE} names {workers} workers, and the seat has {len(cards)} GPU{'s' * (len(cards) > 1)} for them",
            hint="Each worker needs a GPU of its own: name fewer workers, or give a seat more with --seat-devices.",
        )
    with ExitStack() as held:
        ports = [held.enter_context(_bound()).getsockname()[1] for _ in range(workers)]
    first, number, others = os.getpid(), 0, {}
    sys.stdout.flush()
    sys.stderr.flush()
    for each in range(1, workers):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # TensorFlow's import leaves idle threads
            pid = os.fork()
        if pid == 0:
            die_with_parent(first)
            number = each
            break
        others[os.pidfd_open(pid)] = each, pid
    chiefs = len(_cluster().get("chief", ()))
    addresses = [f"localhost:{port}" for port in ports]
    cluster = {"chief": addresses[:chiefs], "worker": addresses[chiefs:]}
    task = {"type": "worker", "index": number - chiefs} if number >= chiefs else {"type": "chief", "index": number}
    jobs = {job: named for job, named in cluster.items() if named}
    os.environ[VARIABLE] = json.dumps({"cluster": jobs, "task": task})
    if cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards[number::workers])
    if number == 0 and others:
        threading.Thread(target=_wait_for_a_death, args=(others, died), daemon=True).start()
    return number


def _bound() -> socket.socket:
    """A socket on a port that is free."""
    made = socket.socket()
    made.bind(("localhost", 0))
    return made


def _wait_for_a_death(others: dict[int, tuple[int, int]], died: Callable[[str], object]) -> None:
    """Without the others, collectives of worker 0 would wait for ever."""
    (ended, *_), _, _ = select.select(list(others), (), ())
    number, pid = others[ended]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    died(f"worker {number} of the training {how}")


def around_strategy(tf: Any, act: Callable[[], object]) -> None:
    """Call `act` before a script makes its strategy of several workers.

    Args:
        tf: The module.
        act: What it raises is the script's; as is a `WorkloadError` where the workers are not named in `TF_CONFIG`.
    """

    def made(usual: Callable[..., Any], strategy: Any, *arguments: Any, **named: Any) -> Any:
        resolvers = tf.distribute.cluster_resolver
        for each in (*arguments, *named.values()):
            if isinstance(each, resolvers.ClusterResolver) and not isinstance(each, resolvers.TFConfigClusterResolver):
                found = with_article(type(each).__name__)
                raise WorkloadError(
                    f"the script names its workers by {found}, and trials name theirs in {VARIABLE}",
                    hint="Leave the resolver out for tuning, or use a TFConfigClusterResolver.",
                )
        act()
        return usual(strategy, *arguments, **named)

    around(tf.distribute.MultiWorkerMirroredStrategy, "__init__", made)


def keep_own_config(tf: Any) -> None:
    """Have the strategy read this process's `TF_CONFIG`, whatever the script has put there since."""
    own = os.environ[VARIABLE]
    around_strategy(tf, lambda: os.environ.update({VARIABLE: own}))
