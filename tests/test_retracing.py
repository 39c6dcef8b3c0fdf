"""What a trial process reads of XLA's compilations in its log, and how the runtime is brought to tell of them."""

import importlib.util
import os
import sys

import pytest

from autotune.runtime import logs as logs
from autotune.training import gauges
from autotune.training.gauges import Retracing, enable_compile_logging

COMPILED = (
    "I0000 00:00:1795252585.290877    8765 device_compilation_profiler.cc:113] Compiled "
    "__inference_one_step_on_data_808 {} times, compile time: 1367271 us, cumulative: 1367271 us (1 s / 1.37 s)\n"
)
OTHER = "I0000 00:00:1795252436.239707    5938 device_compiler.h:208] Compiled cluster using XLA!  This line is\n"


@pytest.fixture
def log(tmp_path):
    """A log that an earlier process has written to."""
    file = tmp_path / "log.txt"
    file.write_text(COMPILED.format(1) + OTHER)
    return file


def append(log, text):
    """What the runtime and the user's code go on writing."""
    with log.open("a") as stream:
        stream.write(text)


def slices(retracing, log, *texts):
    """What is counted in slices that follow on one another, in whose calls so much is written to the log."""
    counted = []
    train = retracing.wrap(lambda text: append(log, text))
    for text in texts:
        measured = retracing.gauge()
        train(text)
        counted.append(measured(1.0)["retraces"])
    return counted


def test_compilations_are_counted_as_they_are_logged(log):
    seen = Retracing(log, xla=True)
    append(log, COMPILED.format(1))
    first, rest = COMPILED.format(3)[:60], COMPILED.format(3)[60:]
    counted = slices(
        seen, log, OTHER + COMPILED.format(2) + first, rest + "Compiled by hand 3 times\n" + COMPILED.format(4), ""
    )
    assert counted == [1, 2, 0]


def test_what_a_validation_compiles_is_no_retrace(log):
    seen = Retracing(log, xla=True)
    train = seen.wrap(lambda text: append(log, text))
    train(COMPILED.format(1))
    measured = seen.gauge()
    train(COMPILED.format(2))  # the last batch of an epoch
    append(log, COMPILED.replace("808", "911").format(1) + COMPILED.replace("808", "911").format(2))
    train("")
    assert measured(1.0) == {"retraces": 1}


def test_a_log_that_does_not_tell_is_not_taken_for_quiet(log):
    assert slices(Retracing(log, xla=False), log, OTHER) == [0]
    assert slices(Retracing(log, xla=True), log, OTHER, COMPILED.format(1), "") == [None, 1, 0]


def test_a_log_that_was_cut_is_read_on(log, monkeypatch):
    monkeypatch.setattr(logs, "LARGEST_LOG_BYTES", 1 << 18)
    monkeypatch.setattr(logs, "HEAD_BYTES", 1 << 10)
    seen = Retracing(log, xla=True)
    assert slices(seen, log, COMPILED.format(1) + "x" * 80 * 4000 + "\n") == [1]
    logs.cap_log(log)
    assert slices(seen, log, "", "\n" + COMPILED.format(2)) == [0, 1]


def test_retraces_are_unknown_without_tensorflow_trace_times(log, monkeypatch):
    monkeypatch.setattr(gauges, "tracing_seconds", lambda: None)
    seen = Retracing(log, xla=False)
    assert seen.wrap(len) is len
    assert seen.gauge()(1.0) == {"retraces": None}


def test_calls_in_which_something_is_traced_are_counted(log, monkeypatch):
    spent = [0.0]
    monkeypatch.setattr(gauges, "tracing_seconds", lambda: lambda: spent[0])
    seen = Retracing(log, xla=False)

    def train(seconds):
        spent[0] += seconds

    wrapped = seen.wrap(train)
    wrapped(1.0)
    measured = seen.gauge()
    for seconds in (0.0, 0.5, 0.0, 0.5):
        wrapped(seconds)
    assert measured(1.0) == {"retraces": 2}


def test_a_trace_and_its_compilation_are_one_retrace(log, monkeypatch):
    spent = [0.0]
    monkeypatch.setattr(gauges, "tracing_seconds", lambda: lambda: spent[0])
    seen = Retracing(log, xla=True)

    def train(compilations):
        spent[0] += 0.5 if compilations else 0.0
        append(log, compilations * COMPILED.format(1))

    measured = seen.gauge()
    seen.wrap(train)(1)
    assert measured(1.0) == {"retraces": 1}
    measured = seen.gauge()
    seen.wrap(train)(3)
    assert measured(1.0) == {"retraces": 3}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "device_compilation_profiler=1"),
        ("mark_for_compilation_pass=2", "mark_for_compilation_pass=2,device_compilation_profiler=1"),
    ],
)
def test_the_runtime_is_asked_whatever_the_file_sets(monkeypatch, before, after):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delenv("TF_CPP_VMODULE", raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    enable_compile_logging()
    importlib.util.find_spec("tensorflow")  # as who looks whether it is there
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    if before is not None:
        monkeypatch.setenv("TF_CPP_VMODULE", before)
    importlib.util.find_spec("json")
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    importlib.util.find_spec("tensorflow")  # as its import does
    assert (os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["TF_CPP_VMODULE"]) == ("0", after)
