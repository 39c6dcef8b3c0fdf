"""Trials on the seats of a Ray cluster: an actor a seat (see `ray_actor`). Only the driver writes the run.

A seat has `seat_devices` GPUs. In a cluster without GPUs each node is a seat. Ray is imported in a function.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from autotune.data.errors import ArgumentError, AutotuneError, NoStableConfigurationError
from autotune.data.facts import WorkloadFacts, WorkloadReference
from autotune.data.printable import first_line
from autotune.data.record import Outcome, Place, Slice
from autotune.runtime.executor import Executor, Isolation, LiveTrial, SeatLost, TrialFailed, WarmUp, never
from autotune.runtime.logs import open_log
from autotune.runtime.protocol import Finished, LossCurves, Started, TrialRequest
from autotune.runtime.ray_actor import Host, OpenedSeat, SeatActor, SeatSettings
from autotune.runtime.trial_process import IMPORT_SECONDS, LOOK_SECONDS, Profiled

ADDRESS_SECONDS = 10.0  # until the cluster's address answers
CONNECT_SECONDS = 60.0  # until Ray does, which tries for minutes where something else answers
TOKEN = secrets.token_hex(32)  # of a Ray of this machine's own; Ray reads it once per process
SILENCE_SECONDS = 60.0  # beyond the limit of what was asked: without an answer until then, a seat is lost
RESTART_SECONDS = 120.0  # until an actor that was lost is replaced
NOTICE_SECONDS = 10.0  # of waiting for a seat, until the user gets a notice
CLOSING_SECONDS = 20.0


class RayTrial(LiveTrial):
    """A trial on another host; see `executor.LiveTrial`."""

    def __init__(self, seat: RaySeat, number: int, log: Path) -> None:
        self._seat, self._number, self._log = seat, number, log
        self._ended = False

    def warm_up(self, timeout_seconds: float, on_started: Callable[[Started], None] = lambda started: None) -> WarmUp:
        """See `executor.LiveTrial`. The first report comes with all others."""
        answer: WarmUp = self._ask("warm_up", timeout_seconds)
        on_started(answer.started)
        return answer

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        answer: tuple[Slice, ...] = self._ask("measure_continuously", timeout_seconds, seconds=seconds, count=count)
        return answer

    def finish(self, input_wait_seconds: float, timeout_seconds: float, *, thorough: bool = False) -> Finished:
        answer: Finished = self._ask(
            "finish", timeout_seconds, input_wait_seconds=input_wait_seconds, thorough=thorough
        )
        self.kill()
        return answer

    def loss_curves(self, timeout_seconds: float, stopped: Callable[[], bool] = never) -> LossCurves:
        answer: LossCurves = self._ask("loss_curves", timeout_seconds, stopped)
        self.kill()
        return answer

    def kill(self) -> None:
        """See `executor.LiveTrial`; its log and profile come to the driver."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(Exception):  # a seat that is lost has no files to give
            files: dict[str, bytes] = self._seat.ask("end", CLOSING_SECONDS, self._number)
            for name, content in files.items():
                if Path(name).is_absolute() or ".." in Path(name).parts:  # the other host is not trusted
                    continue
                file = self._log.parent / name
                file.parent.mkdir(parents=True, exist_ok=True)
                with open(open_log(file) if file == self._log else file, "ab") as output:
                    output.write(content)

    def _ask(self, method: str, limit: float, stopped: Callable[[], bool] = never, **options: Any) -> Any:
        try:
            return self._seat.ask(method, limit, stopped=stopped, trial=self._number, timeout_seconds=limit, **options)
        except SeatLost:
            self._ended = True
            raise
        except BaseException:
            self.kill()
            raise


