"""Two-tower retrieval in the style of TensorFlow Recommenders: queries and candidates of a batch against each other."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf

USERS, MOVIES, DIM = 400, 300, 32

rng = np.random.default_rng(3)
taste, style = rng.normal(size=(USERS, 4)), rng.normal(size=(MOVIES, 4))
users = rng.integers(0, USERS, size=20000)
scores = taste[users] @ style.T + rng.gumbel(size=(20000, MOVIES))
interactions = {
    "user_id": np.array([f"u{user}" for user in users]),
    "movie_id": np.array([f"m{movie}" for movie in scores.argmax(axis=1)]),
}
ratings = tf.data.Dataset.from_tensor_slices(interactions).shuffle(20000, seed=3, reshuffle_each_iteration=True)
train = ratings.take(16000).batch(256).cache()
test = ratings.skip(16000).batch(256).cache()


def tower(prefix, size):
    return tf.keras.Sequential(
        [
            tf.keras.layers.StringLookup(vocabulary=[f"{prefix}{i}" for i in range(size)], mask_token=None),
            tf.keras.layers.Embedding(size + 1, DIM),
            tf.keras.layers.Dense(DIM),
        ]
    )


class TwoTowerModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.query_model, self.candidate_model = tower("u", USERS), tower("m", MOVIES)
        self.loss_function = tf.keras.losses.CategoricalCrossentropy(
            from_logits=True, reduction=tf.keras.losses.Reduction.SUM
        )
        self.loss_metric = tf.keras.metrics.Mean(name="loss")

    def compute_loss(self, features, training=False):
        queries = self.query_model(features["user_id"], training=training)
        candidates = self.candidate_model(features["movie_id"], training=training)
        logits = tf.linalg.matmul(queries, candidates, transpose_b=True)
        return self.loss_function(tf.eye(tf.shape(logits)[0]), logits)

    def train_step(self, features):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(features, training=True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}

    def test_step(self, features):
        self.loss_metric.update_state(self.compute_loss(features))
        return {"loss": self.loss_metric.result()}

    @property
    def metrics(self):
        return [self.loss_metric]


model = TwoTowerModel()
model.compile(optimizer=tf.keras.optimizers.Adagrad(0.1))
model.fit(train, validation_data=test, epochs=6, verbose=2)
print(model.evaluate(test, return_dict=True, verbose=0))
