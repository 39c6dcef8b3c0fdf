"""`tf.distribute` in a script: a recipe's strategy, strategies that are refused, and the workers of one training.

A script under MultiWorkerMirroredStrategy runs in a process for each worker. How many there are is what `TF_CONFIG`
says. Trials start them all on this host; worker 0 is timed, and the others train along.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.models import KnobValue
from autotune.data.printable import with_article
from autotune.machine.gpu import visible_gpus
from autotune.recipe.apply import strategy_of
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import patch_mirrored_variables
from autotune.runtime.failures import locate_user_line
from autotune.runtime.supervisor import die_with_parent, fork
from autotune.script.interpose import around

REFUSED = {
    "ParameterServerStrategy": "autotune does not tune it, and Keras 3 does not support it (keras#18624)",
    "TPUStrategy": "there is no tensorflow-tpu for TensorFlow 2.21",
}
"""Strategies under which no training can be tuned, and why."""


def refuse_strategies(tf: Any, refuse: Any) -> None:
    """Have `refuse` called with the error where a script makes a strategy that cannot be tuned.

    A TPUStrategy fails by itself without a TPU: scripts catch that and train without one.
    """

    def refuses(name: str, why: str) -> Callable[..., None]:
        def make(usual: Callable[..., None], *arguments: Any, **named: Any) -> None:
            if name == "TPUStrategy":
                usual(*arguments, **named)
            hint = "Train by fit under tf.distribute.MirroredStrategy, on one host."
            refuse(WorkloadError(f"{locate_user_line()}: makes a {name}: {why}", hint=hint))

        return make

    for kind, (name, why) in refused_kinds(tf):
        around(kind, "__init__", refuses(name, why))


def refused_kinds(tf: Any) -> Iterator[tuple[Any, tuple[str, str]]]:
    """Yield the classes that a script may not make, each with its name and the reason."""
    for name, why in REFUSED.items():
        for owner in (tf.distribute, tf.distribute.experimental):
            if hasattr(owner, name):
                yield getattr(owner, name), (name, why)
    distribution = getattr(sys.modules.get("keras"), "distribution", None)
    for name in ("DataParallel", "ModelParallel") if distribution is not None else ():
        why = "keras.distribution acts on the JAX backend only"
        yield getattr(distribution, name), (f"keras.distribution.{name}", why)


def open_when_building(values: Mapping[str, KnobValue]) -> None:
    """Open the strategy's scope when the script makes its first layer, optimizer or metric; it is never left.

    Before that the script may still set threads and devices, which a strategy would fix.
    """
    if values.get("strategy", "none") == "none":
        return
    patch_mirrored_variables()
    opened: list[Any] = []

    def entering(usual: Any, *arguments: Any, **named: Any) -> Any:
        import tensorflow as tf

        if not opened and not tf.distribute.has_strategy():
            opened.append(strategy_of(values).scope())
            opened[0].__enter__()
        return usual(*arguments, **named)

    for kind, name in keras_api().building_calls():
        around(kind, name, entering)


# --------------------------------------------------------------------------------------------- several workers


VARIABLE = "TF_CONFIG"


def workers_asked_for() -> int:
    """Count the workers that `TF_CONFIG` names; 0 without any. Raises `WorkloadError` where one is on another host."""
    try:
        named = [str(address) for job in ("chief", "worker") for address in _cluster().get(job, ())]
    except (ValueError, AttributeError, TypeError):
        return 0  # TensorFlow reports what is wrong with it
    here = ("localhost", "127.0.0.1", "[::1]", socket.gethostname(), socket.getfqdn())
    elsewhere = [address for address in named if address.rpartition(":")[0] not in here]
    if elsewhere and len(named) > 1:
        raise WorkloadError(
            f"{VARIABLE} names {elsewhere[0]}, a worker on another host, and a trial runs on one host",
            hint=f"Name as many workers of localhost in {VARIABLE} as one host has, or leave it out.",
        )
    return len(named)


def _cluster() -> dict[str, Any]:
    """Return the addresses that `TF_CONFIG` names, by their job."""
    found: dict[str, Any] = json.loads(os.environ.get(VARIABLE) or "{}").get("cluster", {})
    return found


def start_workers(workers: int, died: Callable[[str], object]) -> int:
    """Fork so many workers but one, and return the number of this process, from 0.

    To be called before TensorFlow's runtime starts. Worker 0 is this process. The others end with it. `died` is called
    in worker 0, in a thread, with the reason, once another worker has ended.

    Raises:
        WorkloadError: The workers cannot share the GPUs.
    """
    cards = [gpu.uuid for gpu in visible_gpus()]
    if 0 < len(cards) < workers:
        raise WorkloadError(
            f"{VARIABLE} names {workers} workers, and the seat has {len(cards)} GPU{'s' * (len(cards) > 1)} for them",
            hint="Each worker needs a GPU of its own: name fewer workers, or give a seat more with --seat-devices.",
        )
    with ExitStack() as held:
        ports = [held.enter_context(socket.create_server(("localhost", 0))).getsockname()[1] for _ in range(workers)]
    first, number, others = os.getpid(), 0, {}
    sys.stdout.flush()
    sys.stderr.flush()
    for worker in range(1, workers):
        pid = fork()
        if pid == 0:
            die_with_parent(first)
            number = worker
            break
        others[os.pidfd_open(pid)] = worker, pid
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


def _wait_for_a_death(others: dict[int, tuple[int, int]], died: Callable[[str], object]) -> None:
    """Call `died` once another worker ends: collectives of worker 0 would wait for it for ever."""
    (ended, *_), _, _ = select.select(list(others), (), ())
    number, pid = others[ended]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    died(f"worker {number} of the training {how}")


def before_strategy(tf: Any, act: Callable[[], object]) -> None:
    """Have `act` called before a script makes its strategy of several workers.

    The script sees what `act` raises, and a `WorkloadError` where the workers are not named in `TF_CONFIG`.
    """

    def make(usual: Callable[..., Any], strategy: Any, *arguments: Any, **named: Any) -> Any:
        resolvers = tf.distribute.cluster_resolver
        for given in (*arguments, *named.values()):
            by_config = isinstance(given, resolvers.TFConfigClusterResolver)
            if isinstance(given, resolvers.ClusterResolver) and not by_config:
                line, found = locate_user_line(), with_article(type(given).__name__)
                raise WorkloadError(
                    f"{line}: names the workers by {found}, and trials name theirs in {VARIABLE}",
                    hint="Leave the resolver out for tuning, or use a TFConfigClusterResolver.",
                )
        act()
        return usual(strategy, *arguments, **named)

    around(tf.distribute.MultiWorkerMirroredStrategy, "__init__", make)


def keep_own_config(tf: Any) -> None:
    """Have the strategy read this process's `TF_CONFIG`, whatever the script has put there since."""
    own = os.environ[VARIABLE]
    before_strategy(tf, lambda: os.environ.update({VARIABLE: own}))
