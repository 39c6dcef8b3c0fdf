"""Trainings of a script's own loop that branch from the baseline's state, in real trials and in a whole run."""

import re

import pytest
from real_trials import PATIENCE_SECONDS
from test_end_to_end import with_enough_time
from test_scripts_tuned import autotune

from autotune.recipe.recipe import Recipe
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import LoopBranch
from autotune.script.loop_branch import NO_LOSS

WINDOWS, EXAMPLES = 4, 4096
SPACE = """
schema_version = 1

[knobs.batch_size]
kind = "categorical"
choices = [32, 256]
"""
LOOP = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(7)
x = np.random.normal(size=(2048, 16)).astype("float32")
y = (np.tanh(x @ np.random.normal(size=(16, 4))).sum(1, keepdims=True)).astype("float32")
batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2048).batch(32)
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "relu"), keras.layers.BatchNormalization(),
                          keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, 100_000))
mean = keras.metrics.Mean()


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(images, training=True) - labels) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


for epoch in range(100):
    for images, labels in batches:
        mean(step(images, labels))
"""
SILENT = LOOP.replace("    return loss", "    mean(loss)").replace("mean(step(images, labels))", "step(images, labels)")
REMEMBERS = LOOP.replace("mean = ", "memory = tf.Variable(tf.zeros(next(iter(batches))[0].shape))\nmean = ")


@pytest.fixture
def branches(trials_of_script, tmp_path):
    """Trains the loop of a source from the state that its baseline has saved; returns the losses over windows."""
    state, opened = tmp_path / "state.npz", {}

    def train(source=LOOP, *, seed=0, scale=1.0, examples=EXAMPLES, **changes):
        if source not in opened:
            opened[source] = trials_of_script(source)
            saving = opened[source].launch(save_state=str(state))
            assert saving.warm_up(PATIENCE_SECONDS).ready.state_steps >= 10
            saving.kill()
        training = LoopBranch(
            state=str(state), seed=seed, scale=scale, first_examples=128, examples=examples, windows=WINDOWS
        )
        trial = opened[source].launch(losses=training, **changes)
        try:
            windows, first = trial.loss_curves(PATIENCE_SECONDS).curves
        finally:
            trial.kill()
        return windows, first[0]

    return train


@pytest.mark.slow
def test_losses_fall_on_from_the_baselines_state_by_seed_batch_size_and_learning_rate(branches):
    (own, first), (again, _), (other, _) = branches(), branches(), branches(seed=1)
    assert len(own) == WINDOWS
    assert again == pytest.approx(own, rel=1e-3)
    assert other != pytest.approx(own, rel=1e-3), "the script's own seed does not order all its trainings alike"
    assert max(own) < 3.0, "a fresh network would have a loss of about 4"
    frozen, first_of_frozen = branches(batch_size=128, scale=0.0)
    assert 0.5 < first_of_frozen / first < 2.0

    def falls(windows):
        return [still - loss for loss, still in zip(windows, frozen, strict=True)]

    larger, faster = branches(batch_size=128)[0], branches(batch_size=128, scale=4.0)[0]
    assert falls(own) == sorted(falls(own))
    assert 0 < falls(larger)[-1] < falls(own)[-1] < falls(faster)[-1]


@pytest.mark.slow
def test_a_training_that_cannot_branch_says_why(branches):
    with pytest.raises(TrialFailed, match=r"variable \d+ of the script has the shape \(128, 16\) .* \(32, 16\) in the"):
        branches(REMEMBERS, batch_size=128)


@pytest.mark.slow
def test_a_step_that_returns_no_loss_and_a_training_that_ends_say_so(branches):
    with pytest.raises(TrialFailed, match=NO_LOSS):
        branches(SILENT)


@pytest.mark.slow
def test_a_training_that_ends_too_soon_says_so(branches):
    with pytest.raises(TrialFailed, match=r"the script's training ended after \d+ of 100000 examples"):
        branches(LOOP.replace("for epoch in range(100):", "for epoch in (0, 1, 2):"), examples=100_000)


@pytest.mark.slow
def test_updates_are_scaled_and_the_script_keeps_its_own_learning_rate(run_code):
    run_code(
        """
        import keras
        import numpy as np
        import tensorflow as tf

        from autotune.recipe.learning_rate import scale_updates

        def moved(make, traced):
            weight, optimizer = tf.Variable([2.0]), make()
            update = lambda: optimizer.apply([tf.constant([1.0])], [weight])
            (tf.function(update) if traced else update)()
            return 2.0 - float(weight.numpy()[0]), float(optimizer.learning_rate)

        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        kinds = [
            lambda: keras.optimizers.SGD(0.1),
            lambda: keras.optimizers.SGD(schedule),
            lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1.0),
        ]
        before = [moved(make, traced) for make in kinds for traced in (False, True)]
        scale_updates(lambda: 3.0)
        after = [moved(make, traced) for make in kinds for traced in (False, True)]
        for (own, rate), (scaled, same_rate) in zip(before, after):
            assert np.isclose(scaled, 3.0 * own, rtol=1e-3), (own, scaled)
            assert rate == same_rate
        """
    )


@pytest.mark.slow
def test_trainings_are_scaled_one_within_another_with_xla_and_replicas(run_code):
    run_code(
        """
        import keras
        import numpy as np
        import tensorflow as tf

        from autotune.recipe.learning_rate import ScaledTrainings

        processor = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
        trainings, data = ScaledTrainings(), tf.data.Dataset.from_tensors((np.ones((4, 1)), np.zeros((4, 1))))

        def make(strategy, **compiled):
            with strategy.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
                model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
            return model

        def moved(model, factor, callbacks=()):
            model.set_weights([np.ones((1, 1))])
            with trainings.scaled(model, factor):
                model.fit(data, verbose=0, callbacks=list(callbacks))
            assert np.isclose(float(model.optimizer.learning_rate.numpy()), 0.1)
            return 1.0 - model.get_weights()[0].item()

        mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        for strategy, jit in ((tf.distribute.get_strategy(), True), (mirrored, False)):
            model, inner = make(strategy, jit_compile=jit), make(strategy, jit_compile=jit)
            found = []
            within = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: found.append(moved(inner, 1.0)))
            assert np.isclose(moved(model, 1.0), 0.2), "as the script has it"
            assert np.isclose(moved(model, 3.0, [within]), 0.6), "traced before"
            assert np.isclose(found[0], 0.2), "trained within a callback"
            assert np.isclose(moved(model, 2.0), 0.4), "another batch size"
            assert np.isclose(moved(model, 1.0), 0.2), "outside of the tuned call"
        """
    )


@pytest.mark.slow
def test_a_larger_batch_of_a_loop_is_compared_and_its_recipe_trains_with_the_tested_learning_rate(tmp_path):
    source = LOOP.replace("range(100)", "range(2)").replace("CosineDecay(1e-3", "CosineDecay(2e-4")  # still learns fast
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    (tmp_path / "space.toml").write_text(SPACE, encoding="utf-8")

    def tune(budget):
        options = ("--space", "space.toml", "--out", f"run-{budget}", "--budget", f"{budget}s")
        return autotune(tmp_path, "tune", "train.py", *options)

    short = re.compile("how it learns was not measured: .* kept for it")
    tuned = with_enough_time(tune, 240, enough=lambda ended: not short.search(ended.stdout))
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    path = max(tmp_path.glob("run-*/recipe.json"), key=lambda file: file.stat().st_mtime)
    recipe = Recipe.load(path)
    rule = recipe.larger_batch.learning_rate_rule
    assert rule.same_loss is not None, tuned.stdout
    assert set(rule.same_loss.by_rule) >= {"as is", "sqrt"}
    assert rule.same_loss.seeds >= 5
    assert 0.5 < rule.same_loss.examples_factor.value < 8
    assert dict(recipe.answers)[""].startswith("the training losses of the ")
    run = autotune(tmp_path, "run", str(path), "--larger-batch", "train.py")
    assert run.returncode == 0, run.stderr
    assert ("as tested, for batches of 256 instead of 32" in run.stderr) == (rule.rule != "as is")
