"""Where the code of a training step uses the batch size as a constant, by its source."""

import textwrap
from pathlib import Path

import pytest

from autotune.data.facts import Site
from autotune.script.batch_dependence import find_batch_constant, find_summed_loss

TAPE = """
    N = 16
    data = source.batch(N)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = {loss}
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
"""


def found_in(folder: Path, source: str, losses: tuple[str, ...] = (), call: str = "batch") -> str:
    """What is found in a script whose batches have 16 examples."""
    file = folder / "train.py"
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    site = Site(file="train.py", function="<module>", call=call, order=0, line=3)
    return find_batch_constant([file], [site], 16, str(folder), losses)


@pytest.mark.parametrize(
    "loss",
    [
        "tf.reduce_sum(errors(x, y)) / 16",
        "tf.reduce_sum(errors(x, y)) * (1.0 / N)",
        "tf.nn.compute_average_loss(errors(x, y), global_batch_size=16)",
        "tf.nn.compute_average_loss(errors(x, y), global_batch_size=GLOBAL_BATCH_SIZE)",
        "errors(model(tf.random.normal([N, 100])), y)",
        "errors(x, y) / args.batch_size",
    ],
)
def test_a_batch_size_in_a_step_is_found_with_its_line(tmp_path, loss):
    found = found_in(tmp_path, TAPE.format(loss=loss))
    assert found == "train.py, line 8 computes with the batch size in a step of training"


@pytest.mark.parametrize(
    "loss", ["tf.reduce_mean(errors(x, y))", "tf.reduce_sum(errors(x / 255.0, y)) / tf.shape(x)[0]", "errors(x, y) / 2"]
)
def test_a_step_that_reads_the_batch_has_nothing(tmp_path, loss):
    assert found_in(tmp_path, TAPE.format(loss=loss)) == ""


def test_functions_that_a_step_calls_belong_to_it(tmp_path):
    source = (
        TAPE.format(loss="whole_loss(x, y)") + "\n    def whole_loss(x, y):\n        return tf.reduce_sum(x - y) / N\n"
    )
    assert found_in(tmp_path, source).startswith("train.py, line 12 ")
    other = TAPE.format(loss="errors(x, y)") + "\n    def steps():\n        return len(images) / N\n"
    assert found_in(tmp_path, other) == ""


def test_noise_before_the_tape_counts_as_step_and_print_does_not(tmp_path):
    loop = """
    N = 16
    data = source.batch(N)
    for i, x in enumerate(data):
        noise = {noise}
        with tf.GradientTape() as tape:
            loss = errors(x, noise)
        print("seen", (i + 1) * N, f"{{N}}")
        seen += N
    """
    assert found_in(tmp_path, loop.format(noise="tf.random.normal([N, 9])")).startswith("train.py, line 5 ")
    assert found_in(tmp_path, loop.format(noise="tf.random.normal([len(x), 9])")) == ""


def test_batch_size_read_from_the_batch_is_no_constant(tmp_path):
    source = """
    data = source.batch(16)
    def step(x):
        batch_size = tf.shape(x)[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x) / tf.cast(batch_size, tf.float32)
    """
    assert found_in(tmp_path, source) == ""


def test_size_read_from_the_batch_is_no_constant_when_passed_on(tmp_path):
    source = """
    class Gan(keras.Model):
        def penalty(self, batch_size, x):
            return tf.random.normal([batch_size, 1])
        def train_step(self, x):
            batch_size = {size}
            for i in range(3):
                with tf.GradientTape() as tape:
                    loss = self.penalty(batch_size, x)
    """
    assert found_in(tmp_path, source.format(size="tf.shape(x)[0]")) == ""
    assert found_in(tmp_path, source.format(size="args.batch_size")).startswith("train.py, line 9 ")


def test_step_of_fit_includes_the_loss_and_methods_keras_calls(tmp_path):
    source = """
    N = 16
    def own_loss(a, b):
        return tf.reduce_sum(a - b) / N
    model.fit(x, y, batch_size=N)
    """
    assert found_in(tmp_path, source, losses=("own_loss",), call="fit").startswith("train.py, line 4 ")
    assert found_in(tmp_path, source, call="fit") == "", "a function that is no loss"
    layer = """
    class Tokens(keras.layers.Layer):
        def call(self, x):
            return tf.reshape(x, (self.batch_size, -1))
    """
    assert found_in(tmp_path, layer).startswith("train.py, line 4 ")


@pytest.mark.parametrize(
    ("source", "is_fixed"),
    [
        ("x = keras.Input((4,), batch_size=16)", True),
        ("x = keras.Input(batch_shape=(16, 4))", True),
        ("x = keras.layers.LSTM(8, stateful=True)", True),
        ("x = keras.Input(batch_shape=(None, 4))", False),
        ("x = keras.layers.LSTM(8, stateful=False)", False),
        ("model.predict(x, batch_size=16)", False),
    ],
)
def test_a_model_for_one_batch_size_is_found(tmp_path, source, is_fixed):
    assert found_in(tmp_path, source) == ("train.py, line 1 builds the model for one batch size" if is_fixed else "")


@pytest.mark.parametrize(
    ("reduction", "sums"), [('"sum"', True), ("tf.keras.losses.Reduction.SUM", True), ('"none"', False)]
)
def test_a_loss_that_is_summed_is_found(tmp_path, reduction, sums):
    file = tmp_path / "train.py"
    file.write_text(f"loss = keras.losses.MeanSquaredError(reduction={reduction})\n", encoding="utf-8")
    assert find_summed_loss([file], str(tmp_path)) == ("train.py, line 1" if sums else "")
