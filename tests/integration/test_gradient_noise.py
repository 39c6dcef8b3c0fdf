"""The gradient's noise beside real trainings: what is found is true, and the training goes on as it would have."""

import json

import pytest

from autotune.stats.same_loss import noise_scale

pytestmark = pytest.mark.slow

MEASURING = """
import json, sys
import keras, numpy as np, tensorflow as tf
from autotune.training.noise import UpcomingBatches, measure_noise

def train(model, dataset, *, at=None, steps=1, epochs=2, **more):
    "Train as `fit` does; before the call of this number measure the noise. Returns it, the losses and the weights."
    found, upcoming, calls = None, UpcomingBatches(steps), 0
    model.make_train_function()
    usual = upcoming.wrap(model.train_function)

    def train_function(iterator):
        nonlocal found, calls
        if calls == at:
            options = {"batch_size": 32, "seconds": 1e3, "step_seconds": 0.0, "compile_seconds": 0.0, **more}
            found = measure_noise(model, upcoming, iterator, **options)
        calls += 1
        return usual(iterator)

    model.train_function = train_function
    history = model.fit(dataset, epochs=epochs, verbose=0).history
    return found, history, [np.asarray(variable).tolist() for variable in model.variables], calls

def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")

def linear(**more):
    return keras.Sequential([keras.Input((20,)), keras.layers.Dense(1, use_bias=False, **more)])
"""


@pytest.fixture
def run(run_code):
    """Run code that measures, and return the JSON of its last line."""
    return lambda script: json.loads(run_code(MEASURING + script).stdout.splitlines()[-1])


def test_a_training_goes_on_as_if_nothing_had_been_measured(run):
    found = run("""
class Noisy(keras.layers.Layer):
    def call(self, x, training=None):
        return x + 0.1 * keras.random.normal(tf.shape(x)) if training else x

def model(steps):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((20,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="relu")(inputs))
    x = Noisy()(keras.layers.Dropout(0.5)(x))
    outputs = [keras.layers.Dense(1, name="a", kernel_regularizer="l2")(x), keras.layers.Dense(1, name="b")(x)]
    made = keras.Model(inputs, outputs)
    made.compile("adam", loss=["mse", "mae"], metrics=[["mae"], ["mse"]], steps_per_execution=steps)
    return made

def dataset(kind):
    x, y = numbers(300, 20), numbers(300, 1, seed=1)
    examples = tf.data.Dataset.from_tensor_slices((x, (y, y))).shuffle(100, seed=1)
    if kind == "unknown length":
        examples = examples.filter(lambda x, y: True)
    return examples.batch(32)

same, calls = {}, {}
for steps, at, kind in [(1, 4, ""), (1, 8, ""), (3, 1, ""), (3, 3, "unknown length"), (1, 9, "unknown length")]:
    with_noise = train(model(steps), dataset(kind), at=at, steps=steps)
    plain = train(model(steps), dataset(kind), steps=steps)
    name = f"{steps} {at} {kind}"
    same[name] = with_noise[1:] == plain[1:]
    calls[name] = with_noise[0].not_measured
print(json.dumps([same, calls]))
""")
    same, not_measured = found
    assert all(same.values()), same
    few = "too few examples were left of the epoch"
    assert not_measured == {"1 4 ": "", "1 8 ": "", "3 1 ": "", "3 3 unknown length": few, "1 9 unknown length": few}


def test_the_noise_scale_of_a_regression_is_the_one_that_can_be_computed(run):
    # With examples of normal numbers, an error of 1 in the weights and label noise of variance 4 it is d + 1 + 4 d.
    found = run("""
x = numbers(4096, 20)
model = linear(kernel_initializer="zeros")
model.compile(keras.optimizers.SGD(0.0), loss="mse")
truth = np.full((20, 1), 20 ** -0.5, "float32")
y = x @ truth + 2.0 * numbers(4096, 1, seed=1)
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(512)
print(train(model, batches, at=1, epochs=1, batch_size=512)[0].model_dump_json())
""")
    scale = noise_scale(found["squares"], found["products"], found["examples"])
    assert found["examples"] == 64
    assert abs(scale.batch_size / (20 + 1 + 4 * 20) - 1) < 3 * scale.error < 1.0


def test_the_gradient_is_that_of_the_whole_loss_without_a_loss_scale(run):
    found = run("""
x, y, weight = numbers(300, 20), numbers(300, 1, seed=1), np.abs(numbers(300, seed=2))
def squares(optimizer):
    model = linear(kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5))
    model.compile(optimizer, loss="mse")
    batches = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(32)
    return train(model, batches, at=0, epochs=1)[0].squares
scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1024.0)
w, expected = np.ones((20, 1)), []
for start in range(0, 128, 4):
    part = slice(start, start + 4)
    errors = weight[part, None] * (x[part] @ w - y[part])
    expected.append(float(np.sum((2 / 4 * x[part].T @ errors + 2 * 0.5 * w) ** 2)))
print(json.dumps([expected, squares(keras.optimizers.SGD(0.0)), squares(scaled)]))
""")
    expected, plain, scaled = found
    assert len(expected) == 32
    assert plain == pytest.approx(expected, rel=1e-4)
    assert scaled == pytest.approx(expected, rel=1e-4)


def test_a_training_that_cannot_be_measured_says_why_and_goes_on(run):
    found = run("""
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
    def train_step(self, data):
        return super().train_step(data)

class OfFixedSize(keras.layers.Layer):
    def call(self, x):
        return x + tf.zeros((32, 1))

def compiled(model, **options):
    model.compile("sgd", loss="mse", **options)
    return model

x, y = numbers(320, 20), numbers(320, 1, seed=1)
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
cases = {
    "own step": [compiled(Own()), {}],
    "eager": [compiled(linear(), run_eagerly=True), {}],
    "slow": [compiled(linear()), {"step_seconds": 5.0, "seconds": 12.0}],
    "over": [compiled(linear()), {"seconds": 1e-9}],
    "of a fixed size": [compiled(keras.Sequential([linear(), OfFixedSize()])), {}],
}
found = {}
for name, (model, options) in cases.items():
    noise, _, _, calls = train(model, batches, at=1, epochs=1, **options)
    found[name] = [noise.not_measured, len(noise.squares), calls]
print(json.dumps(found))
""")
    assert {tuple(rest) for _, *rest in found.values()} == {(0, 10)}
    reasons = {name: why for name, (why, *_) in found.items()}
    assert reasons["own step"] == "the model has a train_step of its own"
    assert reasons["eager"] == "the model runs eagerly"
    assert reasons["slow"] == "it takes some 60.0 s, and may take 12.0 s"
    assert reasons["over"] == "TimeoutError: its time was over"
    assert "32" in reasons["of a fixed size"]


def test_a_trial_that_saves_its_state_tells_of_its_gradients(launch, tmp_path):
    ready = launch("learns", 32, save_state=str(tmp_path / "state.npz"), steps_per_execution=4).warm_up().ready
    assert ready.gradient_noise.not_measured == ""
    assert len(ready.gradient_noise.squares) == 32
    assert launch("learns", 32).warm_up().ready.gradient_noise is None
