"""A short run of the fuzzer over each format; the long ones are done by hand, see `fuzz.py`."""

import random
import time

import fuzz
import pytest
from targets import TARGETS, Target

INPUTS = {"recipe": 3000, "space": 800, "run": 1000}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_whatever_stands_in_a_file_it_is_read_or_refused_as_documented(name):
    """No crash, no hang, one-line errors; what was read comes back from its file, and drives no terminal."""
    report = fuzz.fuzz(TARGETS[name], inputs=INPUTS[name], seed=0)
    assert report.fault is None, f"{report.fault.what}: {report.fault.data[:2000]!r}"
    assert report.lines > 40
    assert report.answers > 40


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_seeds_are_valid(name):
    """The inputs that others are made from are read, not refused."""
    for seed in TARGETS[name].seeds:
        answer = TARGETS[name].check(seed)
        assert answer.startswith("read"), answer


def one_letter(data, rng):
    """Another letter in one place."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(97, 123)]) + data[at + 1 :]


def target(check):
    """A target whose inputs are four letters."""
    return Target(check=check, seeds=(b"aaaa",), change=one_letter)


def test_inputs_that_reach_something_new_are_built_upon():
    """A fault behind four conditions, one within the other, is found; by chance it would take half a million inputs."""

    def check(data):
        for reached, (letter, wanted) in enumerate(zip(data, b"fuzz", strict=True)):
            if letter != wanted:
                return f"stopped at {reached}"
        raise KeyError("deep within")

    report = fuzz.fuzz(target(check), inputs=20_000, seed=0)
    assert report.fault == fuzz.Fault(data=b"fuzz", what="KeyError: 'deep within'")


def test_an_input_that_hangs_is_a_fault(monkeypatch):
    """Waiting for ever ends the input, not the fuzzer, even where the code under test catches all exceptions."""

    def check(data):
        while True:
            try:
                time.sleep(60)
            except Exception:
                return "caught"

    monkeypatch.setattr(fuzz, "HANG_SECONDS", 0.05)
    assert fuzz.fuzz(target(check), inputs=1, seed=0).fault.what == "Hang: no answer after 0.05 s"


def test_an_input_that_takes_too_much_of_the_processor_is_a_fault(monkeypatch):
    """An answer that comes late is no good answer."""
    monkeypatch.setattr(fuzz, "LONGEST_CPU_SECONDS", -1.0)
    assert fuzz.fuzz(target(lambda data: "late"), inputs=1, seed=0).fault.what.startswith("took ")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_same_seed_gives_the_same_inputs(name):
    """A fault that was found can be found again."""
    made = [[], []]
    for inputs in made:
        rng = random.Random(7)
        data = TARGETS[name].seeds[0]
        for _ in range(20):
            data = TARGETS[name].change(data, rng)
            inputs.append(data)
    assert made[0] == made[1]
    assert len(set(made[0])) > 10
