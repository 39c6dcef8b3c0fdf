"""A Ray cluster: how it is reached, and what it has room for. Ray is imported in a function."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from autotune.data.errors import ArgumentError

RESOURCE = "autotune_seat"
ANSWER_SECONDS = 10.0  # of the cluster's address
CONNECT_SECONDS = 60.0  # of Ray, which tries for minutes where something else answers
TOKEN = secrets.token_hex(32)  # of a Ray of this machine's own; Ray reads it once per process


def connect(address: str | None, *, seats: int | None, directory: str | None, left: float = math.inf) -> Any:
    """Ray, once it is connected.

    Args:
        address: The cluster's, or None for a Ray of this machine's own.
        seats: How many seats a Ray of this machine's own has; what fits when None.
        directory: What Ray copies to the hosts.
        left: Seconds of the budget.

    Raises:
        ArgumentError: Ray is not installed, or no cluster answers.
    """
    if not address:  # Ray has tokens since 2.52
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", TOKEN)
    try:
        import ray
    except ImportError as error:
        raise ArgumentError(
            f"--executor ray needs Ray, which cannot be imported: {error}", hint="pip install 'autotune[ray]'"
        ) from error
    how: dict[str, Any] = {"address": address or "local"}  # without one, Ray joins any that runs here
    if not address:
        how["include_dashboard"] = False
    if not address and seats is not None:
        how["resources"] = {RESOURCE: seats}
    if directory is not None:
        how["runtime_env"] = {"working_dir": directory}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    how |= {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "autotune"}
    try:
        if port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), max(1.0, min(left, ANSWER_SECONDS))).close()
        start = partial(ray.init, **how)
        with _private_and_quiet(own=not address):
            if address:
                _within(max(1.0, left if directory else min(left, CONNECT_SECONDS)), start)
            else:
                start()  # in this thread: what Ray starts dies with the thread that has started it
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(
            f"no Ray cluster answers at {address or 'this machine'}: {error}",
            hint="Start one with `ray start --head`, and give its address to --ray-address.",
        ) from error
    return ray


def _within(seconds: float, connect: Callable[[], object]) -> None:
    """Connect, and raise what that raises, or TimeoutError after so many seconds."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            connect()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)  # nothing else can interrupt it
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"nothing was heard of Ray for {seconds:.0f} s")
    if failures:
        raise failures[0]


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a private name of Ray's while it starts; nothing where this version has no such name."""
    if not hasattr(module, name):
        yield
        return
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


@contextlib.contextmanager
def _private_and_quiet(*, own: bool) -> Iterator[None]:
    """Have Ray print nothing of its own and, where it is this machine's `own`, listen on 127.0.0.1 only."""
    from ray._private import ray_constants, worker

    with contextlib.ExitStack() as stack:
        # The failures of actors are the driver's to say.
        stack.enter_context(_replaced(worker, "listen_error_messages", lambda *_: None))
        if own:
            _read_token_again()
            # Ray takes a public address in place of 127.0.0.1, except on macOS and Windows.
            stack.enter_context(_replaced(ray_constants, "ENABLE_RAY_CLUSTER", False))
        yield


def _read_token_again() -> None:
    """Have Ray read the variables of its token, which it has read already where somebody imported it before."""
    with contextlib.suppress(ImportError, AttributeError):
        private: Any = importlib.import_module("ray._raylet")
        private.Config.initialize("")
        private.AuthenticationTokenLoader.instance().reset_cache()


def room(ray: Any, seat_devices: int) -> tuple[dict[str, Any], int]:
    """What an actor asks of Ray, and how many seats the cluster can hold."""
    total = ray.cluster_resources()
    if total.get("GPU"):
        nodes = [each["Resources"].get("GPU", 0) for each in ray.nodes() if each["Alive"]]
        return {"num_gpus": seat_devices, "num_cpus": 0}, sum(int(each // seat_devices) for each in nodes)
    if total.get(RESOURCE):
        return {"num_cpus": 0, "resources": {RESOURCE: 1}}, int(total[RESOURCE])
    alive = [each for each in ray.nodes() if each["Alive"]]
    cores = min((int(each["Resources"].get("CPU", 1)) for each in alive), default=1)
    return {"num_cpus": cores}, len(alive)


def wanted_in_words(ray: Any, seat_devices: int) -> str:
    """Why no seat is free."""
    asked, possible = room(ray, seat_devices)
    what = f"{asked['num_gpus']} GPUs" if "num_gpus" in asked else "a node's cores"
    free = ray.available_resources().get("GPU" if "num_gpus" in asked else "CPU", 0)
    if not possible:
        return f"no node of the cluster has {what}"
    return f"a seat needs {what}, others' jobs leave {free:g} free"


def parts_of(ray: Any, node: str) -> int:
    """Seats that share a node's cores."""
    own = next(each["Resources"] for each in ray.nodes() if each["NodeID"] == node)
    return 1 if own.get("GPU") else int(own.get(RESOURCE, 1))


def end(ray: Any, actor: Any) -> None:
    """End an actor and what it has started."""
    with contextlib.suppress(Exception):
        ray.get(actor.close.remote(), timeout=2.0)
    with contextlib.suppress(Exception):
        ray.kill(actor)


def in_a_line(error: Exception) -> str:
    """Ray's messages have many lines."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
