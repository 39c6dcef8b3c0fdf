"""A Ray cluster of several nodes on this machine, and what is done to it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fault_table import BATCH_SIZES
from real_trials import QUICK, REPOSITORY, configuration, is_gone, until
from test_end_to_end import with_enough_time

from autotune.data.errors import NoStableConfigurationError
from autotune.data.facts import WorkloadReference
from autotune.data.record import Outcome
from autotune.report.history import load_history
from autotune.runtime import ray as ray_seats
from autotune.runtime.executor import SeatLost, TrialFailed
from autotune.runtime.protocol import Data
from autotune.runtime.ray import RayExecutor

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns of much
cluster_utils = pytest.importorskip("ray.cluster_utils")

DATA = Data(examples=128, endless=False)
SILENCE_SECONDS = 8.0
FAULTY = Path(__file__).with_name("faulty.py")
ONE_SEAT = {"num_cpus": 1}


@pytest.fixture
def cluster():
    """A head without seats; a test adds nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        yield made
        made.shutdown()


@pytest.fixture
def seats(cluster, faulty_reference, monkeypatch):
    """Opens trials on the cluster, whose silence is soon noticed."""
    monkeypatch.setattr(ray_seats, "SILENCE_SECONDS", SILENCE_SECONDS)
    opened = []

    def start(reference=faulty_reference, **settings):
        trials = RayExecutor(reference, address=cluster.address, **settings)
        opened.append(trials)
        trials.open()
        return trials

    yield start
    for trials in opened:
        trials.close()


@pytest.fixture
def faulty_reference():
    """The workload whose batch sizes choose a fault."""
    return WorkloadReference(file=str(FAULTY), search_path=(str(FAULTY.parent),))


def launch(trials, folder, fault="", **how):
    """A trial with a fault, or none."""
    folder.mkdir(exist_ok=True)
    wanted = configuration(BATCH_SIZES.get(fault, 8))
    return trials.launch(wanted, log=str(folder / "log.txt"), data=DATA, timing=QUICK, **how)


def actor_of(trials, seat=0):
    """The process of a seat's actor."""
    return psutil.Process(trials._handles[trials.seats[seat]].host.pid)


def below(process):
    """All that an actor has started."""
    return [each.pid for each in process.children(recursive=True)]


def test_a_failed_trials_log_comes_to_the_driver(cluster, seats, tmp_path):
    cluster.add_node(**ONE_SEAT)
    trials = seats()
    crashing = launch(trials, tmp_path / "one", "segfaults")
    with pytest.raises(TrialFailed, match="SIGSEGV") as caught:
        crashing.warm_up(120.0)
    assert not isinstance(caught.value, SeatLost)
    assert caught.value.outcome is Outcome.CRASHED
    assert "Segmentation fault" in (tmp_path / "one" / "log.txt").read_text(errors="replace")
    hanging = launch(trials, tmp_path / "two", "hangs_in_python")
    with pytest.raises(TrialFailed) as caught:
        hanging.warm_up(3.0)
    assert caught.value.outcome is Outcome.TIMEOUT
    good = launch(trials, tmp_path / "three")
    assert good.warm_up(120.0).started.examples == 128
    assert good.measure(0.2, 60.0).steps > 0
    assert good.finish(0.1, 60.0).peak_host_bytes > 0


def test_a_killed_actor_or_template_loses_the_seat(cluster, seats, tmp_path):
    cluster.add_node(**ONE_SEAT)
    trials = seats()
    trial = launch(trials, tmp_path / "one")
    trial.warm_up(120.0)
    actor = actor_of(trials)
    family = below(actor)
    assert len(family) >= 3  # supervisor, template, trial
    template = next(each for each in actor.children(recursive=True) if each.pid == psutil.Process(family[-1]).ppid())
    template.kill()
    with pytest.raises(SeatLost, match="its template process died"):
        trial.measure(0.2, 60.0)
    again = launch(trials, tmp_path / "two")
    again.warm_up(120.0)
    family = below(actor)
    actor.kill()
    with pytest.raises(SeatLost, match="is gone"):
        again.measure(0.2, 60.0)
    for pid in family:
        until(lambda pid=pid: is_gone(pid), f"process {pid} to end")
    trials.restart(trials.seats[0])
    launch(trials, tmp_path / "three").warm_up(120.0)


def test_a_seat_that_is_silent_is_lost_and_made_anew(cluster, seats, tmp_path):
    cluster.add_node(**ONE_SEAT)
    trials = seats()
    trial = launch(trials, tmp_path / "one")
    trial.warm_up(120.0)
    actor = actor_of(trials)
    (running,) = [process for process in below(actor) if not psutil.Process(process).children()]
    actor.send_signal(signal.SIGSTOP)
    with pytest.raises(SeatLost, match="has not answered for"):
        trial.measure(0.2, 0.5)
    trials.restart(trials.seats[0])
    until(lambda: is_gone(actor.pid), "the actor to end")
    until(lambda: is_gone(running), "its trial to end")
    launch(trials, tmp_path / "two").warm_up(120.0)


