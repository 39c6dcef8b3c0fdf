import argparse
import os

import numpy as np
import tensorflow as tf


def get_strategy(num_devices):
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1:
        return tf.distribute.MirroredStrategy()
    # No GPUs here, try it out on virtual CPU devices
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
    return tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(num_devices)])


def make_data(n, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, size=n)
    prototypes = np.random.default_rng(99).random((10, 14, 14, 1))
    x = prototypes[y] + rng.normal(scale=0.7, size=(n, 14, 14, 1))
    return x.astype("float32"), y


def build_and_compile_model(learning_rate):
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(14, 14, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate),
        metrics=["accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_devices", type=int, default=2)
    parser.add_argument("--batch_size_per_replica", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint_dir", default="./training_checkpoints")
    args = parser.parse_args()

    strategy = get_strategy(args.num_devices)
    print("Number of devices: {}".format(strategy.num_replicas_in_sync))
    tf.random.set_seed(11)

    batch_size = args.batch_size_per_replica * strategy.num_replicas_in_sync
    train_dataset = tf.data.Dataset.from_tensor_slices(make_data(4000)).cache().shuffle(4000).batch(batch_size)
    eval_dataset = tf.data.Dataset.from_tensor_slices(make_data(800, seed=1)).batch(batch_size)

    with strategy.scope():
        model = build_and_compile_model(args.lr)

    def decay(epoch, lr):
        return args.lr if epoch < 3 else args.lr / 10

    callbacks = [
        tf.keras.callbacks.ModelCheckpoint(
            filepath=os.path.join(args.checkpoint_dir, "ckpt_{epoch}.weights.h5"), save_weights_only=True
        ),
        tf.keras.callbacks.LearningRateScheduler(decay),
    ]
    model.fit(train_dataset, epochs=args.epochs, callbacks=callbacks)

    eval_loss, eval_acc = model.evaluate(eval_dataset)
    print("Eval loss: {}, Eval accuracy: {}".format(eval_loss, eval_acc))


if __name__ == "__main__":
    main()
