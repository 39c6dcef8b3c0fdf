"""Train a BERT-mini classifier (4 layers, 256 wide, 4 heads) on pairs of sentences, given as token ids."""

import argparse
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf

VOCAB_SIZE, CLS, SEP = 30522, 101, 102


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--train_batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--num_examples", type=int, default=8000)
    return parser.parse_args()


def make_features(count, length, seed=11):
    """The second sentence of a positive pair repeats tokens of the first."""
    rng = np.random.default_rng(seed)
    half = length // 2
    first, second = (1000 + np.minimum(rng.zipf(1.3, (count, half)), VOCAB_SIZE - 1001) for _ in range(2))
    labels = rng.integers(0, 2, count)
    repeated = (rng.random((count, half)) < 0.3) & (labels[:, None] == 1)
    input_ids = np.concatenate([first, np.where(repeated, first, second)], axis=1).astype("int32")
    input_ids[:, 0], input_ids[:, half] = CLS, SEP
    mask = np.arange(length)[None] < rng.integers(half + 8, length + 1, count)[:, None]
    segments = np.broadcast_to(np.arange(length) >= half, mask.shape)
    names = ("input_ids", "input_mask", "segment_ids")
    return dict(zip(names, (input_ids * mask, mask.astype("int32"), segments.astype("int32")))), labels


class EncoderLayer(tf.keras.layers.Layer):
    def __init__(self, hidden_size=256, num_heads=4, intermediate_size=1024, dropout=0.1):
        super().__init__()
        self.attention = tf.keras.layers.MultiHeadAttention(num_heads, hidden_size // num_heads, dropout=dropout)
        self.intermediate = tf.keras.layers.Dense(intermediate_size, activation="gelu")
        self.output_dense = tf.keras.layers.Dense(hidden_size)
        self.norms = [tf.keras.layers.LayerNormalization(epsilon=1e-12) for _ in range(2)]
        self.dropout = tf.keras.layers.Dropout(dropout)

    def call(self, x, attention_mask=None, training=False):
        attended = self.attention(x, x, attention_mask=attention_mask, training=training)
        x = self.norms[0](x + self.dropout(attended, training=training))
        return self.norms[1](x + self.dropout(self.output_dense(self.intermediate(x)), training=training))


class BertClassifier(tf.keras.Model):
    def __init__(self, length, hidden_size=256, num_layers=4, num_labels=2):
        super().__init__()
        self.words = tf.keras.layers.Embedding(VOCAB_SIZE, hidden_size)
        self.positions = tf.keras.layers.Embedding(length, hidden_size)
        self.segments = tf.keras.layers.Embedding(2, hidden_size)
        self.norm = tf.keras.layers.LayerNormalization(epsilon=1e-12)
        self.encoder = [EncoderLayer(hidden_size) for _ in range(num_layers)]
        self.pooler = tf.keras.layers.Dense(hidden_size, activation="tanh")
        self.classifier = tf.keras.layers.Dense(num_labels, dtype="float32")

    def call(self, inputs, training=False):
        ids = inputs["input_ids"]
        x = self.words(ids) + self.positions(tf.range(tf.shape(ids)[1])) + self.segments(inputs["segment_ids"])
        x = self.norm(x)
        mask = tf.cast(inputs["input_mask"], tf.bool)[:, None, :]
        for layer in self.encoder:
            x = layer(x, attention_mask=mask, training=training)
        return self.classifier(self.pooler(x[:, 0]))


def main():
    args = parse_args()
    features, labels = make_features(args.num_examples, args.max_seq_length)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    eval_ds = dataset.take(800).batch(args.train_batch_size)
    train_ds = dataset.skip(800).shuffle(2000).repeat().batch(args.train_batch_size, drop_remainder=True)

    steps_per_epoch = (args.num_examples - 800) // args.train_batch_size
    total = steps_per_epoch * args.num_train_epochs
    schedule = tf.keras.optimizers.schedules.PolynomialDecay(args.learning_rate, total, end_learning_rate=0.0)
    model = BertClassifier(args.max_seq_length)
    model.compile(
        optimizer=tf.keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train_ds, epochs=args.num_train_epochs, steps_per_epoch=steps_per_epoch, validation_data=eval_ds)


if __name__ == "__main__":
    main()
