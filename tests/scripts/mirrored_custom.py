import numpy as np
import tensorflow as tf

cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpus[0], [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
)
strategy = tf.distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BATCH_SIZE_PER_REPLICA = 32
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 8

rng = np.random.default_rng(21)
w = rng.normal(size=(32, 6))
features = rng.normal(size=(6400, 32)).astype("float32")
labels = np.argmax(features @ w + rng.normal(size=(6400, 6)), axis=1)

train_dataset = tf.data.Dataset.from_tensor_slices((features[:5120], labels[:5120]))
train_dataset = train_dataset.shuffle(5120).batch(GLOBAL_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices((features[5120:], labels[5120:])).batch(GLOBAL_BATCH_SIZE)

train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions):
        per_example_loss = loss_object(labels, predictions)
        return tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)

    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

    model = tf.keras.Sequential(
        [tf.keras.layers.Input(shape=(32,)), tf.keras.layers.Dense(128, activation="relu"), tf.keras.layers.Dense(6)]
    )
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.001)
    optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    x, y = inputs
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = compute_loss(y, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy.update_state(y, predictions)
    return loss


def test_step(inputs):
    x, y = inputs
    predictions = model(x, training=False)
    test_loss.update_state(loss_object(y, predictions))
    test_accuracy.update_state(y, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


for epoch in range(EPOCHS):
    total_loss, num_batches = 0.0, 0
    for batch in train_dist_dataset:
        total_loss += distributed_train_step(batch)
        num_batches += 1
    for batch in test_dist_dataset:
        distributed_test_step(batch)
    checkpoint.save("./training_checkpoints/ckpt")
    print(f"Epoch {epoch + 1}, Loss: {total_loss / num_batches:.4f}, Accuracy: {train_accuracy.result():.4f}")
    print(f"    Test Loss: {test_loss.result():.4f}, Test Accuracy: {test_accuracy.result():.4f}")
    for metric in [test_loss, train_accuracy, test_accuracy]:
        metric.reset_state()
