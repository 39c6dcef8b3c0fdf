"""What a boundary between long epochs costs, from what was timed of short ones; nothing here is trained."""

from types import SimpleNamespace

import pytest

from autotune.trial import profiling
from autotune.trial.step_clock import Training


def untuned():
    """A dataset, as far as it is asked whether `tf.data` tunes it."""
    return SimpleNamespace(options=lambda: SimpleNamespace(autotune=SimpleNamespace(enabled=False)))


def training(steps, steps_per_call):
    """One with epochs of so many steps."""
    return Training(
        steps_per_call=steps_per_call,
        batch_size=32,
        examples=32 * steps,
        drop_remainder=False,
        iterations=None,
        synchronise=lambda: None,
    )


@pytest.mark.parametrize(
    ("steps", "per_call", "buffered", "counted"),
    [(100, 1, 20, 80), (40, 10, 20, 2), (31, 10, 15.5, None), (100, 1, 60, None), (100, 1, None, None)],
)
def test_calls_that_count_are_enough_to_end_a_slice(monkeypatch, steps, per_call, buffered, counted):
    """Of a single one that counts nothing would be timed: an epoch's first call is no part of a slice."""
    short = profiling._ShortEpochs(start=1.0, call=0.5, validating=0.25, gap=0.001)
    monkeypatch.setattr(profiling, "_short_epochs", lambda *_: short)
    monkeypatch.setattr(profiling, "_steps_in_shuffle_buffer", lambda *_: buffered)
    monkeypatch.setattr(profiling, "_kept_call_seconds", lambda *_: 0.25)
    found = profiling.boundary(None, untuned(), None, training(steps, per_call), call_seconds=0.5)
    assert found.counted_calls == counted
    if counted is None:
        assert found.seconds == 1.25
