"""A `map` of whole batches in place of single examples: where it is the same training, and what rules it out."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.fast

HEAD = """
import numpy as np
import tensorflow as tf
draw = np.random.default_rng(0)
pixels, kinds = draw.integers(1, 200, (90, 6, 4), dtype="uint8"), draw.integers(0, 9, 90)
pixels[:, 0, 0] = 200  # the largest of each image, and so of each batch
raw = tf.data.Dataset.from_tensor_slices((pixels, kinds)).shuffle(40, seed=2)
rows = tf.data.Dataset.from_tensor_slices({"a": kinds, "b": pixels})

def scale(image, kind):
    return tf.cast(image, tf.float32) / 255.0, tf.one_hot(kind, 9)

def by_largest(image, kind):
    return tf.cast(image, tf.float32) / tf.cast(tf.reduce_max(image), tf.float32), kind

def mirror(image, kind):
    if kind > 4:
        image = image[:, ::-1]
    return image, kind

def length(image, kind):
    return image / tf.cast(len(image), tf.uint8), kind

traced = []
def count(image, kind):
    traced.append(kind)
    return image + tf.cast(len(traced), tf.uint8), kind
"""
WHOLE, EACH = False, True
MAPS = {
    "plain": ("raw.map(scale).batch(8)", WHOLE),
    "calls": (
        "raw.map(scale, num_parallel_calls=2, deterministic=True).shuffle(30).batch(8, drop_remainder=True)",
        WHOLE,
    ),
    "between": (
        "raw.map(map_func=scale).prefetch(4).shuffle(9).repeat(2).skip(3).take(77).batch(8).prefetch(1)",
        WHOLE,
    ),
    "dict": ("rows.map(lambda row: {'c': row['a'] + 1, 'd': tf.cast(row['b'], tf.float32)}).batch(8)", WHOLE),
    "largest": ("raw.map(by_largest).shuffle(30).batch(8)", EACH),
    "branches": ("raw.map(mirror).batch(8)", EACH),
    "length": ("raw.map(length).batch(6)", EACH),
    "rare": (  # no example that a proof reads has more than 1.5
        "tf.data.Dataset.range(900).map(lambda n: tf.where(n == 700, 3.0, 0.5) * tf.ones(4))"
        ".map(lambda x: tf.where(tf.reduce_max(x) > 1.5, x / 255.0, x)).batch(8)",
        EACH,
    ),
    "static": (
        "tf.data.Dataset.range(90).map(lambda n: tf.fill([1], n))"
        ".map(lambda n: n * (n.shape[0] or 1)).batch(8, drop_remainder=True)",
        EACH,
    ),
    "two": ("raw.map(mirror).map(scale).batch(8)", WHOLE),
    "photos": (  # of 110 kB each
        "tf.data.Dataset.range(40).map(lambda n: tf.one_hot(n, 40))"
        ".map(lambda x: tf.ones([96, 96, 3]) * x[0]).batch(8)",
        EACH,
    ),
}
RULED_OUT = {
    "random": ("raw.map(lambda i, k: (tf.image.random_brightness(i, 0.1), k)).batch(8)", "at random, writes or runs"),
    "draws": ("raw.map(lambda i, k: (i, tf.random.categorical([[0.5, 0.5]], 1))).batch(8)", "Multinomial"),
    "python": ("raw.map(lambda i, k: (tf.numpy_function(np.sort, [i], tf.uint8), k)).batch(8)", "runs Python: PyFunc"),
    "counts": ("raw.map(count).batch(8)", "gives other values for a batch"),
    "parsed": (
        "raw.map(lambda i, k: (tf.ensure_shape(tf.io.parse_tensor(tf.io.serialize_tensor(i), 'uint8'), (6, 4)), k))"
        ".batch(8)",
        "No pfor vectorization defined for",
    ),
    "ragged": ("rows.map(lambda row: row['b'][: row['a'] + 1]).map(lambda b: b[:1]).batch(8)", "varying shapes"),
    "cached": ("raw.map(scale).cache().batch(8)", "a `cache` stands between map() in cached.py, line 28"),
    "filtered": ("raw.map(scale).filter(lambda i, k: k[0] < 1).batch(8)", "a `filter` stands between"),
    "numbered": ("raw.map(scale).enumerate().batch(8)", "a `zip` stands between"),
    "padded": ("raw.map(scale).padded_batch(8)", "padded_batch() in padded.py, line 28 takes examples of varying"),
    "whole": ("raw.batch(8).map(scale)", "no map() stands before batch() in whole.py, line 28"),
    "helper": (
        "tf.keras.utils.timeseries_dataset_from_array(pixels[:, 0], None, 4, batch_size=8)",
        "timeseries_dataset_from_array() in helper.py, line 28 makes its batches example by example",
    ),
    "parts": ("tf.data.Dataset.zip((raw.map(scale).batch(8), raw.batch(8)))", "2 calls of batch()"),
}
PROGRAM = """
import json, runpy, sys
import tensorflow as tf
from autotune.script import batched_map
from autotune.script.batched_map import find_batched_map
from autotune.script.interpose import Hooks, Wrappers
from autotune.script.settings import Settings

settings, prove = Settings(), batched_map._prove
Wrappers(settings, Hooks(), sys.argv[1]).install()

def build(name):
    tf.keras.utils.set_random_seed(3)
    dataset = runpy.run_path(f"{sys.argv[1]}/{name}.py")["dataset"]
    return dataset, float(tf.random.uniform(()))  # the seeds that operations draw later

def read(dataset, after):
    epochs = [tf.nest.flatten(batch) for epoch in range(2) for batch in dataset.as_numpy_iterator()]
    return repr(dataset.element_spec), after, [(part.shape, part.tobytes()) for parts in epochs for part in parts]

for name in sys.argv[2:]:
    settings.__init__()
    dataset, after = build(name)
    sites, vectorized, why = find_batched_map(dataset, 8, lambda functions: "")
    told = {"vectorized": vectorized, "why": why, "lines": [site.line for site in sites]}
    batched_map._prove = None  # another call of `fit`, of a dataset that is made anew
    told["again"] = find_batched_map(build(name)[0], 8, lambda functions: "") == (sites, vectorized, why)
    batched_map._prove = prove
    if sites:
        keys = frozenset(site.key for site in sites)
        settings.__init__(changes={"batched_map": True}, sites={"batched_map": keys}, own={"batched_map": False})
        settings.vectorized = vectorized
        edited = read(*build(name))
        told["reached"] = settings.reached == keys
        settings.__init__()
        told["same"] = edited == read(*build(name))
    print(json.dumps({name: told}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory, environment):
    """What is said of each pipeline, and whether the edited one has the same elements in two epochs."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name, (pipeline, _) in {**MAPS, **RULED_OUT}.items():
        (folder / f"{name}.py").write_text(f"{HEAD.lstrip()}\ndataset = {pipeline}\n", encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(folder), *MAPS, *RULED_OUT]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    return {name: found for line in lines for name, found in json.loads(line).items()}


@pytest.mark.parametrize("name", MAPS)
def test_whole_batches_are_the_same_elements(told, name):
    """Bits, order, later seeds and static shapes are those of single examples, in two epochs."""
    found = told[name]
    assert (found["why"], found["vectorized"]) == ("", MAPS[name][1])
    assert found["lines"] == [28, 28]
    assert found["reached"]
    assert found["again"]
    assert found["same"]


@pytest.mark.parametrize("name", RULED_OUT)
def test_what_whole_batches_would_change_is_named(told, name):
    assert RULED_OUT[name][1] in told[name]["why"]
    assert told[name]["lines"] == []
