"""However a trial goes wrong, its outcome says so, the next trial runs, and nothing of it is left."""

import os

import pytest
from fault_table import FAULTS, witness
from real_trials import PATIENCE_SECONDS, is_gone, until

from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.runtime.logs import HEAD_BYTES, LARGEST_LOG_BYTES

"""How long after its limit a hanging trial's whole family may live: the one time that is promised, and asserted."""


def ends(trial, seconds=PATIENCE_SECONDS):
    """How the trial fails, by its first slices at the latest; a slice may take `seconds`."""
    try:
        trial.warm_up()
        for _ in range(20):
            trial.trial.measure(0.2, seconds)
    except TrialFailed as failure:
        return failure
    pytest.fail("the trial did not fail")


ELSEWHERE = {
    *("kills_its_template", "kills_its_supervisor"),  # test_templates.py
    *("raises_in_model", "raises_in_dataset"),  # integration/test_bad_input.py
    *("sends_half_a_message", "sends_too_much"),  # test_messages.py
    *("exceeds_rlimit_in_pipeline", "segfaults_late"),  # as without a pipeline, and as `is_killed_late`
    *("aborts", "hangs_in_python", "hangs_in_pipeline"),  # as others that are killed, or hang
    *("raises_in_train_step", "segfaults", "is_killed_late", "hangs_in_compile"),  # below
}
"""Faults that other tests have."""


def of(*outcomes):
    """The faults that end so, without those that other tests have."""
    chosen = [fault for fault in FAULTS if fault.outcome in outcomes and fault.name not in ELSEWHERE]
    return pytest.mark.parametrize("fault", [pytest.param(each, id=each.name) for each in chosen])


@of(Outcome.ERROR, Outcome.CRASHED, Outcome.OOM, Outcome.NONFINITE)
def test_a_trial_that_goes_wrong_says_how(launch, cgroup, fault):
    if fault.cgroup and cgroup is None:
        pytest.skip("no memory control group can be made here")
    trial = launch(fault.name)
    failure = ends(trial)
    assert (failure.outcome, fault.words in failure.reason) == (fault.outcome, True), str(failure)
    assert fault.outcome is Outcome.ERROR or not failure.input_error
    assert witness(trial.log)["fault"] == fault.name
    assert is_gone(trial.trial.pid)


@of(Outcome.TIMEOUT)
def test_a_trial_that_hangs_is_killed_at_its_limit(launch, fault):
    trial = launch(fault.name)
    if fault.late:
        trial.warm_up()
    with pytest.raises(TrialFailed) as caught:
        trial.trial.measure(0.2, fault.seconds) if fault.late else trial.trial.warm_up(fault.seconds)
    assert caught.value.outcome is Outcome.TIMEOUT
    assert fault.words in caught.value.reason
    entered = witness(trial.log)
    assert entered["fault"] == fault.name
    assert [pid for pid in (trial.trial.pid, *entered.get("family", [])) if not is_gone(pid)] == []


def test_a_trial_hanging_in_the_compiler_is_killed_at_its_limit(launch):
    trial = launch("hangs_in_compile")
    until(lambda: witness(trial.log), "the trial to build its model")
    flags = until(lambda: writer_to(trial.log.parent / "flags"), "XLA to read its flags")
    with pytest.raises(TrialFailed) as caught:
        trial.trial.warm_up(5.0)
    os.close(flags)
    assert caught.value.outcome is Outcome.TIMEOUT
    assert "which traces and compiles" in caught.value.reason
    assert is_gone(trial.trial.pid)


def writer_to(fifo):
    """A pipe's end to write to, once a process waits to read from it; None before."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


@pytest.mark.fast
def test_a_trial_that_is_killed_in_a_slice_says_so(launch):
    trial = launch("is_killed_late")
    failure = ends(trial)
    assert (failure.outcome, failure.input_error) == (Outcome.CRASHED, False)
    assert "killed by SIGKILL" in failure.reason
    assert is_gone(trial.trial.pid)
    assert launch().warm_up().ready.timed_by == "epochs"


def test_an_exception_is_shown_with_the_users_own_frames(launch):
    failure = ends(launch("raises_in_train_step"))
    assert failure.outcome is Outcome.ERROR
    assert "KeyError: 'missing column'" in failure.reason
    assert "in users_own_function" in failure.detail
    assert "faulty.py" in failure.detail
    assert "autotune/training" not in failure.detail


def test_a_signal_leaves_the_line_that_it_struck_in_the_log(launch):
    failure = ends(launch("segfaults"))
    assert failure.outcome is Outcome.CRASHED
    assert "killed by SIGSEGV" in failure.reason
    assert "Segmentation fault" in failure.log_tail
    assert "in segfaults" in failure.log_tail


def test_gigabytes_of_garbage_are_ignored_and_the_log_is_capped(launch):
    trial = launch("prints_gigabytes")
    trial.warm_up()
    trial.measure()
    assert witness(trial.log)["written"] == 2 << 30
    until(lambda: trial.log.stat().st_size <= LARGEST_LOG_BYTES, "the log to be cut")
    assert trial.log.stat().st_size > HEAD_BYTES
    assert b"[autotune: cut out here" in trial.log.read_bytes()
    trial.trial.finish(0.0, PATIENCE_SECONDS)
    assert b"the last line" in trial.log.read_bytes()
