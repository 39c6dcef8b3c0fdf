"""Seats of a cluster as the driver counts them, on a Ray that answers at once; and an actor without Ray."""

# It has Ray's own names, and Ray documents them.

import os
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
from simulated_runs import BASELINE, FACTS, MACHINE, REFERENCE

from autotune.data.errors import ArgumentError, NoStableConfigurationError, WorkloadError
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.data.options import Options
from autotune.data.record import Outcome
from autotune.data.run_directory import RunDirectory
from autotune.runtime import ray as ray_seats
from autotune.runtime import ray_actor
from autotune.runtime.executor import SeatLost, TrialFailed
from autotune.runtime.ray import RayExecutor
from autotune.runtime.ray_actor import Host, OpenedSeat, SeatActor, SeatSettings
from autotune.tuning import tune

SETTINGS = SeatSettings(REFERENCE, ".", False, "template", "none", None)


class RayError(Exception):
    """The root of Ray's errors."""


class RayTaskError(RayError):
    """An actor's method raised."""


class RayActorError(RayError):
    """The actor is gone."""


class Actor:
    """Answers for a seat on the first node that has one left."""

    def __init__(self, ray):
        free = [name for name, seats in ray.seats.items() for _ in range(seats - ray.taken.count(name))]
        self.node, self.ray = free[0], ray
        self.asked, self.files, self.answer = [], {}, None
        ray.taken.append(self.node)
        ray.actors.append(self)

    @property
    def ask(self):
        """The method as Ray's actors have it."""
        return SimpleNamespace(remote=self._ask)

    def _ask(self, method, *given, trial=None, **options):
        if trial is None:
            return getattr(self, f"_{method}")(*given)
        self.asked.append((trial, method, options))
        return self.answer

    def _describe_host(self):
        machine = MACHINE.model_copy(update={"cpu": self.ray.processors.get(self.node, "usual")})
        has_files = self.ray.files_are_there
        return Host(name=self.node, node=self.node, pid=1, machine=machine, devices=(), has_files=has_files)

    def _open(self):
        if isinstance(self.ray.opens, Exception):
            return self.ray.opens
        print_ = self.ray.fingerprints.get(self.node, FACTS.fingerprint)
        return OpenedSeat(FACTS.model_copy(update={"fingerprint": print_}), "template", None)

    def _launch(self, request):
        self.asked.append((os.path.basename(request.log), request.timing))
        return 7

    def _end(self, number):
        self.asked.append((number, "end"))
        return self.files

    def _close(self):
        self.ray.taken.remove(self.node)


