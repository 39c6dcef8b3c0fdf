"""A trial as the driver sees it: a template that is a fake, a pipe that is real, and a clock that is told."""

import signal
import socket

import pytest

from autotune.data.record import Outcome, Slice, StepSeconds
from autotune.runtime import protocol, trial_process
from autotune.runtime.executor import SeatLost, TrialFailed
from autotune.runtime.protocol import Channel
from autotune.runtime.trial_process import TrialProcess

GONE = (1 << 22) + 5  # above the largest process id of Linux: nothing is signalled
REQUEST = protocol.TrialRequest(
    configuration={"intra_op_threads": 2, "data_threads": 2},
    log="/no/such/log.txt",
    timing=protocol.TrialTiming(epoch_seconds=1.0, warmup_seconds=1.5),
)
STARTED = protocol.Started(
    jit_compile=False,
    examples=None,
    examples_per_epoch=None,
    endless=True,
    element="",
    counting_seconds=0.25,
    in_force={"intra_op_threads": 2, "data_threads": 1, "prefetch": 1},
)
READY = protocol.Ready(
    timed_by="steps",
    settled=True,
    warmup_seconds=1.0,
    compile_seconds=0.0,
    epoch_overhead_seconds=None,
    call_seconds=0.1,
    epoch_seconds=None,
)


def a_slice(seconds):
    """A slice of that length."""
    steps = StepSeconds(p50=0.005, p90=0.006, p99=0.02, max=0.03)
    part = Slice(seconds=seconds, steps=9, examples=90, epochs=0, cpu_seconds=0.1, step_seconds=steps, loss=None)
    return protocol.SliceDone(slice=part)


def figures(peak, wait=None):
    """Closing figures."""
    return protocol.Finished(peak_host_bytes=peak, peak_device_bytes=None, input_wait_fraction=wait)