class RaySeat:
    """A seat on another host: the proxy of an actor; see `executor.SeatHandle`."""

    place: Place  # once it is open

    def __init__(self, name: str, ray: Any, settings: SeatSettings, resources: Mapping[str, Any]) -> None:
        self.name = name
        self.host: Host | None = None
        self._ray = ray
        # Several calls at a time: a trial is ended while another call waits for it.
        options = {"max_concurrency": 8, "max_restarts": 0, **resources}
        self.actor = ray.remote(SeatActor).options(**options).remote(settings)
        self._pending = self.actor.ask.remote("describe_host")

    def poll(self) -> Any:
        """Return the answer of the start, then of `open`; None while it is not there. Raises as `ask` does."""
        return self._answer(self._pending, SILENCE_SECONDS) if self._ray.wait([self._pending], timeout=0)[0] else None

    def open(self) -> None:
        """Have the actor import the workload."""
        self._pending = self.actor.ask.remote("open")

    def launch(self, request: TrialRequest) -> RayTrial:
        return RayTrial(self, self.ask("launch", IMPORT_SECONDS, request), Path(request.log))

    def ask(
        self, method: str, limit: float, *arguments: Any, stopped: Callable[[], bool] = never, **options: Any
    ) -> Any:
        """Return the actor's answer. Raises the failure that it answers, and `SeatLost` where no answer comes."""
        return self._answer(self.actor.ask.remote(method, *arguments, **options), limit + SILENCE_SECONDS, stopped)

    def _answer(self, call: Any, seconds: float, stopped: Callable[[], bool] = never) -> Any:
        errors, host = self._ray.exceptions, self.host.name if self.host else "its host"
        ends = time.monotonic() + seconds
        try:
            while not self._ray.wait([call], timeout=LOOK_SECONDS)[0]:
                if stopped():
                    raise TrialFailed(Outcome.INTERRUPTED, "stopped by the user")
                if time.monotonic() >= ends:
                    raise SeatLost(Outcome.CRASHED, f"its actor on {host} has not answered for {seconds:.0f} s")
            found = self._ray.get(call)
        except errors.RayTaskError:
            raise  # an error of autotune's own
        except errors.RayError as error:
            raise SeatLost(Outcome.CRASHED, f"its actor on {host} is gone: {first_line(str(error).strip())}") from error
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the actor and what it has started."""
        with contextlib.suppress(Exception):  # it may be lost
            self._ray.get(self.actor.ask.remote("close"), timeout=2.0)
        self.kill()

    def kill(self) -> None:
        """End the actor at once; the supervisors end its trials."""
        with contextlib.suppress(Exception):
            self._ray.kill(self.actor)


class RayExecutor(Executor):
    """Real trials on a Ray cluster; see `executor.Executor`."""

    elastic = True

    def __init__(
        self,
        reference: WorkloadReference,
        *,
        isolation: Isolation = "template",
        profile: Profiled = "none",
        address: str | None = None,  # RAY_ADDRESS when None; a Ray of this machine's own where that is unset
        seat_devices: int = 1,  # GPUs of a seat
        seats: int | None = None,  # at most so many
        upload: bool = False,  # Ray copies the working directory to the hosts; else they share a file system
        say: Callable[[str], None] = lambda text: None,
        left: Callable[[], float] = lambda: 600.0,  # how many seconds waiting for a first seat may take
    ) -> None:
        super().__init__(isolation)
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._seat_devices, self._most = seat_devices, seats
        self._say, self._left = say, left
        self._settings = SeatSettings(
            reference=reference,
            directory=os.getcwd(),
            uploaded=upload,
            isolation=isolation,
            profile=profile,
            threads=os.environ.get("OMP_NUM_THREADS"),
        )
        self._handles: dict[str, RaySeat] = {}
        self._coming: list[RaySeat] = []
        self._dropped: list[str] = []  # the nodes of seats that are not used; empty where that is not known
        self._names = (f"seat{number}" for number in itertools.count())
        self._facts: WorkloadFacts | None = None
        self._ray: Any = None

    def open(self) -> WorkloadFacts:
        """See `executor.Executor`. Waits for the first seat as long as the budget lasts."""
        directory = self._settings.directory if self._settings.uploaded else None
        self._ray = connect(self._address, directory=directory, left=self._left())
        began, said = time.monotonic(), False
        while not self.seats:
            self.refresh()
            waited = time.monotonic() - began
            if self._dropped and not self.seats and not self._coming:
                raise NoStableConfigurationError(
                    "no seat of the cluster can be used", hint="The lines above say what each lacks."
                )
            if not self.seats and self._left() <= 0:
                raise NoStableConfigurationError(
                    f"no seat came free within {waited:.0f} s: {_why_none_is_free(self._ray, self._seat_devices)}",
                    hint="See `ray status`; give a larger --budget, or add nodes.",
                )
            if waited > NOTICE_SECONDS and not said and not any(seat.host for seat in self._coming):
                self._say(f"waiting for a free seat: {_why_none_is_free(self._ray, self._seat_devices)}")
                said = True
            time.sleep(0.1)
        assert self._facts is not None
        return self._facts

    def refresh(self) -> None:
        """See `executor.Executor`: ask for seats, and take in those that have come."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            resources, possible = _capacity(self._ray, self._seat_devices)
            alive = {"", *(node["NodeID"] for node in self._ray.nodes() if node["Alive"])}
            unused = sum(node in alive for node in self._dropped)  # a node that is gone is not among the possible
            wanted = min(possible - unused, self._most or possible)
            while len(self._handles) + len(self._coming) < wanted:
                self._coming.append(RaySeat(next(self._names), self._ray, self._settings, resources))
        for seat in list(self._coming):
            try:
                is_open = self._advance(seat)
            except SeatLost as lost:
                self._coming.remove(seat)
                self._dropped.append(seat.host.node if seat.host else "")
                self._say(f"a seat{f' on {seat.host.name}' if seat.host else ''} is not used: {lost.reason}")
                seat.kill()
            else:
                if is_open:
                    self._coming.remove(seat)

    def _advance(self, seat: RaySeat) -> bool:
        """Take a seat that comes one step further; return whether it is open. Raises `SeatLost` where it is no use."""
        try:
            found = seat.poll()
        except AutotuneError as error:
            if self._facts is None:
                raise
            raise SeatLost(Outcome.CRASHED, str(error)) from error
        except self._ray.exceptions.RayError as error:
            raise SeatLost(Outcome.CRASHED, f"its actor failed: {first_line(str(error).strip())}") from error
        if isinstance(found, Host):
            seat.host = found
            if not found.has_files:
                reason = "the workload's file is not there; share a file system, or use --ray-upload"
                raise SeatLost(Outcome.CRASHED, reason)
            self.machine = self.machine or found.machine
            if differences := self.machine.differences(found.machine):
                raise SeatLost(Outcome.CRASHED, "; ".join(differences))
            seat.open()
            return self._advance(seat)
        if not isinstance(found, OpenedSeat):
            return False
        if self._facts is not None and found.facts.fingerprint != self._facts.fingerprint:
            raise SeatLost(Outcome.CRASHED, "the workload's file differs from the first seat's")
        assert seat.host is not None
        self._facts = self._facts or found.facts
        seat.place = Place(seat=seat.name, host=seat.host.name, device=" + ".join(seat.host.devices))
        self._handles[seat.name] = seat
        self.isolation, self.started_by_import = found.isolation, found.started_by_import
        return True

    def use_fresh_interpreters(self) -> None:
        """See `executor.Executor`: other actors take the seats' places."""
        self._settings = self._settings._replace(isolation="spawn")
        while self._coming:  # they have the settings of before; `refresh` asks for others
            self._coming.pop().kill()
        for name in self.seats:
            self.restart(name)

    def restart(self, seat: str) -> None:
        """See `executor.Executor`: another actor takes its place, where the cluster has one."""
        self._handles[seat].close()
        resources, _ = _capacity(self._ray, self._seat_devices)
        new = RaySeat(seat, self._ray, self._settings, resources)
        began, at_most = time.monotonic(), min(RESTART_SECONDS, self._left())
        try:
            while time.monotonic() - began < at_most:
                if self._advance(new):
                    return
                time.sleep(0.1)
        except SeatLost:
            new.kill()
            raise
        new.close()
        raise SeatLost(Outcome.CRASHED, f"no actor took its place within {max(0.0, at_most):.0f} s")

    def drop(self, seat: str) -> None:
        if found := self._handles.get(seat):
            self._dropped.append(found.host.node if found.host else "")
        super().drop(seat)

    def close(self) -> None:
        """See `executor.Executor`; also leaves the cluster."""
        if self._ray is None:
            return
        with contextlib.suppress(Exception):
            closing = [seat.actor.ask.remote("close") for seat in self._handles.values()]
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSING_SECONDS)
        for seat in (*self._handles.values(), *self._coming):
            seat.kill()
        self._handles.clear()
        self._coming.clear()
        self._ray.shutdown()
        self._ray = None