class FakeRay:
    """As much of Ray as the driver uses; `seats` by node."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    files_are_there = True
    opens = None
    is_silent = False  # no call is answered
    looks_until_open = 0  # of all actors together, until the first has opened

    def __init__(self, **seats):
        self.seats, self.taken, self.actors, self.killed = seats, [], [], []
        self.processors, self.fingerprints = {}, {}

    def remote(self, kind):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda settings: Actor(self)))

    def nodes(self):
        return [
            {"NodeID": name, "Alive": True, "Resources": {"GPU": seats, "CPU": 2.0}}
            for name, seats in self.seats.items()
        ]

    def cluster_resources(self):
        return {"GPU": sum(self.seats.values())}

    def wait(self, asked, **_):
        if isinstance(asked[0], OpenedSeat) and self.looks_until_open:
            self.looks_until_open -= 1
            return [], asked
        return ([], asked) if self.is_silent else (asked, [])

    def get(self, answer, timeout=None):
        if isinstance(answer, RayError):
            raise answer
        return answer

    def kill(self, actor):
        """It is gone."""
        self.killed.append(actor)

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


# -------------------------------------------------------------------------------------------- coming and going


def test_no_more_seats_are_used_than_were_asked_for():
    with opened(FakeRay(a=2, b=1), seats=2) as trials:
        assert len(trials.seats) == 2


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({"processors": {"b": "another"}}, "another"),
        ({"fingerprints": {"b": "sha256:01"}}, "the workload's file differs"),
    ],
)
def test_a_host_that_differs_from_the_first_is_not_used(differs, why):
    ray, said = FakeRay(a=1, b=1), []
    vars(ray).update(differs)
    with opened(ray, say=said.append) as trials:
        trials.refresh()
        assert [trials.place(seat).host for seat in trials.seats] == ["a"]
        (line,) = said  # and it is not asked for again
        assert line.startswith("a seat on b is not used: ")
        assert why in line
        assert [actor.node for actor in ray.killed] == ["b"]


def test_import_error_of_the_first_seat_ends_the_run():
    """On a later seat it only drops that seat."""
    ray = FakeRay(a=1)
    ray.opens = WorkloadError("no such module")
    with pytest.raises(WorkloadError, match="no such module"):
        opened(ray)
    ray, said = FakeRay(a=1), []
    with opened(ray, say=said.append) as trials:
        ray.seats["b"], ray.opens = 1, WorkloadError("no such module")
        trials.refresh()
        trials.refresh()
        assert trials.seats == ("seat0",)
        assert said == ["a seat on b is not used: no such module"]


def test_a_host_that_comes_after_one_was_lost_is_used():
    ray = FakeRay(a=1, b=1)
    with opened(ray) as trials:
        del ray.seats["b"]
        trials.drop("seat1")
        ray.seats["c"] = 1
        trials.refresh()
        assert [trials.place(seat).host for seat in trials.seats] == ["a", "c"]
        trials.drop(trials.seats[1])
        trials.refresh()
        assert [trials.place(seat).host for seat in trials.seats] == ["a"]


def test_cluster_without_usable_seats_is_not_waited_for():
    said = []
    ray = FakeRay(a=1)
    ray.files_are_there = False
    with pytest.raises(NoStableConfigurationError, match="no seat of the cluster can be used"):
        opened(ray, say=said.append)
    (line,) = said
    assert line.startswith("a seat on a is not used: the workload's file is not there")


# ------------------------------------------------------------------------------------------------- the trials


def test_a_trial_is_started_and_asked_by_its_number(tmp_path):
    ray = FakeRay(a=1)
    with opened(ray) as trials:
        (actor,) = ray.actors
        trial = trials.launch(BASELINE, log=str(tmp_path / "own.txt"), data=None)
        assert actor.asked[0][0] == "own.txt"
        actor.answer = ("slice", "next")
        assert trial.measure(0.5, 20.0) == "slice"
        assert actor.asked[-1] == (7, "measure_continuously", {"seconds": 0.5, "count": 1, "timeout_seconds": 20.0})
        assert trial.finish(0.1, 5.0, thorough=True) == ("slice", "next")
        assert actor.asked[-2][2] == {"input_wait_seconds": 0.1, "thorough": True, "timeout_seconds": 5.0}
        assert actor.asked[-1] == (7, "end")
        trial.kill()
        assert actor.asked.count((7, "end")) == 1


def test_remote_trial_returns_its_failure_and_its_files(tmp_path):
    """No file is written outside the folder of the trial."""
    ray = FakeRay(a=1)
    with opened(ray) as trials:
        (actor,) = ray.actors
        (tmp_path / "trial").mkdir()
        trial = trials.launch(BASELINE, log=str(tmp_path / "trial" / "log.txt"), data=None)
        actor.answer = TrialFailed(Outcome.CRASHED, "killed by SIGSEGV")
        outside = tmp_path / "outside.txt"
        actor.files = {"log.txt": b"said", "profile/a.pb": b"x", "../outside.txt": b"y", str(outside): b"y"}
        with pytest.raises(TrialFailed, match="SIGSEGV"):
            trial.warm_up(1.0)
        found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
        assert found == ["trial/log.txt", "trial/profile/a.pb"]
        assert stat.S_IMODE((tmp_path / "trial" / "log.txt").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("answer", "why"),
    [(RayActorError("\nThe actor died.\nMore."), "is gone: The actor died."), (None, "has not answered for 1 s")],
)
def test_an_actor_that_is_gone_or_silent_loses_the_seat(tmp_path, monkeypatch, answer, why):
    monkeypatch.setattr(ray_seats, "SILENCE_SECONDS", 0.5)
    ray = FakeRay(a=1)
    with opened(ray) as trials:
        trial = trials.launch(BASELINE, log=str(tmp_path / "log.txt"), data=None)
        ray.actors[0].answer, ray.is_silent = answer, answer is None
        with pytest.raises(SeatLost) as caught:
            trial.warm_up(0.6)
        assert caught.value.reason == f"its actor on a {why}"
        ray.is_silent = False
        trial.kill()
        assert (7, "end") not in ray.actors[0].asked


def test_losses_are_not_waited_for_once_the_user_stops_the_run(tmp_path):
    ray = FakeRay(a=1)
    answers = iter([False, True])

    def stopped():
        ray.is_silent = not (is_over := next(answers))  # the actor hears the next call
        return is_over

    with opened(ray) as trials:
        trial = trials.launch(BASELINE, log=str(tmp_path / "log.txt"), data=None)
        ray.is_silent = True
        with pytest.raises(TrialFailed) as caught:
            trial.loss_curves(1000.0, stopped)
        assert caught.value.outcome is Outcome.INTERRUPTED
        assert (7, "end") in ray.actors[0].asked


def test_an_error_of_the_actors_own_is_none_of_the_seats(tmp_path):
    ray = FakeRay(a=1)
    with opened(ray) as trials:
        trial = trials.launch(BASELINE, log=str(tmp_path / "log.txt"), data=None)
        ray.actors[0].answer = RayTaskError("AttributeError")
        with pytest.raises(RayTaskError):
            trial.warm_up(1.0)


@pytest.fixture
def ray_module(monkeypatch):
    """A module `ray` that says with what it was started, and how it was then."""
    private = SimpleNamespace(
        worker=SimpleNamespace(listen_error_messages="loud"), ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True)
    )
    started = {}

    def init(**options):
        started.update(options, loud=private.worker.listen_error_messages == "loud")
        started["public"] = private.ray_constants.ENABLE_RAY_CLUSTER

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "ray._private", private)
    monkeypatch.setitem(sys.modules, "ray._raylet", SimpleNamespace())
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield started
    assert private.worker.listen_error_messages == "loud"
    assert private.ray_constants.ENABLE_RAY_CLUSTER


def test_a_ray_of_this_machines_own_is_private(ray_module):
    ray_seats.connect(None, directory=None, left=60.0)
    assert ray_module["address"] == "local"
    assert not ray_module["public"]
    assert not ray_module["loud"]
    assert (os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"])) == ("token", 64)
    assert "runtime_env" not in ray_module


def test_connect_passes_the_working_directory_to_the_cluster(ray_module):
    ray_seats.connect("auto", directory="/home/me/project", left=60.0)
    assert ray_module["address"] == "auto"
    assert ray_module["runtime_env"] == {"working_dir": "/home/me/project"}
    assert ray_module["public"]
    assert not ray_module["loud"]
    assert "RAY_AUTH_TOKEN" not in os.environ


# ------------------------------------------------------------------------------------------------- the cluster


def nodes(*resources):
    """A Ray with these nodes, the last of which is lost."""
    lost = len(resources) - 1
    total = {"GPU": sum(resource.get("GPU", 0) for resource in resources)}
    found = [{"NodeID": str(at), "Alive": at != lost, "Resources": each} for at, each in enumerate(resources)]
    return SimpleNamespace(nodes=lambda: found, cluster_resources=lambda: total, available_resources=lambda: {"GPU": 1})


def test_gpus_make_seats_within_one_node():
    ray = nodes({"GPU": 3.0, "CPU": 8}, {"CPU": 4}, {"GPU": 5}, {"GPU": 8})
    assert ray_seats._capacity(ray, 2) == ({"num_gpus": 2, "num_cpus": 0}, 3)
    assert ray_seats._why_none_is_free(ray, 2) == "a seat needs 2 GPUs, others' jobs leave 1 free"
    assert ray_seats._why_none_is_free(ray, 8) == "no node of the cluster has 8 GPUs"


def test_a_node_without_gpus_is_a_seat_with_all_its_cores():
    ray = nodes({"CPU": 8.0}, {"CPU": 4.0}, {"CPU": 2.0})
    assert ray_seats._capacity(ray, 1) == ({"num_cpus": 4}, 2)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_that_does_not_answer_is_refused_at_once(address):
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
        connect(address, directory=None, left=1.0)
    except ArgumentError as error:
        print(error.message)
"""