class Clock:
    """The module `time`, in made-up time."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class SlowChannel(Channel):
    """Each wait for a message takes a tenth of a second of a made-up clock."""

    clock: Clock

    def receive(self, timeout_seconds=None):
        self.clock.now += 0.1
        return super().receive(timeout_seconds)


class Template:
    """A template whose forks say what the test has them say."""

    layers = None

    def __init__(self, clock):
        self.clock, self.alive, self.status, self.end = clock, True, None, "killed by SIGKILL"
        self.ran_seconds = 0.0

    def fork(self, request):
        near, far = socket.socketpair()
        self.far = Channel(far)
        channel = SlowChannel(near)
        channel.clock = self.clock
        return protocol.Forked(pid=GONE, ran_seconds=self.ran_seconds), channel

    def wait_exit(self, pid, timeout_seconds):
        return self.status

    def death(self):
        return None if self.alive else self.end


@pytest.fixture
def template(monkeypatch):
    """A template without forks yet."""
    clock = Clock()
    monkeypatch.setattr(trial_process, "time", clock)
    return Template(clock)


@pytest.fixture
def say(template):
    """Starts a trial that has sent these messages."""
    started = []

    def start(*messages, profile="none"):
        trial = TrialProcess(template, REQUEST, profile)
        started.append(trial)
        for message in messages:
            template.far.send(message)
        return trial

    yield start
    for trial in started:
        trial.kill()
        template.far.close()


def test_warming_up_is_timed_without_counting(say):
    trial = say(STARTED, protocol.FirstStep(loss=2.5, parameters=85002), READY)
    warm = trial.warm_up(10.0)
    assert warm.first_step_seconds == pytest.approx(0.0)  # two looks, less the time of counting
    assert warm.ready_seconds == pytest.approx(0.05)
    assert (warm.first_loss, warm.parameters) == (2.5, 85002)


def test_what_is_in_force_is_told_before_the_first_step(say):
    class Known(Exception):
        """It was tried before."""

    def refuse(started):
        raise Known(started.in_force["prefetch"])

    with pytest.raises(Known, match="1"):
        say(STARTED).warm_up(10.0, refuse)


def test_start_of_a_surveying_process_counts_from_its_survey(say, template):
    template.ran_seconds = 20.0
    warm = say(STARTED, protocol.FirstStep(), READY).warm_up(10.0)
    assert warm.launch_seconds == 0.0
    assert warm.first_step_seconds == pytest.approx(20.0 - 0.05)  # two looks, less the time of counting
    assert warm.ready_seconds == pytest.approx(20.0 + 0.05)


@pytest.mark.parametrize(
    ("profile", "thorough", "expected"),
    [("none", True, False), ("finalists", False, False), ("finalists", True, True), ("all", False, True)],
)
def test_those_that_were_asked_for_are_profiled(say, template, profile, thorough, expected):
    say(figures(1), profile=profile).finish(0.0, 5.0, thorough=thorough)
    asked = template.far.receive(0.0)
    assert (asked.profile, asked.ceilings) == (expected, thorough)


def test_closing_figures_survive_a_failed_input_wait(say):
    assert say(figures(1), figures(1, 0.5)).finish(1.0, 5.0).input_wait_fraction == 0.5
    assert say(figures(1)).finish(1.0, 0.5).input_wait_fraction is None


def test_what_the_trial_reports_is_its_failure(say):
    told = protocol.Failed(outcome=Outcome.NONFINITE, reason="nan", hint="Mend.", detail="a", input_error=True)
    with pytest.raises(TrialFailed) as caught:
        say(told).warm_up(5.0)
    failure = caught.value
    assert (failure.outcome, failure.reason, failure.hint) == (Outcome.NONFINITE, "nan", "Mend.")
    assert (failure.detail, failure.input_error) == ("a", True)


def test_message_out_of_turn_or_silence_names_the_phase(say):
    with pytest.raises(TrialFailed, match="sent 'slice' out of turn while building the model"):
        say(a_slice(1.0)).warm_up(5.0)
    with pytest.raises(TrialFailed, match=r"timed out after 0.[56] s in the first step") as caught:
        say(STARTED).warm_up(0.5)
    assert caught.value.outcome is Outcome.TIMEOUT


def ends(trial, template):
    """How a trial fails whose end of the pipe closes."""
    template.far.close()
    with pytest.raises(TrialFailed) as caught:
        trial.warm_up(5.0)
    return caught.value


@pytest.mark.parametrize(
    ("status", "oom_kills", "outcome", "reason"),
    [
        (-signal.SIGKILL, 0, Outcome.CRASHED, "killed by SIGKILL"),
        (-signal.SIGKILL, 1, Outcome.OOM, "killed by the kernel: out of memory"),
        (-signal.SIGSEGV, 1, Outcome.CRASHED, "killed by SIGSEGV"),
        (7, 1, Outcome.CRASHED, "ended with exit status 7"),
    ],
)
def test_a_trial_that_ends_without_a_word_is_told_by_its_status(
    say, template, monkeypatch, status, oom_kills, outcome, reason
):
    monkeypatch.setattr(trial_process, "count_oom_kills", lambda: 3)
    trial = say()
    template.status = status
    monkeypatch.setattr(trial_process, "count_oom_kills", lambda: 3 + oom_kills)
    failure = ends(trial, template)
    assert (failure.outcome, failure.reason) == (outcome, reason)


def test_a_template_that_dies_loses_the_seat_for_its_trials(say, template, monkeypatch):
    trial = say()
    template.alive = False
    failure = ends(trial, template)
    assert isinstance(failure, SeatLost)
    assert failure.reason == "its template process died (killed by SIGKILL)"
    template.alive, trial = True, say()
    assert ends(trial, template).reason == "closed its pipe and did not end"
    trial = say()
    template.alive = False  # a child of the trial's holds the pipe open
    with pytest.raises(SeatLost):
        trial.warm_up(5.0)
