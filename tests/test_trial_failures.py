"""A trial process runs each kind of workload, and tells of each failure in one message."""

import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.data.errors import ApplyError, AutotuneError, WorkloadError
from autotune.data.facts import ScriptSettings, WorkloadReference
from autotune.data.record import Outcome
from autotune.runtime import failures
from autotune.runtime.executor import TrialFailed
from autotune.runtime.failures import call_user
from autotune.runtime.logs import is_memory_error
from autotune.runtime.protocol import ChannelClosed
from autotune.script import runner as worker
from autotune.script import trial as script_trial

OWN = """
def run(rate, *, asked):
    return {"rate": rate}[asked]
"""


class Kind:
    """A kind of workload that there is not yet."""


def here(error):
    """Where this file raised an error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" in {os.path.relpath(frame.filename)}, line {frame.lineno}"


@pytest.fixture
def run(monkeypatch):
    """Runs a trial of that kind, which does as it is told; its exit status, and what it sent."""
    errors = SimpleNamespace(OpError=type("OpError", (Exception,), {}), ResourceExhaustedError=RecursionError)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(errors=errors))
    monkeypatch.setattr(worker, "_apply", lambda request, configuration, workload, reference: workload)

    def start(trial):
        sent = []
        monkeypatch.setitem(worker.KINDS, Kind, trial)
        request = SimpleNamespace(configuration={"batch_size": 32})
        status = worker.run(request, SimpleNamespace(send=sent.append), Kind(), None)
        return status, sent

    return start


def test_a_kind_more_is_run_by_its_own_function(run):
    def trial(request, channel, workload, configuration):
        channel.send((type(workload), configuration.batch_size))

    assert run(trial) == (0, [(Kind, 32)])


def test_an_error_of_autotunes_own_is_told_apart(run, capfd):
    """It is called an internal error, and its traceback is in the log. What a user asks of a wrapper is the user's."""
    own = {}
    exec(compile(OWN, str(Path(failures.__file__).parents[1] / "training" / "odd.py"), "exec"), own)
    _, (internal,) = run(lambda *_: own["run"](1.0, asked="step"))
    assert internal.reason == "internal error of autotune: KeyError: 'step' in autotune/training/odd.py, line 3"
    assert "odd.py" in capfd.readouterr().err
    _, (users,) = run(lambda *_: own["run"](1.0, wanted="step"))
    assert "internal" not in users.reason
    assert "odd.py" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "outcome", "reason", "input_error"),
    [
        (TrialFailed(Outcome.NONFINITE, "the loss became nan"), "nonfinite", "the loss became nan", False),
        (TrialFailed(Outcome.ERROR, "no data", input_error=True), "error", "no data", True),
        (WorkloadError("dataset() is empty", hint="Fill it."), "error", "dataset() is empty", True),
        (ApplyError("it cannot act", hint="Move it."), "error", "it cannot act", True),
        (AutotuneError("it broke", hint="Mend it."), "error", "it broke", False),
        (ApplyError("precision does not act", hint="Build it later."), "error", "precision does not act", True),
        (MemoryError("8 GiB"), "oom", "out of host memory: 8 GiB", False),
        (RecursionError("tensor"), "oom", "RecursionError: tensor", False),
        (RuntimeError("CUDA_ERROR: out of memory"), "oom", "RuntimeError: CUDA_ERROR: out of memory", False),
        (
            ValueError("Graph execution error:\n\nDetected at node 'a'\nshapes differ\n\t [[{{node a}}]]"),
            "error",
            "ValueError: shapes differ",
            False,
        ),
        (SystemExit(), "error", "SystemExit: no message", False),
        (
            RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"),
            "crashed",
            "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
            False,
        ),
    ],
)
def test_a_failure_is_told_in_one_message(run, error, outcome, reason, input_error):
    def trial(*_):
        raise error

    status, (told,) = run(trial)
    assert status == 1
    assert (told.outcome, told.input_error) == (outcome, input_error)
    is_located = outcome == "error" and not isinstance(error, AutotuneError | TrialFailed)
    assert told.reason == reason + here(error) * is_located
    assert ("dmesg" in told.hint) == (outcome == "crashed")
    if outcome != "crashed":
        assert told.hint == getattr(error, "hint", "")


def test_where_nobody_listens_nothing_is_told(run):
    def trial(*_):
        raise ChannelClosed("end of stream")

    assert run(trial) == (1, [])


BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
HIDDEN = f"""Exception encountered when calling Outer.call().

{BOLD}Could not automatically infer the output shape / dtype of 'outer' (of type Outer). … Error encountered:

Exception encountered when calling GRU.call().

{BOLD}{{}}{PLAIN}

Arguments received by GRU.call():
  • mask=None{PLAIN}

Arguments received by Outer.call():
  • kwargs=<class 'inspect._empty'>"""
AUTOGRAPH = """in user code:

    File "train.py", line 3, in f  *
        return table[x]

    KeyError: 'labels'
"""
KERAS_2 = """Exception encountered when calling layer 'gate' (type Gate).

in user code:

    File "nets.py", line 8, in call  *
        return tf.matmul(h, self.scale)
    File "/tmp/__autograph_generated_file0.py", line 12, in call

    TypeError: Input 'b' has type float32


Call arguments received by layer 'gate' (type Gate):
  • inputs=tf.Tensor(shape=(None, 64), dtype=bfloat16)
  • training=None"""


@pytest.mark.parametrize(
    ("error", "cause", "where"),
    [
        (ValueError(HIDDEN.format("slice index 0 out of bounds")), "ValueError: slice index 0 out of bounds", ""),
        (KeyError(HIDDEN.format("'labels'")), "KeyError: 'labels'", ""),
        (KeyError("labels"), "KeyError: 'labels'", ""),
        (KeyError(AUTOGRAPH), "KeyError: 'labels'", " in train.py, line 3"),
        (TypeError(KERAS_2), "TypeError: Input 'b' has type float32", " in nets.py, line 8"),
        (RuntimeError("2 root error(s) found.\n  (0) INTERNAL: no\n"), "RuntimeError: INTERNAL: no", ""),
    ],
)
def test_the_innermost_line_that_says_something_is_the_cause(run, error, cause, where):
    def trial(*_):
        raise error

    _, (told,) = run(trial)
    assert told.reason == cause + (where or here(error))
    with pytest.raises(WorkloadError) as caught:
        call_user("model", trial)
    assert caught.value.message == f"the workload's model() raised {cause}"


def test_script_failure_in_a_trial_has_no_hint_to_run_it_alone(monkeypatch):
    def fail(*_, **__):
        raise KeyError("labels")

    monkeypatch.setattr(script_trial, "run_as_main", fail)
    with pytest.raises(WorkloadError) as caught:
        script_trial.run_users(WorkloadReference(file="/train.py", script=ScriptSettings()))
    assert caught.value.message.startswith("/train.py raised KeyError: 'labels' in ")
    assert caught.value.hint == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("libgomp.so.1: cannot allocate memory in static TLS block", False),
        ("[Errno 12] Cannot allocate memory", True),
        ("libtensorflow.so: failed to map segment from shared object", True),
    ],
)
def test_what_says_that_memory_ran_out(text, expected):
    assert is_memory_error(text) is expected