def test_silent_server_is_not_waited_for_beyond_the_budget():
    pytest.importorskip("ray")
    said = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.endswith("nothing was heard of Ray for 1 s\n")


LOCAL = """
from autotune.runtime.ray import connect
ray = connect(None, directory=None, left=60.0)
print(ray.get(ray.remote(lambda: "answers").remote(), timeout=60))
"""


@pytest.mark.slow
def test_a_ray_of_this_machines_own_lives_on_once_it_has_started():
    pytest.importorskip("ray")
    said = subprocess.run([sys.executable, "-c", LOCAL], capture_output=True, text=True, check=True, timeout=120).stdout
    assert said.endswith("answers\n")


def test_no_seat_is_waited_for_beyond_the_budget():
    left = [600.0]
    with opened(FakeRay(a=1), left=lambda: left[0]) as trials:
        left[0] = 0.0
        with pytest.raises(SeatLost, match="within 0 s"):
            trials.restart("seat0")


# --------------------------------------------------------------------------------------------------- the actor


@pytest.fixture
def actor_with(tmp_path, monkeypatch):
    """Makes actors in this process, whose working directory is `here`; afterwards all is as before."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    made = []

    def make(**settings):
        made.append(SeatActor(SETTINGS._replace(**settings)))
        return made[-1]

    yield make
    for actor in made:
        actor.close()


@pytest.mark.parametrize("threads", [None, "3"])
def test_an_actor_has_the_drivers_own_number_of_threads(actor_with, monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    actor_with(threads=threads)
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_an_actor_works_where_the_driver_does(actor_with, tmp_path):
    actor_with(directory=str(tmp_path))
    assert os.getcwd() == str(tmp_path)


SCRIPT = WorkloadReference(
    file="/home/me/project/code/train.py",
    search_path=("/home/me/project", "/home/me/project/code"),
    called_as="/home/me/project/code/train.py",
)


def test_an_upload_is_looked_for_where_ray_has_put_it(actor_with, tmp_path):
    here = str(tmp_path / "here")
    found = actor_with(reference=SCRIPT, directory="/home/me/project", uploaded=True)._reference
    assert (found.file, found.called_as) == (f"{here}/code/train.py", f"{here}/code/train.py")
    assert found.search_path == (here, f"{here}/code")
    assert actor_with(reference=SCRIPT, directory="/home/me/project")._reference == SCRIPT


def test_ray_upload_copies_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = Options(budget=60.0, executor="ray", ray_upload=True)
    asked = {}

    def connect(address, **settings):
        asked.update(settings)
        return FakeRay(a=1)

    monkeypatch.setattr(ray_seats, "connect", connect)
    directory = RunDirectory(tmp_path / "run")
    with tune._executor(
        REFERENCE, directory, options, (), isolation="template", say=print, left=lambda: 60.0
    ) as trials:
        trials.open()
        assert asked["directory"] == str(tmp_path)
        assert trials._settings.uploaded
        trials.use_fresh_interpreters()
        assert trials._settings.isolation == "spawn", "also of seats that open later"


def test_actor_returns_files_of_its_trial_up_to_a_limit(actor_with, monkeypatch):
    monkeypatch.setattr(ray_actor, "LARGEST_FILES_BYTES", 5)
    actor = actor_with()
    ended = []
    actor._trials[3] = SimpleNamespace(kill=lambda: ended.append(3))
    folder = actor._scratch / "3"
    (folder / "profile").mkdir(parents=True)
    (folder / "log.txt").write_bytes(b"1234")
    (folder / "profile" / "x.pb").write_bytes(b"56")
    assert actor.end(3) == {"log.txt": b"1234"}
    assert ended == [3]
    assert not folder.exists()
    assert actor.end(3) == {}


def test_an_actor_that_closes_removes_its_own_files(actor_with, tmp_path):
    script = ScriptSettings(scratch="/home/me/run/script-scratch")
    actor = actor_with(reference=REFERENCE.model_copy(update={"script": script}))
    assert os.path.dirname(actor._reference.script.scratch) == str(actor._scratch)
    actor.close()
    assert not actor._scratch.exists()
