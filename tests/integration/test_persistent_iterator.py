"""A persistent iterator trains on the same epochs as Keras's new iterators."""

import json
import subprocess
import sys
import textwrap

import pytest
from simulated_runs import faster_by, quick_tune, simulated_trials

EXAMPLES, EPOCHS = 1437, 4

COMMON = f"""
import json
import keras
import numpy as np
import tensorflow as tf
from autotune.data.errors import ApplyError
from autotune.recipe import apply
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device

def configuration(batch_size=128, **knobs):
    return baseline_configuration(batch_size, {{"persistent_iterator": True, **knobs}}, Device.CPU, where="test")

def kinds(dataset):
    found = []
    while dataset is not None:
        found.append(apply.kind_of(dataset))
        dataset = next(iter(dataset._inputs()), None)
    return found

ids = tf.data.Dataset.range({EXAMPLES})
"""

TRAINED = f"""
class Sees(keras.Model):
    def __init__(self):
        super().__init__()
        self.epochs = []

    def train_step(self, batch):
        tf.py_function(lambda each: self.epochs[-1].append(each.numpy().tolist()), [batch], [])
        return {{"loss": 0.0}}

class Begins(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.epochs.append([])

def trained(dataset, *, batched=False, drop=False, **knobs):
    pipeline = apply.training_pipeline(dataset, configuration(**knobs), batched=batched, drop_remainder=drop)
    model = Sees()
    steps_per_execution = pipeline.in_force["steps_per_execution"]
    model.compile(jit_compile=False, steps_per_execution=steps_per_execution)
    model.fit(**pipeline.fit_args, epochs={EPOCHS}, verbose=0, callbacks=[Begins()])
    return model.epochs
"""


