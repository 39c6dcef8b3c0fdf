"""The same training is known again after a small edit; what sets two apart is named by its call site."""

import pytest

from autotune.data.facts import ScriptFacts, Site, Trains
from autotune.data.run_directory import WorkloadRecord
from autotune.recipe.recipe import first_difference

ELEMENT = (
    "(TensorSpec(shape=({}, 64), dtype=tf.float32, name=None), TensorSpec(shape=({},), dtype=tf.int64, name=None))"
)


def a_site(call, order=0, *, line=10, file="train.py", function="main"):
    """A call in a script."""
    return Site(file=file, function=function, call=call, order=order, line=line)


def a_script(**fields):
    """The facts of a script that batches and maps its dataset, and trains by `fit`."""
    sites = {"batch_size": (a_site("batch"),), "num_parallel_calls": (a_site("map"), a_site("map", 1))}
    usual = {"fit_site": a_site("fit"), "compile_site": a_site("compile"), "sites": sites}
    return ScriptFacts(**{"trains": Trains.FIT, "baseline": {"batch_size": 32}, **usual, **fields})


def a_workload(script=None, **fields):
    """A workload whose baseline has started."""
    usual = {"name": "train", "reference": "train.py", "fingerprint": "sha256:00", "batch_size": 32}
    shape = {"element": ELEMENT.format(None, None), "batch_ranks": (2, 1), "parameters": 85002, "device": "cpu"}
    return WorkloadRecord(**{**usual, **shape, "script": script, **fields})


MOVED = a_script(
    fit_site=a_site("fit", line=80),
    sites={"num_parallel_calls": (a_site("map", line=3), a_site("map", 1, line=4)), "batch_size": (a_site("batch"),)},
)
RENAMED = a_script(
    fit_site=a_site("fit", file="experiment.py"),
    compile_site=a_site("compile", file="experiment.py"),
    sites={
        knob: tuple(site.model_copy(update={"file": "experiment.py"}) for site in sites)
        for knob, sites in a_script().sites.items()
    },
)


@pytest.mark.parametrize(
    "other",
    [
        a_workload(MOVED, fingerprint="sha256:01"),
        a_workload(RENAMED, name="experiment"),
        a_workload(a_script(), batch_size=64, examples=10),
        a_workload(a_script(sites={**a_script().sites, "cache": (a_site("map"),)})),
    ],
    ids=["moved lines", "renamed script", "another batch size", "a knob of another run"],
)
def test_a_small_edit_makes_no_other_workload(other):
    assert first_difference(a_workload(a_script()), other) == ""


def test_fixed_batch_shape_matches_at_another_batch_size():
    dropping = {"drop_remainder": True}
    mine = a_workload(a_script(), element=ELEMENT.format(32, 32), **dropping)
    assert first_difference(mine, a_workload(a_script(), element=ELEMENT.format(64, 64), **dropping)) == ""


def test_a_workload_in_code_is_known_by_its_name_and_shape():
    assert first_difference(a_workload(), a_workload(reference="/elsewhere/train.py:workload")) == ""
    assert first_difference(a_workload(), a_workload(name="other")) == "one is train, the other other"
    assert "batches" in first_difference(a_workload(), a_workload(batched=True))


def test_workload_that_never_started_matches_nothing():
    unknown = a_workload(a_script(), element=None, parameters=None)
    assert first_difference(unknown, unknown)


BATCHES = ELEMENT.format("batch", "batch")
NEVER_STARTED = "the baseline of one was never started, so its model and data are unknown"


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            a_workload(a_script(), element=ELEMENT.replace("64", "65").format(None, None)),
            f"their batches are {BATCHES} and {BATCHES.replace('64', '65')}",
        ),
        (
            a_workload(a_script(compile_site=a_site("compile", function="build"))),
            "compile() in train.py, line 10 leads to the training of one only",
        ),
        (
            a_workload(a_script(sites={**a_script().sites, "batch_size": (a_site("batch", file="data.py"),)})),
            "batch() in train.py, line 10 leads to the training of one only",
        ),
        (
            a_workload(a_script(sites={**a_script().sites, "prefetch": (a_site("prefetch", line=31),)})),
            "prefetch() in train.py, line 31 leads to the training of one only",
        ),
        (
            a_workload(a_script(fit_site=a_site("fit", 1, line=44))),
            "fit() in train.py, line 10 leads to the training of one only",
        ),
        (
            a_workload(a_script(step_function=a_site("step"))),
            "step() in train.py, line 10 leads to the training of one only",
        ),
        (a_workload(a_script(trains=Trains.LOOP)), "one trains by fit, the other by loop"),
        (a_workload(), "one was tuned as a script, the other as a Workload"),
        (a_workload(a_script(), parameters=7), "their models have 85,002 and 7 weights"),
        (a_workload(a_script(), drop_remainder=True), "one of them drops a smaller last batch"),
        *(
            (
                a_workload(a_script(), **unknown),
                "the baseline of one was never started, so its model and data are unknown",
            )
            for unknown in ({"element": None}, {"parameters": None})
        ),
    ],
)
def test_the_first_difference_is_named(other, difference):
    assert first_difference(a_workload(a_script()), other) == difference
