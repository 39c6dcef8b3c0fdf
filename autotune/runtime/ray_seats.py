"""Trials on the seats of a Ray cluster: an actor a seat (see `ray_actor`). Only the driver writes the run.

A seat has `seat_devices` GPUs. A cluster without GPUs has as many seats as it has of the resource `autotune_seat`;
they share the cores of their node. Without that resource each node is a seat.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from autotune.data.errors import NoStableConfigurationError
from autotune.data.facts import WorkloadFacts, WorkloadReference
from autotune.data.hardware import Machine
from autotune.data.record import Outcome, Place
from autotune.recipe.apply import environment
from autotune.runtime import protocol
from autotune.runtime.executor import IN_SEARCH, Data, SeatLost, TrialTiming
from autotune.runtime.places import WHOLE
from autotune.runtime.ray_actor import Host, SeatActor, SeatSettings
from autotune.runtime.ray_cluster import connect, end, in_a_line, parts_of, room, wanted_in_words
from autotune.runtime.ray_trial import CLOSING_SECONDS, RayTrial
from autotune.runtime.template_process import IMPORT_SECONDS
from autotune.runtime.trial_process import Profiled
from autotune.space.configuration import Configuration

LEASE_SECONDS = 60.0  # without a word of the driver's, an actor ends its trials; without an answer, a seat is lost
BEAT_SECONDS = 5.0
RESTART_SECONDS = 120.0  # until an actor that was lost is back
SAY_AFTER_SECONDS = 10.0  # of waiting for a seat


class ActorSeat:
    """An actor, as the driver knows it."""

    def __init__(self, name: str, ray: Any, settings: SeatSettings, asked: Mapping[str, Any]) -> None:
        self.name = name
        self.actor = ray.remote(SeatActor).options(max_concurrency=8, max_restarts=0, **asked).remote(settings)
        self.hello: Any = self.actor.hello.remote()
        self.opening: Any = None
        self.host: Host | None = None
        self.place: Place | None = None
        self.slot = 0  # its part of the node's cores
        self.refused = ""  # why it is not used


class RayTrials(contextlib.AbstractContextManager["RayTrials"]):
    """Real trials on a Ray cluster; see `executor.Executor`. A context manager that ends its actors.

    Args:
        reference: The workload.
        isolation: As for `tune`.
        profile: As for `tune`.
        address: The cluster's, as `ray.init` takes it; a Ray of this machine's own when None and RAY_ADDRESS is unset.
        seat_devices: GPUs of a seat.
        seats: At most so many; all that fit when None. On a Ray of this machine's own without GPUs, the cores are cut
            into so many.
        upload: Ray copies the working directory to the hosts; else they share a file system.
        say: Takes a sentence for the user.
        left: Seconds that waiting for a first seat may take.
    """

    def __init__(
        self,
        reference: WorkloadReference,
        *,
        isolation: Literal["template", "spawn"] = "template",
        profile: Profiled = "none",
        address: str | None = None,
        seat_devices: int = 1,
        seats: int | None = None,
        upload: bool = False,
        say: Callable[[str], None] = lambda text: None,
        left: Callable[[], float] = lambda: 600.0,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.seats: tuple[str, ...] = ()
        self.elastic = True
        self.whole: str | None = None
        self.machine: Machine | None = None
        self.started_by_import: protocol.StartedByImport | None = None
        self.isolation = isolation
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._seat_devices, self._most = seat_devices, seats
        self._say, self._left = say, left
        self._settings = SeatSettings(
            reference=reference,
            directory=os.getcwd(),
            uploaded=upload,
            isolation=isolation,
            profile=profile,
            lease_seconds=lease_seconds,
            threads=os.environ.get("OMP_NUM_THREADS"),
        )
        self._joined: dict[str, ActorSeat] = {}
        self._coming: list[ActorSeat] = []
        self._dropped: list[str] = []  # the nodes of seats that are not used; empty where that is not known
        self._names = itertools.count()
        self._numbers = itertools.count()
        self._facts: WorkloadFacts | None = None
        self._first: Host | None = None
        self._ray: Any = None
        self._over = threading.Event()

    def __exit__(self, *_: object) -> None:
        """End the actors, and leave the cluster."""
        self.close()

    # ------------------------------------------------------------------------------------------ the cluster

    def open(self) -> WorkloadFacts:
        """See `executor.Executor`. Waits for the first seat as long as the budget lasts."""
        self._ray = connect(
            self._address,
            seats=self._most,
            directory=self._settings.directory if self._settings.uploaded else None,
            left=self._left(),
        )
        beaten = (self._over, lambda: [*self._joined.values(), *self._coming], self._settings.lease_seconds)
        threading.Thread(target=_beat, args=beaten, daemon=True).start()
        began, said = time.monotonic(), False
        while not self._joined:
            self.refresh()
            waited = time.monotonic() - began
            if self._dropped and not self._joined and not self._coming:
                raise NoStableConfigurationError(
                    "no seat of the cluster can be used", hint="The lines above say what each lacks."
                )
            if not self._joined and self._left() <= 0:
                raise NoStableConfigurationError(
                    f"no seat came free within {waited:.0f} s: {wanted_in_words(self._ray, self._seat_devices)}",
                    hint="See `ray status`; give a larger --budget, or add nodes.",
                )
            if waited > SAY_AFTER_SECONDS and not said and not any(each.host for each in self._coming):
                self._say(f"waiting for a free seat: {wanted_in_words(self._ray, self._seat_devices)}")
                said = True
            time.sleep(0.1)
        assert self._facts is not None
        return self._facts

    def refresh(self) -> None:
        """See `executor.Executor`: seats are asked for, and those that have come are taken in."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            asked, possible = room(self._ray, self._seat_devices)
            alive = {"", *(each["NodeID"] for each in self._ray.nodes() if each["Alive"])}
            unused = sum(each in alive for each in self._dropped)  # a node that is gone is not counted as possible
            wanted = min(possible - unused, self._most or possible)
            while len(self._joined) + len(self._coming) < wanted:
                self._coming.append(ActorSeat(f"seat{next(self._names)}", self._ray, self._settings, asked))
        for seat in list(self._coming):
            try:
                if self._comes(seat):
                    self._coming.remove(seat)
                    self._join(seat)
            except self._ray.exceptions.RayError as error:
                self._refuse(seat, f"its actor failed: {in_a_line(error)}")

    def _refuse(self, seat: ActorSeat, why: str) -> None:
        seat.refused = why
        if seat in self._coming:
            self._coming.remove(seat)
            self._dropped.append(seat.host.node if seat.host else "")
        self._say(f"a seat{f' on {seat.host.name}' if seat.host else ''} is not used: {why}")
        self._ray.kill(seat.actor)

    def _comes(self, seat: ActorSeat) -> bool:
        """Whether a seat is ready; one step further otherwise."""
        if seat.host is None:
            if not self._ray.wait([seat.hello], timeout=0)[0]:
                return False
            seat.host = self._ray.get(seat.hello)
            if self._first is None and seat.host.files_are_there:
                self._first, self.machine = seat.host, seat.host.machine
            if differs := _difference(self._first, seat.host):
                self._refuse(seat, differs)
                return False
            of = parts_of(self._ray, seat.host.node)
            others = [each for each in (*self._joined.values(), *self._coming) if each.name != seat.name]
            taken = {each.slot for each in others if each.host and each.host.node == seat.host.node}
            seat.slot = min(set(range(of)) - taken, default=0)
            seat.opening = seat.actor.open.remote(seat.slot, of)
        if seat.opening is None or not self._ray.wait([seat.opening], timeout=0)[0]:
            return False
        facts = self._ray.get(seat.opening)
        if isinstance(facts, Exception):
            if self._facts is None:
                raise facts
            self._refuse(seat, str(facts))
            return False
        if self._facts is not None and facts.fingerprint != self._facts.fingerprint:
            self._refuse(seat, "the workload's file differs from the first seat's")
            return False
        self._facts = self._facts or facts
        return True

    def _join(self, seat: ActorSeat) -> None:
        isolation, started, place, whole = self._ray.get(seat.actor.state.remote())
        assert seat.host is not None
        words = " + ".join(seat.host.devices) or place.device
        seat.place = place.model_copy(update={"seat": seat.name, "host": seat.host.name, "device": words})
        self._joined[seat.name] = seat
        self.isolation, self.started_by_import = isolation, started
        self.seats = (*self.seats, seat.name)
        if whole is not None:
            self.whole = WHOLE

    def place(self, seat: str) -> Place:
        """See `executor.Executor`."""
        found = self._seat(seat).place
        assert found is not None
        if seat == WHOLE:
            return found.model_copy(update={"seat": WHOLE, "device": f"all {found.of_cores} cores", "cores": ()})
        return found

    def _seat(self, name: str) -> ActorSeat:
        wanted = self.seats[0] if name in ("", WHOLE) else name
        if wanted not in self._joined:
            raise SeatLost(Outcome.CRASHED, f"seat {name} is gone")
        return self._joined[wanted]

    def restart(self, seat: str) -> None:
        """See `executor.Executor`: another actor takes its place, where the cluster has one."""
        end(self._ray, self._joined[seat].actor)
        asked, _ = room(self._ray, self._seat_devices)
        new = ActorSeat(seat, self._ray, self._settings, asked)
        began, at_most = time.monotonic(), min(RESTART_SECONDS, self._left())
        try:
            while time.monotonic() - began < at_most and not new.refused:
                if self._comes(new):
                    self.seats = tuple(each for each in self.seats if each != seat)
                    self._join(new)
                    return
                time.sleep(0.1)
            end(self._ray, new.actor)
        except self._ray.exceptions.RayError as error:
            raise SeatLost(Outcome.CRASHED, f"its actor failed: {in_a_line(error)}") from error
        why = new.refused or f"no actor took its place within {max(0.0, at_most):.0f} s"
        raise SeatLost(Outcome.CRASHED, why)

    def drop(self, seat: str) -> None:
        """See `executor.Executor`."""
        self.seats = tuple(each for each in self.seats if each != seat)
        if found := self._joined.pop(seat, None):
            self._dropped.append(found.host.node if found.host else "")
            end(self._ray, found.actor)

    def close(self) -> None:
        """See `executor.Executor`."""
        self._over.set()
        if self._ray is None:
            return
        with contextlib.suppress(Exception):
            closing = [each.actor.close.remote() for each in self._joined.values()]
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSING_SECONDS)
        for each in (*self._joined.values(), *self._coming):
            with contextlib.suppress(Exception):
                self._ray.kill(each.actor)
        self._joined.clear()
        self._coming.clear()
        self.seats = ()
        self._ray.shutdown()
        self._ray = None

    # ------------------------------------------------------------------------------------------- the trials

    def launch(
        self,
        configuration: Configuration,
        *,
        seat: str = "",
        log: str,
        data: Data | None,
        timing: TrialTiming = IN_SEARCH,
        losses: protocol.LossRuns | None = None,
    ) -> RayTrial:
        """See `executor.Executor`."""
        number, on = next(self._numbers), self._seat(seat)
        how = {"data": data, "timing": timing, "losses": losses}
        asked = on.actor.launch.remote(number, dict(configuration), whole=seat == WHOLE, how=how)
        self.answer(on, asked, IMPORT_SECONDS)
        return RayTrial(self, on, number, Path(log))

    def answer(self, seat: ActorSeat, asked: Any, seconds: float) -> Any:
        """An actor's answer. Raises what it says, and SeatLost where none comes within a lease of the limit."""
        try:
            found = self._ray.get(asked, timeout=seconds + self._settings.lease_seconds)
        except self._ray.exceptions.GetTimeoutError as error:
            raise SeatLost(Outcome.CRASHED, f"{seat.name} did not answer within its lease") from error
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            host = seat.host.name if seat.host else "its host"
            raise SeatLost(Outcome.CRASHED, f"{seat.name} on {host} is gone: {in_a_line(error)}") from error
        if isinstance(found, Exception):
            raise found
        return found

    def apart(self, one: Configuration, other: Configuration) -> bool:
        """See `executor.Executor`."""
        return self.isolation == "template" and environment(one) != environment(other)


def _beat(over: threading.Event, reached: Callable[[], list[ActorSeat]], lease_seconds: float) -> None:
    """Tell all actors that the driver lives, until it is over."""
    while not over.wait(min(BEAT_SECONDS, lease_seconds / 4)):
        for seat in reached():
            with contextlib.suppress(Exception):  # what it means, the next answer tells
                seat.actor.beat.remote()


def _difference(first: Host | None, host: Host) -> str:
    """What makes a host another kind of device than the first seat's; empty for the same."""
    if not host.files_are_there:
        return "the workload's file is not there; share a file system, or use --ray-upload"
    return "" if first is None else "; ".join(first.machine.differences(host.machine))