@pytest.fixture(scope="module")
def run(environment):
    """Runs scripts in one process, which has TensorFlow; each returns what it printed last, from JSON."""
    loop = "import sys\nfor line in sys.stdin:\n    exec(json.loads(line))\n    sys.stdout.flush()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMON + TRAINED + loop],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )

    def start(part: str):
        process.stdin.write(json.dumps(textwrap.dedent(part)) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, process.communicate()[1]
        return json.loads(answer)

    yield start
    process.kill()
    process.communicate()


def test_every_epoch_trains_on_the_same_examples_in_another_order(run):
    seen = run(
        f"""
        cases = [
            (ids.shuffle({EXAMPLES}), False, False),
            (ids.shuffle({EXAMPLES}), False, True),
            (ids.cache().shuffle({EXAMPLES}).batch(128).prefetch(2), True, False),
            (ids.batch(128).shuffle(12), True, False),
        ]
        print(json.dumps([
            (drop, trained(dataset, batched=batched, drop=drop, persistent_iterator=on))
            for dataset, batched, drop in cases for on in (False, True)
        ]))
        """
    )
    assert len(seen) == 8
    for drop, epochs in seen:
        assert len(epochs) == EPOCHS
        assert [len(each) for each in epochs] == [11 if drop else 12] * EPOCHS
        examples = [[example for batch in each for example in batch] for each in epochs]
        if drop:
            assert all(len(set(each)) == len(each) == 11 * 128 for each in examples)
        else:
            assert all(sorted(each) == list(range(EXAMPLES)) for each in examples)
        assert len({tuple(each) for each in examples}) == EPOCHS


def test_no_epoch_runs_past_its_end(run):
    seen = run(
        """
        said = []
        for asked in (5, 8, 16):
            pipeline = apply.training_pipeline(ids, configuration(steps_per_execution=asked))
            epochs = trained(ids, steps_per_execution=asked)
            said.append([pipeline.in_force["steps_per_execution"], [len(each) for each in epochs]])
        print(json.dumps(said))
        """
    )
    assert seen == [[4, [12] * EPOCHS], [6, [12] * EPOCHS], [12, [12] * EPOCHS]]


def test_the_repeat_comes_before_the_last_prefetch(run):
    seen = run(
        """
        options = tf.data.Options()
        options.deterministic = False
        own = ids.batch(128).prefetch(3)
        cases = [
            (ids, False, 0), (ids, False, 5), (own, True, 0), (own, True, 5), (own.with_options(options), True, 0),
            (ids.batch(128).prefetch(2).map(lambda each: each), True, 0), (ids.batch(128).prefetch(0), True, 0),
        ]
        said = []
        for dataset, batched, prefetch in cases:
            pipeline = apply.training_pipeline(dataset, configuration(prefetch=prefetch), batched=batched)
            buffers, each = [], pipeline.dataset
            while apply.kind_of(each) != "Repeat":
                if apply.kind_of(each) == "Prefetch":
                    buffers.append(int(each._buffer_size))
                (each,) = each._inputs()
            said.append([buffers, pipeline.in_force["prefetch"], pipeline.dataset.options().deterministic])
        print(json.dumps(said))
        """
    )
    assert seen == [
        [[1], 1, None],
        [[5], 5, None],
        [[3], 0, None],
        [[5, 3], 5, None],
        [[3], 0, False],
        [[1], 1, None],
        [[1], 1, None],
    ]


def test_it_is_off_where_the_steps_of_an_epoch_are_not_known(run):
    seen = run(
        """
        said = []
        for dataset in (ids.filter(lambda each: each > 9), ids.repeat(), ids.take(0)):
            pipeline = apply.training_pipeline(dataset, configuration(steps_per_execution=16))
            changed = pipeline.in_force.differences(configuration(steps_per_execution=16))
            said.append([sorted(pipeline.fit_args), changed, kinds(pipeline.dataset)[0]])
        print(json.dumps(said))
        """
    )
    assert seen == [[["x"], {"persistent_iterator": False}, "Batch"]] * 3


def test_a_pipeline_of_shorter_epochs_is_otherwise_the_same(run):
    seen = run(
        """
        said = []
        for on in (True, False):
            whole = apply.training_pipeline(ids, configuration(persistent_iterator=on, prefetch=2))
            short = whole.shorter(3)
            elements = [each.numpy().tolist() for each in short.dataset.take(6)]
            said.append([kinds(short.dataset), short.steps_per_epoch, len(elements), elements[0] == elements[-3]])
            said.append([int(each.one_epoch.cardinality()) for each in (whole, short)])
        print(json.dumps(said))
        """
    )
    assert seen == [
        [["Prefetch", "Repeat", "Take", "Batch", "Range"], 3, 6, True],
        [12, 3],
        [["Take", "Prefetch", "Batch", "Range"], None, 3, True],
        [12, 3],
    ]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe with a persistent iterator and batches of 128, out of a simulated run."""
    trials = simulated_trials(faster_by(batch_size=1.5), noise=0.02)
    made, _ = quick_tune(trials, tmp_path_factory.mktemp("run"))
    knobs = {"batch_size": 128, "persistent_iterator": True, "steps_per_execution": 12, "prefetch": 1}
    path = tmp_path_factory.mktemp("recipe") / "recipe.json"
    made.model_copy(update={"configuration": {**made.configuration, **knobs}}).save(path)
    return path


def test_fit_args_repeat_and_batches_do_not(run, recipe):
    seen = run(
        f"""
        recipe = Recipe.load({str(recipe)!r})
        off = recipe.model_copy(update={{"configuration": {{**recipe.configuration, "persistent_iterator": False}}}})
        said = []
        for each in (recipe, off):
            arguments = each.fit_args(ids)
            said.append([int(arguments.pop("x").cardinality()), arguments, int(each.batch(ids).cardinality())])
        print(json.dumps(said))
        """
    )
    assert seen == [[-1, {"steps_per_epoch": 12}, 12], [12, {}, 12]]


def test_fit_args_refuse_an_epoch_that_would_run_past_its_end(run, recipe):
    seen = run(
        f"""
        recipe = Recipe.load({str(recipe)!r})
        fewer = ids.take(1000)
        try:
            recipe.fit_args(fewer)
        except ApplyError as error:
            said = [error.message, error.hint]
        print(json.dumps([*said, recipe.fit_args(fewer, steps_per_execution=8)["steps_per_epoch"]]))
        """
    )
    message, hint, steps = seen
    assert message == "steps_per_execution=12 does not divide the 8 steps of an epoch"
    assert 'model.compile(..., **recipe.compile_args() | {"steps_per_execution": 8})' in hint
    assert "recipe.fit_args(dataset, steps_per_execution=8)" in hint
    assert steps == 8


def test_batches_of_batches_are_an_error(run, recipe):
    said = run(
        f"""
        import numpy as np
        recipe = Recipe.load({str(recipe)!r})
        ranks = recipe.workload.model_copy(update={{"batch_ranks": (2, 1)}})
        own = ranks.model_copy(update={{"batched": True}})
        examples = tf.data.Dataset.from_tensor_slices((np.ones((100, 4)), np.ones(100)))
        images = tf.data.Dataset.from_tensor_slices((np.ones((100, 8, 6)), np.ones((100, 5))))
        batches, said = examples.batch(8), []
        for workload, data in ((ranks, examples), (ranks, batches), (own, batches), (own, examples), (ranks, images)):
            try:
                recipe.model_copy(update={{"workload": workload}}).batch(data)
                said.append("")
            except ApplyError as error:
                said.append(str(error))
        print(json.dumps(said))
        """
    )
    assert said[0] == said[2] == said[4] == ""
    assert said[1].startswith("the recipe was given a dataset that is batched already")
    assert said[3].startswith("the recipe was given single examples")


def test_a_recipe_takes_arrays(run, recipe):
    said = run(
        f"""
        import numpy as np
        recipe = Recipe.load({str(recipe)!r})
        off = {{"batch_size": 20, "steps_per_execution": 1, "persistent_iterator": False}}
        recipe = recipe.model_copy(update={{"configuration": {{**recipe.configuration, **off}}}})
        x, y = np.ones((100, 4)), np.ones((100, 1))
        found = [recipe.batch((x, y)), recipe.batch({{"a": x}}), recipe.fit_args((x, y, None))["x"]]
        print(json.dumps([[str(each.element_spec), int(each.cardinality())] for each in found]))
        """
    )
    assert [count for _, count in said] == [5, 5, 5]
    assert all("shape=(None, 4), dtype=tf.float64" in spec for spec, _ in said)