def test_hosts_without_the_drivers_files_train_an_uploaded_copy(cluster, seats, tmp_path, monkeypatch):
    cluster.add_node(**ONE_SEAT)
    project = tmp_path / "project"
    project.mkdir()
    for name in ("faulty.py", "fault_table.py"):
        shutil.copy(FAULTY.with_name(name), project)
    monkeypatch.chdir(project)
    trials = seats(WorkloadReference(file=str(project / FAULTY.name), search_path=(str(project),)), upload=True)
    (project / FAULTY.name).unlink()
    copy = Path(actor_of(trials).cwd())
    assert copy != project
    assert (copy / FAULTY.name).exists()
    assert launch(trials, tmp_path / "one").warm_up(120.0).started.examples == 128


def test_nodes_come_and_go(cluster, seats, tmp_path):
    first = cluster.add_node(**ONE_SEAT)
    trials = seats()
    cluster.add_node(**ONE_SEAT)

    def grown():
        trials.refresh()
        return len(trials.seats) == 2

    until(grown, "the second seat")
    assert len({trials.place(seat).seat for seat in trials.seats}) == 2
    both = [launch(trials, tmp_path / seat, seat=seat) for seat in trials.seats]
    for each in both:
        each.warm_up(120.0)
    family = below(actor_of(trials))
    cluster.remove_node(first, allow_graceful=False)
    for pid in family:
        until(lambda pid=pid: is_gone(pid), f"process {pid} to end")
    with pytest.raises(SeatLost, match="is gone"):
        both[0].measure(0.2, 60.0)
    assert both[1].measure(0.2, 60.0).steps > 0
    trials.drop(trials.seats[0])
    assert len(trials.seats) == 1


HOLDER = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=1)
class Holder:
    def held(self):
        return True
holder = Holder.remote()
print(ray.get(holder.held.remote()), flush=True)
sys.stdin.read()
"""


def test_seats_that_others_hold_are_waited_for_with_one_line(cluster, faulty_reference):
    cluster.add_node(**ONE_SEAT)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline().strip() == "True"
        said, ends = [], time.monotonic() + 15.0
        with (
            RayExecutor(
                faulty_reference, address=cluster.address, say=said.append, left=lambda: ends - time.monotonic()
            ) as trials,
            pytest.raises(NoStableConfigurationError, match="no seat came free"),
        ):
            trials.open()
        assert len(said) == 1
        assert said[0].startswith("waiting for a free seat")
    finally:
        holder.communicate("")


def test_a_killed_driver_leaves_nothing_and_its_run_resumes(cluster, tmp_path):
    cluster.add_node(**ONE_SEAT)
    cluster.add_node(**ONE_SEAT)
    run = tmp_path / "run"
    options = ["--executor", "ray", "--ray-address", cluster.address]
    command = [sys.executable, "-m", "autotune", "tune", str(REPOSITORY / "examples" / "digits_mlp.py"), *options]
    driver = subprocess.Popen(
        [*command, "--budget", "5m", "--out", str(run)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def finished():
        assert driver.poll() is None
        records = [json.loads(path.read_bytes()) for path in run.glob("trials/*/result.json")]
        return [record for record in records if record["phase"] == "search" and record["outcome"] == "ok"][2:]

    until(finished, "three trials")
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()

    def templates():
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "autotune.runtime.template" in words and "digits_mlp.py" in " ".join(words):
                found.append(process.pid)
        return found

    until(lambda: not templates(), "the actors' trials to end")
    before = {path.parent.name: json.loads(path.read_bytes()) for path in run.glob("trials/*/result.json")}
    resume = [*command, "--resume", str(run), "--budget"]
    ended = with_enough_time(
        lambda budget: subprocess.run([*resume, f"{budget}s"], capture_output=True, text=True, check=False),
        60,
        enough=lambda _: len(load_history(run)) > len(before),
    )
    assert ended.returncode == 0, ended.stderr
    for number, record in before.items():
        now = json.loads((run / "trials" / number / "result.json").read_bytes())
        assert now["started_at"] == record["started_at"]
    history = load_history(run)
    assert len(history) > len(before)
    searched = history[history["phase"] == "search"]
    assert searched["host"].notna().all()
    assert searched["seat"].nunique() >= 2
    assert (run / "recipe.json").exists()


def test_a_ray_of_ones_own_is_private_and_quiet(faulty_reference, tmp_path, capfd):
    trials = RayExecutor(faulty_reference, seats=1)
    try:
        trials.open()
        family = psutil.Process().children(recursive=True)
        listening = [
            connection.laddr.ip
            for process in family
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
        (server,) = [process for process in family if "gcs_server" in process.name()]
        told = server.environ()
        assert (told["RAY_AUTH_MODE"], len(told["RAY_AUTH_TOKEN"])) == ("token", 64)
        capfd.readouterr()
        actor = actor_of(trials)
        os.kill(actor.pid, signal.SIGKILL)
        with pytest.raises(SeatLost):
            launch(trials, tmp_path / "one")
    finally:
        trials.close()
    assert "raylet" not in "".join(capfd.readouterr())
