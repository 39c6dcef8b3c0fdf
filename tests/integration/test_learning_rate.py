"""Updates of optimizers and trainings by `fit`, scaled in real processes."""


def test_updates_are_scaled_and_the_script_sees_its_own_rate(run_code):
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


def test_nested_trainings_are_scaled_with_xla_and_replicas(run_code):
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
