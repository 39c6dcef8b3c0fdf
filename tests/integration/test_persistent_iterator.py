"""A persistent iterator trains on the same epochs as Keras's new iterators."""

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.fast

EXAMPLES, EPOCHS = 1437, 4

COMMON = f"""
import json
import keras
import numpy as np
import tensorflow as tf
from autotune.recipe import apply
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


def test_every_epoch_has_the_same_examples_in_another_order(run):
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
        assert [len(epoch) for epoch in epochs] == [11 if drop else 12] * EPOCHS
        examples = [[example for batch in epoch for example in batch] for epoch in epochs]
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