# ------------------------------------------------------------------------------------------------- the cluster


def connect(address: str | None, *, directory: str | None, left: float) -> Any:
    """Connect to a cluster, and return the module `ray`.

    Args:
        address: The cluster's, or None for a Ray of this machine's own.
        directory: The directory that Ray copies to the hosts.
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
            f"--executor ray needs Ray, which cannot be imported: {error}", hint="Run pip install 'ray>=2.50'."
        ) from error
    options: dict[str, Any] = {"address": address or "local"}  # without one, Ray joins any that runs here
    if not address:
        options["include_dashboard"] = False
    if directory is not None:
        options["runtime_env"] = {"working_dir": directory}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    options |= {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "autotune"}
    try:
        if port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), max(1.0, min(left, ADDRESS_SECONDS))).close()
        start = partial(ray.init, **options)
        with _private_and_quiet(own=not address):
            if address:
                _call_within(max(1.0, left if directory else min(left, CONNECT_SECONDS)), start)
            else:
                start()  # in this thread: what Ray starts dies with the thread that started it
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(
            f"no Ray cluster answers at {address or 'this machine'}: {error}",
            hint="Start one with `ray start --head`, and give its address to --ray-address.",
        ) from error
    return ray


def _call_within(seconds: float, connect: Callable[[], object]) -> None:
    """Connect, and raise what that raises, or `TimeoutError` after so many seconds."""
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
def _private_and_quiet(*, own: bool) -> Iterator[None]:
    """Have Ray print nothing of its own and, where it is this machine's `own`, listen on 127.0.0.1 only."""
    from ray._private import ray_constants, worker

    with contextlib.ExitStack() as undo:

        def replace(module: Any, name: str, value: Any) -> None:
            if hasattr(module, name):  # these names are private: another version of Ray may lack them
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)

        replace(worker, "listen_error_messages", lambda *_: None)  # the driver reports the failures of actors
        if own:
            with contextlib.suppress(ImportError, AttributeError):
                # Have Ray read the variables of its token again: somebody may have imported it before.
                private: Any = importlib.import_module("ray._raylet")
                private.Config.initialize("")
                private.AuthenticationTokenLoader.instance().reset_cache()
            # Ray takes a public address instead of 127.0.0.1, except on macOS and Windows.
            replace(ray_constants, "ENABLE_RAY_CLUSTER", False)
        yield


def _capacity(ray: Any, seat_devices: int) -> tuple[dict[str, Any], int]:
    """Return the resources that an actor asks of Ray, and how many seats the cluster can hold."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if ray.cluster_resources().get("GPU"):
        return {"num_gpus": seat_devices, "num_cpus": 0}, sum(int(node.get("GPU", 0) // seat_devices) for node in nodes)
    cores = [int(node["CPU"]) for node in nodes if node.get("CPU")]
    return {"num_cpus": min(cores, default=1)}, len(cores)


def _why_none_is_free(ray: Any, seat_devices: int) -> str:
    resources, possible = _capacity(ray, seat_devices)
    needed = f"{resources['num_gpus']} GPUs" if "num_gpus" in resources else "a node's cores"
    if not possible:
        return f"no node of the cluster has {needed}"
    free = ray.available_resources().get("GPU" if "num_gpus" in resources else "CPU", 0)
    return f"a seat needs {needed}, others' jobs leave {free:g} free"
