"""Seats of a cluster as the driver counts them, on a Ray that answers at once."""

# It has Ray's own names, and Ray documents them.

import subprocess
import sys
from types import SimpleNamespace

import pytest
from simulated_runs import FACTS, MACHINE, REFERENCE

from autotune.data.errors import ArgumentError, NoStableConfigurationError
from autotune.runtime import ray_seats
from autotune.runtime.executor import SeatLost
from autotune.runtime.places import cut_cores, whole_host
from autotune.runtime.ray import RESOURCE, RayExecutor
from autotune.runtime.ray_actor import Host, SeatActor, SeatSettings, sweep_scratch


class Actor:
    """Answers for a seat on the first node that has one left."""

    def __init__(self, ray):
        free = [name for name, seats in ray.seats.items() for _ in range(seats - ray.taken.count(name))]
        self.node, self.ray, self.slot = free[0], ray, None
        ray.taken.append(self.node)

    def __getattr__(self, method):
        """A method as Ray's actors have it."""
        return SimpleNamespace(remote=lambda *arguments: getattr(self, f"_{method}")(*arguments))

    def _hello(self):
        machine = MACHINE.model_copy(update={"cpu": self.ray.processors.get(self.node, "usual")})
        return Host(
            name=self.node, node=self.node, machine=machine, devices=(), files_are_there=self.ray.files_are_there
        )

    def _open(self, slot, of):
        self.slot = slot
        self.place = cut_cores(of, range(of))[slot] if of > 1 else whole_host()
        return FACTS

    def _state(self):
        return ("template", None, self.place, "whole" if self.place.of_cores else None)

    def _close(self):
        self.ray.taken.remove(self.node)

    def _beat(self):
        """Heard."""


class FakeRay:
    """As much of Ray as the driver uses; `seats` by node."""

    exceptions = SimpleNamespace(RayError=KeyError)
    files_are_there = True

    def __init__(self, **seats):
        self.seats, self.taken, self.processors = seats, [], {}

    def remote(self, kind):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda settings: Actor(self)))

    def nodes(self):
        return [
            {"NodeID": name, "Alive": True, "Resources": {RESOURCE: seats, "CPU": 2.0}}
            for name, seats in self.seats.items()
        ]

    def cluster_resources(self):
        return {RESOURCE: sum(self.seats.values())}

    def wait(self, asked, **_):
        return asked, []

    def get(self, answer, **_):
        return answer

    def kill(self, actor):
        """It is gone."""

    def shutdown(self):
        """Left."""


def opened(ray, **settings):
    """Trials on it, all of whose seats have come."""
    trials = RayExecutor(REFERENCE, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_seats, "connect", lambda address, **_: ray)
        trials.open()
    trials.refresh()
    return trials


def test_a_seat_that_is_made_anew_has_its_own_cores_again():
    """And not those of its neighbour."""
    with opened(FakeRay(a=2)) as trials:
        for seat in ("seat1", "seat0", "seat1"):
            trials.restart(seat)
            assert {each: trials._seat(each).actor.slot for each in trials.seats} == {"seat0": 0, "seat1": 1}
            assert len({trials.place(each).cores for each in trials.seats}) == 2


def test_a_host_that_comes_after_one_was_lost_is_used():
    """What was dropped on a host that is gone takes no other's place."""
    ray = FakeRay(a=1, b=1)
    with opened(ray) as trials:
        del ray.seats["b"]
        trials.drop("seat1")
        ray.seats["c"] = 1
        trials.refresh()
        assert [trials.place(each).host for each in trials.seats] == ["a", "c"]
        trials.drop(trials.seats[1])
        trials.refresh()
        assert [trials.place(each).host for each in trials.seats] == ["a"]


def test_a_cluster_of_which_no_seat_can_be_used_is_not_waited_for():
    """The reasons were told."""
    said = []
    ray = FakeRay(a=1)
    ray.files_are_there = False
    with pytest.raises(NoStableConfigurationError, match="no seat of the cluster can be used"):
        opened(ray, say=said.append)
    (line,) = said
    assert line.startswith("a seat on a is not used: the workload's file is not there")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_that_does_not_answer_is_refused_at_once(address):
    """With what to start; no other Ray is started meanwhile."""
    ray = pytest.importorskip("ray")
    with (
        pytest.raises(ArgumentError, match=f"no Ray cluster answers at {address}"),
        RayExecutor(REFERENCE, address=address) as trials,
    ):
        trials.open()
    assert not ray.is_initialized()


SILENT = """
import socket
from autotune.data.errors import ArgumentError
from autotune.runtime.ray import connect
with socket.create_server(("127.0.0.1", 0)) as server:
    address = f"127.0.0.1:{server.getsockname()[1]}"
    try:
        connect(address, seats=None, directory=None, left=1.0)
    except ArgumentError as error:
        print(error.message)
"""


def test_what_answers_and_is_no_cluster_is_not_waited_for_beyond_the_budget():
    """Ray itself would try for minutes. In a process of its own: its attempt cannot be ended."""
    pytest.importorskip("ray")
    said = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.endswith("nothing was heard of Ray for 1 s\n")


LOCAL = """
from autotune.runtime.ray import connect
ray = connect(None, seats=1, directory=None)
print(ray.get(ray.remote(lambda: "answers").remote(), timeout=60))
"""


@pytest.mark.slow
def test_a_ray_of_this_machines_own_lives_on_once_it_has_started():
    """What it starts would die with a thread that had started it."""
    pytest.importorskip("ray")
    said = subprocess.run([sys.executable, "-c", LOCAL], capture_output=True, text=True, check=True, timeout=120).stdout
    assert said.endswith("answers\n")


def test_no_seat_is_waited_for_beyond_the_budget():
    """It is lost then."""
    left = [600.0]
    with opened(FakeRay(a=1), left=lambda: left[0]) as trials:
        left[0] = 0.0
        with pytest.raises(SeatLost, match="within 0 s"):
            trials.restart("seat0")


def test_a_host_with_fewer_cores_than_seats_says_so(monkeypatch):
    """In the seat's answer, which the driver raises; a variable that hides GPUs changes nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    settings = SeatSettings(REFERENCE, ".", False, "template", "none", 60.0, None)
    actor = SeatActor(settings)
    answer = actor.open(0, 4096)
    actor.close()
    assert isinstance(answer, ArgumentError)
    assert "4096 seats were asked for" in str(answer)


HOLD = """
import sys
from pathlib import Path
from autotune.runtime.ray_actor import _hold
held = _hold(Path(sys.argv[1]))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_killed_actor_left_is_swept_at_the_next_start(tmp_path, killed):
    """What a living one holds stays, and so does whatever no actor has made."""
    scratch, others, target = (tmp_path / name for name in ("autotune-seat-a", "autotune-seat-b", "target"))
    for path in (scratch, others, target):
        path.mkdir()
    (scratch / "0").mkdir()
    (scratch / "0" / "log.txt").write_text("lines")
    (target / "lock").write_text("")
    (tmp_path / "autotune-seat-link").symlink_to(target)
    command = [sys.executable, "-c", HOLD, str(scratch)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout.readline() == "holds\n"
        if killed:
            actor.kill()
            actor.wait()
        sweep_scratch(tmp_path)
        actor.kill()
    assert scratch.exists() is not killed
    assert others.exists()
    assert target.exists()
