import argparse
import os

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

AUTO = tf.data.AUTOTUNE


def _bytes_feature(value):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def _int64_feature(value):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def write_tfrecords(images, labels, data_dir, prefix, num_shards):
    os.makedirs(data_dir, exist_ok=True)
    for shard in range(num_shards):
        path = os.path.join(data_dir, f"{prefix}-{shard:05d}-of-{num_shards:05d}.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for image, label in zip(images[shard::num_shards], labels[shard::num_shards]):
                png = tf.io.encode_png(image).numpy()
                feature = {"image": _bytes_feature(png), "label": _int64_feature(int(label))}
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())


def parse_example(serialized):
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_single_example(serialized, features)
    image = tf.io.decode_png(example["image"], channels=1)
    image = tf.cast(tf.reshape(image, (8, 8, 1)), tf.float32) / 255.0
    return image, example["label"]


def get_dataset(pattern, batch_size, training):
    files = tf.data.Dataset.list_files(pattern, shuffle=training)
    ds = files.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=AUTO, deterministic=not training)
    if training:
        ds = ds.shuffle(1024)
    ds = ds.map(parse_example, num_parallel_calls=AUTO)
    return ds.batch(batch_size, drop_remainder=training).prefetch(AUTO)


def main(args):
    tf.keras.utils.set_random_seed(args.seed)
    digits = load_digits()
    images = (digits.images[..., np.newaxis] * 15.9).astype(np.uint8)
    write_tfrecords(images[:1500], digits.target[:1500], args.data_dir, "train", num_shards=8)
    write_tfrecords(images[1500:], digits.target[1500:], args.data_dir, "val", num_shards=2)

    train_ds = get_dataset(os.path.join(args.data_dir, "train-*.tfrecord"), args.batch_size, training=True)
    val_ds = get_dataset(os.path.join(args.data_dir, "val-*.tfrecord"), args.batch_size, training=False)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(64, 3, activation="relu", padding="same"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(train_ds, validation_data=val_ds, epochs=args.epochs)
    loss, acc = model.evaluate(val_ds, verbose=0)
    print(f"Validation loss {loss:.4f}, accuracy {acc:.4f}")
    model.save(args.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", default="data/tfrecords")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="tfrecord_model.keras")
    main(parser.parse_args())
