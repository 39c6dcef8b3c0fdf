"""What running a script once shows: how it trains, what it leaves, what a knob reaches, and why one cannot be tuned."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from real_trials import survey_all

from autotune.data.facts import NO_XLA, ScriptFacts
from autotune.tuning.notices import script_notes

MODEL = """
import keras
import numpy as np
import tensorflow as tf

x, y = np.zeros((96, 4), "float32"), np.zeros((96, 1), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
"""
COMPILED = MODEL + 'model.compile("sgd", "mse")\n'
TAPE = (
    MODEL
    + """
optimizer = keras.optimizers.SGD(0.01)

def step(images, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(images) - labels) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss

batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96).batch(16)
"""
)

SLOW = """
import time

passed, usual = [0.0], time.perf_counter
time.perf_counter = lambda: usual() + passed[0]  # as if what follows each fit took seconds
"""

SCRIPTS = {
    "arrays": COMPILED + "model.fit(x, y, batch_size=16, epochs=3, validation_split=0.25)\n",
    "arrays_by_default": COMPILED + "model.fit(x, y)\n",
    "pipeline": COMPILED
    + """
def batches(data, size):
    return data.map(lambda a, b: (a, b), num_parallel_calls=2).shuffle(9).batch(size).prefetch(tf.data.AUTOTUNE)

model.fit(batches(tf.data.Dataset.from_tensor_slices((x, y)), 8), validation_data=batches(
    tf.data.Dataset.from_tensor_slices((x, y)), 32), epochs=2)
""",
    "centred": COMPILED
    + """
level = [0]
def centre(a, b):
    return (a - tf.reduce_mean(a) if level[0] else a), b
for level[0] in range(3):
    model.fit(tf.data.Dataset.from_tensor_slices((x, y)).map(centre).batch(8))
""",
    "cacheable": COMPILED
    + """
data = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda a, b: (a / 255.0, b))
data = data.map(lambda a, b: (tf.image.random_crop(a, (4,)), b))
model.fit(data.shuffle(9).batch(8))
""",
    "cached": COMPILED
    + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).map(lambda a, b: (a, b)).cache().batch(8))\n",
    "truncated": COMPILED + "data = tf.data.Dataset.from_tensor_slices((x, y))\n"
    "model.fit(data.map(lambda a, b: (a + tf.random.truncated_normal((4,)), b)).batch(8))\n",
    "uncounted": COMPILED
    + "data = tf.data.Dataset.range(9**17).filter(lambda n: n >= 0).map(lambda n: (x[0], y[0])).batch(8)\n"
    "model.fit(data, steps_per_epoch=9)\n",
    "counts_batches": COMPILED + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8).take(3))\n",
    "shards_batches": COMPILED + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8).shard(2, 0))\n",
    "windows_batches": COMPILED
    + """
windows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).window(2)
model.fit(windows.flat_map(lambda a, b: tf.data.Dataset.zip((a, b))))
""",
    "enumerates_batches": COMPILED
    + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8).enumerate().map(lambda _, pair: pair))\n",
    "zips_batches": COMPILED
    + """
parts = [tf.data.Dataset.from_tensor_slices(part).batch(8) for part in (x, y)]
model.fit(tf.data.Dataset.zip(tuple(parts)))
""",
    "takes_examples": COMPILED + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).take(64).batch(8))\n",
    "steps_of_data": COMPILED
    + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8), steps_per_epoch=12)\n",
    "steps_of_its_own": COMPILED
    + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8), steps_per_epoch=5)\n",
    "policy": "import keras\nkeras.mixed_precision.set_global_policy('mixed_bfloat16')\n"
    + COMPILED
    + "tf.config.threading\nmodel.fit(x, y)\n",
    "policy_object": "import keras\nkeras.config.set_dtype_policy(keras.DTypePolicy('mixed_float16'))\n"
    + COMPILED
    + "model.fit(x, y)\n",
    "floatx": "from keras.config import set_floatx\nset_floatx('float64')\n" + COMPILED + "model.fit(x, y)\n",
    "floatx_allowed": "import keras\nkeras.backend.set_floatx('float16')\n" + COMPILED + "model.fit(x, y)\n",
    "layers_in_float64": COMPILED.replace("layers.Dense(1)", "layers.Dense(1, dtype='float64', name='wide')")
    + "model.fit(x, y)\n",
    "last_layer_in_float32": "import keras\nkeras.config.set_floatx('float32')\n"
    + COMPILED.replace("layers.Dense(1)", "layers.Dense(1, dtype='float32')")
    + "model.fit(x, y)\n",
    "loop_in_float64": TAPE.replace("layers.Dense(1)", "layers.Dense(1, dtype='float64', name='wide')").replace(
        "- labels", "- tf.cast(labels, 'float64')"
    )
    + "step = tf.function(step)\nfor epoch in range(4):\n    for a, b in batches:\n        step(a, b)\n",
    "two_fits": COMPILED + "model.fit(x, y, epochs=2)\nmodel.fit(x, y, epochs=50)\nmodel.fit(x, y, epochs=3)\n",
    "wrong_fit": COMPILED + "model.fit(x, y)\nmodel.fit(x, y)\n",
    "callbacks": COMPILED
    + """
model.fit(x, y, callbacks=[keras.callbacks.ModelCheckpoint("a.keras"), keras.callbacks.EarlyStopping("loss")])
""",
    "saves_before": COMPILED + "model.save('first.keras')\nmodel.fit(x, y)\n",
    "overwrites": """
import logging
import pathlib
pathlib.Path("kept.txt").write_text("16")
logging.basicConfig(filename="train.log", level="INFO")
logging.info("begins")
"""
    + COMPILED
    + "model.fit(x, y, batch_size=int(open('kept.txt').read()))\n",
    "removes": "import shutil\nshutil.rmtree('out')\n" + COMPILED + "model.fit(x, y)\n",
    "threads_by_name": "import tensorflow as tf\n"
    "tf.config.threading.set_intra_op_parallelism_threads(num_threads=2)\n" + COMPILED + "model.fit(x, y)\n",
    "forks_before": "import multiprocessing, time\n"
    "p = multiprocessing.get_context('fork').Process(target=time.sleep, args=(10**6,), daemon=True)\np.start()\n"
    + COMPILED
    + "model.fit(x, y)\n",
    "folds": COMPILED + "for fold in range(4):\n    model.fit(x, y, epochs=2)\nmodel.fit(x, y, epochs=3)\n",
    "slow_folds": COMPILED + SLOW + "for fold in range(4):\n    model.fit(x, y, epochs=2)\n    passed[0] += 5\n",
    "slow_folds_of_the_last": COMPILED
    + SLOW
    + "def train(epochs):\n    model.fit(x, y, epochs=epochs)\n    passed[0] += 30\n\n"
    + "model.fit(x, y)\nfor fold in range(4):\n    train(2000)\n",
    "slow_folds_then_all": COMPILED
    + SLOW
    + "for fold in range(4):\n    model.fit(x, y, epochs=2)\n    passed[0] += 5\nmodel.fit(x, y, epochs=9000)\n",
    "partial": TAPE
    + "import functools\nstep = tf.function(functools.partial(step))\n"
    + "for epoch in [e for e in range(4)]:\n    for a, b in batches:\n        step(a, b)\n",
    "helper_for_both": TAPE
    + """
step = tf.function(step)
held_out = tf.data.Dataset.from_tensor_slices((x, y)).batch(48)

def run_epoch(data, train):
    for a, b in data:
        step(a, b) if train else model(a)

for epoch in range(4):
    run_epoch(held_out, False)
    run_epoch(batches, True)
""",
    "repeated": COMPILED + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat(2))\n",
    "validates_some": COMPILED
    + "data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)\n"
    + "model.fit(data, validation_data=data.repeat(), validation_steps=2)\n",
    "validates_for_ever": COMPILED
    + "data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)\nmodel.fit(data, validation_data=data.repeat())\n",
    "raises": COMPILED + "raise ValueError('no such column: é')\n",
    "exits": "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()\n",
    "asks": "name = input('which model? ')\n" + COMPILED + "model.fit(x, y)\n",
    "never_trains": COMPILED + "print(model.predict(x, verbose=0).shape)\n",
    "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "arguments": "import sys\nassert sys.argv == ['train.py', '--size', '4'], sys.argv\n"
    + COMPILED
    + "model.fit(x, y, batch_size=int(sys.argv[2]))\n",
    "prints_much": "for _ in range(20000):\n    print('x' * 200)\n" + COMPILED + "model.fit(x, y)\n",
    "schedule": MODEL
    + "model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100)), 'mse')\nmodel.fit(x, y)\n",
    "tape": TAPE + "step = tf.function(step)\nfor epoch in range(4):\n    for a, b in batches:\n        step(a, b)\n",
    "tape_eager": TAPE + "for epoch in range(4):\n    for a, b in batches:\n        step(a, b)\n",
    "step_in_its_loop": TAPE
    + """
for epoch in range(4):
    for a, b in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(a) - b) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
""",
    "predicts": TAPE
    + """
step = tf.function(step)
same = tf.function(operator.neg)
for epoch in range(4):
    for number, (a, b) in enumerate(batches):
        step(a, b)
        model.predict(same(a), verbose=0)
        if number == 1:
            model.predict(a, verbose=0), model.predict(a, verbose=0)
""".replace("step =", "import operator\nstep =", 1),
    "tape_with_test_loop": TAPE
    + """
step = tf.function(step)
held_out = tf.data.Dataset.from_tensor_slices((x, y)).batch(48)
for epoch in range(4):
    for a, b in held_out:
        model(a)
    for a, b in batches:
        step(a, b)
""",
    "explicit": MODEL
    + """
import autotune
weight = tf.Variable(1.0)
for epoch in range(4):
    for a, b in autotune.steps(tf.data.Dataset.from_tensor_slices((x, y)).batch(12)):
        weight.assign_sub(0.1)
""",
    "parameter_server": "import tensorflow as tf\ntf.distribute.ParameterServerStrategy(None)\n",
    "looks_for_a_tpu": """
import tensorflow as tf

TPUClusterResolver = tf.distribute.cluster_resolver.TPUClusterResolver

def connect(tpu):
    resolver = TPUClusterResolver.connect(tpu)
    return tf.distribute.TPUStrategy(resolver)

def initialise(tpu):
    resolver = TPUClusterResolver(tpu=tpu)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.experimental.TPUStrategy(resolver)

strategy = tf.distribute.get_strategy()
for find, tpu in [(connect, None), (connect, ""), (initialise, "local"), (tf.distribute.TPUStrategy, None)]:
    try:
        strategy = find(tpu)
    except:
        print("no", tpu)
assert not tf.config.list_logical_devices("TPU")
with strategy.scope():
"""
    + COMPILED.replace("\n", "\n    ")
    + "\nmodel.fit(x, y, batch_size=24 * strategy.num_replicas_in_sync)\n",
    "of_keras": "import keras\nkeras.distribution.DataParallel(devices=['cpu:0'])\n",
    "mirrored": """
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
"""
    + COMPILED.replace("\n", "\n    ")
    + "\nmodel.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))\n",
    "session": "import tensorflow as tf\nwith tf.Graph().as_default():\n    tf.compat.v1.Session()\n",
    "on_batch": COMPILED + "for i in range(50):\n    model.train_on_batch(x[:24], y[:24])\n",
    "by_iterator": TAPE
    + """
@tf.function
def read_and_step(iterator):
    step(*next(iterator))

iterator = iter(batches.repeat())
for i in range(50):
    read_and_step(iterator)
""",
    "no_arguments": TAPE
    + """
fixed = tf.constant(x[:40])

@tf.function
def train():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(fixed) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss

for i in range(50):
    train()
""",
    "epoch_inside": TAPE
    + """
@tf.function
def train_epoch(data):
    for a, b in data:
        step(a, b)

for epoch in range(4):
    train_epoch(batches)
""",
    "distributed_epoch_inside": """
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0"])
with strategy.scope():
"""
    + TAPE.replace("\n", "\n    ")
    + """
data = strategy.experimental_distribute_dataset(batches)

@tf.function
def train_epoch():
    for element in data:
        strategy.run(step, args=element)

for epoch in range(4):
    train_epoch()
""",
    "by_iterator_of_few": TAPE
    + """
@tf.function
def read_and_step(iterator):
    step(*next(iterator))

iterator = iter(batches.take(4).repeat())
for i in range(50):
    read_and_step(iterator)
""",
    "numpy_slices": TAPE + "for i in range(50):\n    step(x[:12], y[:12])\n",
    "tuned": "import autotune\nsize = autotune.tuned(batch_size=8).batch_size\n"
    + COMPILED
    + "model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(size).take(96 // size))\n",
    "sequence": COMPILED
    + """
class Batches(keras.utils.PyDataset):
    def __init__(self, batch_size, **more):
        super().__init__(**more)
        self.batch_size = batch_size
    def __len__(self):
        return len(x) // self.batch_size
    def __getitem__(self, index):
        part = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return x[part], y[part]

model.fit(Batches(10, workers=2, max_queue_size=5))
""",
    "sequence_of_fixed_size": COMPILED
    + """
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return x[:8], y[:8]

model.fit(Batches())
""",
}
IN_CHILD = """
import multiprocessing
import keras
import numpy as np

def train(queue):
    x = np.zeros((96, 4), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1])
    queue.put("trained")

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    queue = context.SimpleQueue()
    context.Process(target=train, args=(queue,)).start()
    print(queue.get())
    open("{method}.txt", "w")
"""
SCRIPTS["trains_in_fork"] = IN_CHILD.format(method="fork")
SCRIPTS["trains_in_spawned"] = IN_CHILD.format(method="spawn")
HASHED = """
import os, subprocess, sys

seeded = {{**os.environ, "PYTHONHASHSEED": "7"}}
if os.environ.get("PYTHONHASHSEED") != "7":
    {again}
"""
for name, again in (
    ("replaced", "os.environ['PYTHONHASHSEED'] = '7'; os.execv(sys.executable, [sys.executable] + sys.argv)"),
    ("replaced_by_path", "os.execvpe('python', ['python', os.path.abspath(__file__), '--deep', 'a b'], seeded)"),
    ("replaced_by_another", "os.execlp('env', 'env', 'PYTHONHASHSEED=7', 'nice', 'other.py')"),
    ("run_again", "sys.exit(subprocess.run([sys.executable, *sys.argv, '--deep'], env=seeded).returncode)"),
):
    SCRIPTS[name] = HASHED.format(again=again) + COMPILED + "model.fit(x, y)\nopen('done.txt', 'w')\n"
SCRIPTS["episodes"] = (
    MODEL
    + """
optimizer = keras.optimizers.SGD(0.01)
for episode in range(100):
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(model(x[:2]) ** 2) for t in range(3 + episode)])
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
"""
)
SCRIPTS["episodes_by_predict"] = (
    COMPILED
    + """
for episode in range(100):
    for t in range(3 + episode):
        model.predict(x[:2], verbose=0)
    model.train_on_batch(x[:8], y[:8])
"""
)
SCRIPTS["draws"] = (
    "import sys\nsys.modules['pydot'] = None\n"
    + COMPILED
    + "keras.utils.plot_model(model, 'model.png')\nmodel.fit(x, y)\n"
)
SCRIPTS["misses_a_package"] = (
    COMPILED.replace(
        "keras.Sequential([",
        "type('Own', (keras.Sequential,), {'train_step': lambda *_: __import__('no_such_package')})([",
    )
    + "model.fit(x, y)\nmodel.fit(x, y)\n"
)
SCRIPTS["forks_itself"] = (
    "import os\nif os.fork() == 0:\n    raise SystemExit(0)\nos.wait()\n" + COMPILED + "model.fit(x, y)\n"
)
SCRIPTS["sets_variables"] = (
    'import os\nos.environ["TF_GPU_THREAD_MODE"] = "gpu_private"\n'
    + COMPILED
    + 'os.environ["XLA_FLAGS"] = "--xla_dump_to="\nmodel.fit(x, y)\n'
)
SCRIPTS["mirrored_with_xla"] = MODEL.replace(
    "model = ", "with tf.distribute.MirroredStrategy(['CPU:0']).scope():\n    model = "
) + ('model.compile("sgd", "mse", jit_compile=True)\nmodel.fit(x, y)\n')
SETTINGS: dict[str, dict[str, Any]] = {
    "run_again": {"allow_writes": True},  # otherwise the program that it starts is refused where nothing is contained
    "arguments": {"args": ["--size", "4"]},
    "wrong_fit": {"fit": 3},
    "floatx_allowed": {"allow_precision": True},
}
STATE = (
    COMPILED
    + """
data = tf.data.Dataset.from_tensor_slices((x, y))
spec = tf.TensorSpec((4,)), tf.TensorSpec((1,))
rate, table = tf.Variable(1.0), tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
table.insert([1], [2.0])
rng, names = tf.random.Generator.from_seed(1), keras.layers.StringLookup()
names.adapt(["a"])
flip, teacher, level, queue = keras.layers.RandomFlip(), keras.Sequential([keras.layers.Dense(4)]), 0, []

def act(*actions):
    return [keras.callbacks.LambdaCallback(on_epoch_end=action) for action in actions]

def rise(epoch, logs):
    global level
    level += 1

class Examples:
    def __init__(self):
        self.hardness, self.order = 0, np.arange(96)
    def __call__(self):
        np.random.shuffle(self.order)
        for index in self.order:
            yield self.images()[index], y[index]
    def images(self):
        return x + self.hardness
    def harden(self, epoch):
        self.hardness = epoch

def generated(function, size=8):
    return tf.data.Dataset.from_generator(function, output_signature=spec).batch(size)

def leveled():
    for images, labels in zip(x, y):
        yield images + level, labels

def count_queue(images):
    return images + len(queue)

class Batches(keras.utils.PyDataset):
    size, shown = 8, None
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return x[:8] * self.size, y[:8]
    def on_epoch_end(self):
        self.size = np.random.randint(9)

class Timed(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.seen = batch

source = Examples()
"""
)
STATES = {  # the function that reads state, and what
    "variable": (
        "model.fit(data.map(lambda a, b: (a * rate, b)).batch(8), callbacks=act(lambda *_: rate.assign(2.0)))",
        "a variable or lookup table",
    ),
    "table": (
        "model.fit(data.map(lambda a, b: (a * table.lookup(tf.constant(1, tf.int64)), b)).batch(8),"
        " callbacks=act(lambda *_: table.insert([1], [3.0])))",
        "a variable or lookup table",
    ),
    "optimizer": (
        "model.fit(data.map(lambda a, b: (a + tf.cast(model.optimizer.iterations, 'float32'), b)).batch(8))",
        "a variable or lookup table",
    ),
    "teacher": (
        "model.fit(data.batch(8).map(lambda a, b: (teacher(a), b)),"
        " callbacks=act(lambda *_: teacher.set_weights(teacher.get_weights())))",
        "a variable or lookup table",
    ),
    "attribute": (
        "model.fit(generated(lambda: source()), callbacks=act(lambda epoch, _: source.harden(epoch)))",
        "hardness",
    ),
    "global_name": ("model.fit(generated(leveled), callbacks=act(rise))", "level"),
    "list": (
        "model.fit(data.batch(8).map(lambda a, b: (tf.ensure_shape(tf.py_function(count_queue, [a], tf.float32),"
        " (None, 4)), b)), callbacks=act(lambda epoch, _: queue.append(epoch)))",
        "queue",
    ),
    "sequence": (
        "batches = Batches()\n"
        "def shrink(epoch, logs):\n    batches.size -= 1\n"
        "model.fit(batches, callbacks=act(shrink))",
        "size",
    ),
    "loaded": (
        "class Loaded(Batches):\n    def __init__(self):\n        super().__init__()\n        self._load()\n"
        "    def _load(self):\n        self.size = 3\nmodel.fit(Loaded(), callbacks=[Timed()])",
        "",
    ),
    "shuffled": ("model.fit(Batches(), callbacks=[Timed()])", ""),
    "prepared": (
        "def load():\n    extra = np.zeros(96)\n    extra[0] = 1.0\n    return extra\n"
        "extra, rows = load(), []\nfor row in x:\n    rows.append(row)\n"
        "def read():\n    for row in rows:\n        yield row + extra[0], y[0]\n"
        "model.fit(generated(read), callbacks=[Timed()])",
        "",
    ),
    "generator": ("del Examples.harden\nmodel.fit(generated(lambda: zip(x, y)), callbacks=[Timed()])", ""),
    "untouched": (
        "import os\ndef clean():\n    os.remove('old.h5')\n"
        "def parse(a, b):\n    a += rng.normal((4,)) * rate * table.lookup(tf.constant(1, tf.int64))\n"
        "    return flip(tf.reshape(a, (1, 2, 2, 1)), training=True)[0, 0] + tf.cast(names('a'), 'float32'), b\n"
        "model = keras.Sequential([keras.Input((2, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\nmodel.fit(data.map(parse).batch(8), callbacks=[Timed()])",
        "",
    ),
}
SCRIPTS |= {f"state_{name}": f"{STATE}{call}\n" for name, (call, _) in STATES.items()}
LOOP_STATE = TAPE.replace(".batch(16)", ".map(lambda a, b: (a * rate, b)).batch(16)").replace(
    "optimizer =", "rate = tf.Variable(1.0)\noptimizer ="
)
SCRIPTS["state_loop"] = LOOP_STATE + (
    "step = tf.function(step)\n"
    "for epoch in range(4):\n    for a, b in batches:\n        step(a, b)\n    rate.assign(2.0)\n"
)
FILES = {"overwrites": {"kept.txt": "old", "train.log": "old"}, "removes": {"out/model.txt": "weights"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, each in a directory of its own."""
    made = tmp_path_factory.mktemp("surveys") / "scripts"
    for name, source in SCRIPTS.items():
        (made / name).mkdir(parents=True)
        (made / name / "train.py").write_text(textwrap.dedent(source), encoding="utf-8")
        (made / name / "settings.json").write_text(json.dumps(SETTINGS.get(name, {})), encoding="utf-8")
        for file, text in FILES.get(name, {}).items():
            (made / name / file).parent.mkdir(exist_ok=True)
            (made / name / file).write_text(text, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, dict[str, Any]]:
    """What each survey said."""
    return survey_all(folder)


def facts(told: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """What was found out about a script."""
    assert "facts" in told[name], told[name]
    return told[name]["facts"]


def script(told: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """The part of it that only scripts have."""
    return facts(told, name)["script"]


def test_arrays_have_the_batch_size_of_fit_or_keras_own(told):
    assert facts(told, "arrays")["batch_size"] == 16
    assert facts(told, "arrays")["validates"] is True
    assert script(told, "arrays")["epochs"] == 3
    reasons = script(told, "arrays")["not_reached"]
    assert "batch_size" not in reasons
    assert reasons["prefetch"] == reasons["num_parallel_calls"]
    assert "a arrays" not in str(reasons)
    assert facts(told, "arrays_by_default")["batch_size"] == 32


def test_a_pipelines_constants_are_found_where_they_stand(told):
    found = script(told, "pipeline")
    assert found["baseline"]["batch_size"] == 8
    assert found["baseline"]["prefetch"] == "autotune"
    assert found["baseline"]["num_parallel_calls"] == 2
    assert {knob: [site["call"] for site in sites] for knob, sites in found["sites"].items()} == {
        "batch_size": ["batch"],
        "num_parallel_calls": ["map"],
        "prefetch": ["prefetch"],
        "batched_map": ["map", "batch"],
        "cache": ["map"],
    }
    assert found["sites"]["batch_size"][0]["function"] == "batches"


@pytest.mark.parametrize("name", ["counts_batches", "shards_batches", "windows_batches", "enumerates_batches"])
def test_a_batch_size_is_left_alone_where_batches_are_counted(told, name):
    counted = {"counts_batches": "take"}.get(name, name.removesuffix("s_batches"))
    assert f"`{counted}` " in script(told, name)["not_reached"]["batch_size"]
    assert "after batch() in train.py" in script(told, name)["not_reached"]["batch_size"]
    assert "autotune.tuned" in script(told, name)["not_reached"]["batch_size"]


@pytest.mark.parametrize("name", ["takes_examples", "zips_batches"])
def test_a_batch_size_is_reached_unless_batches_are_counted(told, name):
    assert "batch_size" not in script(told, name)["not_reached"]


def test_validation_data_without_end_is_validated_for_some_steps(told):
    assert facts(told, "validates_some")["validates"] is True


def test_steps_per_epoch_follow_only_where_they_are_the_datas(told):
    assert "batch_size" not in script(told, "steps_of_data")["not_reached"]
    assert "steps_per_epoch" in script(told, "steps_of_its_own")["not_reached"]["batch_size"]


def test_what_a_script_sets_itself_is_its_baseline(told):
    assert script(told, "policy")["baseline"]["precision"] == "mixed_bfloat16"
    assert script(told, "schedule")["schedule"] == "CosineDecay"


@pytest.mark.parametrize("name", [name for name, (_, read) in STATES.items() if read])
def test_batches_are_not_read_ahead_of_what_they_depend_on(told, name):
    reasons, read = script(told, f"state_{name}")["not_reached"], STATES[name][1]
    for knob in ("workers", "max_queue_size") if name == "sequence" else ("persistent_iterator", "prefetch"):
        assert reasons[knob].startswith("the function in train.py, line ")
        assert f" reads {read}, which may change during the training" in reasons[knob]
    assert "steps_per_execution" not in reasons


def test_a_map_that_changes_with_the_epoch_keeps_its_examples(told):
    reason = script(told, "centred")["not_reached"]["batched_map"]
    assert reason == "the function in train.py, line 11, reads level, which may change during the training"


def test_a_loops_batches_are_not_read_ahead_of_a_variable(told):
    assert "a variable or lookup table" in script(told, "state_loop")["not_reached"]["num_parallel_calls"]


@pytest.mark.parametrize("name", [name for name, (_, read) in STATES.items() if not read])
def test_batches_of_nothing_that_changes_are_read_ahead(told, name):
    reasons = script(told, f"state_{name}")["not_reached"]
    assert not any("old value" in reason for reason in reasons.values())
    assert name in ("shuffled", "loaded") or "prefetch" not in reasons


@pytest.mark.parametrize(
    ("name", "precision", "reason"),
    [
        ("policy", "mixed_bfloat16", "set_global_policy() in train.py, line 2 chooses it"),
        ("policy_object", "mixed_float16", "set_dtype_policy() in train.py, line 2 chooses it"),
        ("floatx", "float64", "set_floatx() in train.py, line 2 chooses it"),
        ("layers_in_float64", "float32", "wide has the dtype float64"),
        ("last_layer_in_float32", "float32", "set_floatx() in train.py, line 2 chooses it"),
        ("loop_in_float64", "float32", "wide has the dtype float64"),
    ],
)
def test_a_precision_that_a_script_chooses_is_not_varied(told, name, precision, reason):
    found = script(told, name)
    assert found["baseline"]["precision"] == precision
    assert found["not_reached"]["precision"] == f"{reason}; --allow-precision varies it"


def test_a_precision_varies_if_none_is_chosen_or_it_is_allowed(told):
    assert script(told, "floatx_allowed")["baseline"]["precision"] == "float16"
    for name in ("floatx_allowed", "pipeline", "tape"):
        assert "precision" not in script(told, name)["not_reached"]


def test_a_variable_that_a_script_sets_itself_is_not_varied(told):
    found = script(told, "sets_variables")["not_reached"]
    assert found["gpu_thread_mode"] == "the script sets TF_GPU_THREAD_MODE itself; remove that line to tune it"
    assert found["xla_gpu_graph_min_graph_size"] == "the script sets XLA_FLAGS itself; remove that line to tune it"
    assert "cublaslt" not in found


def test_no_setting_of_xla_is_varied_under_a_strategy(told):
    found = script(told, "mirrored_with_xla")
    names = ("jit_compile", "xla_auto_clustering", "xla_gpu_enable_cublaslt")
    assert {found["not_reached"][name] for name in names} == {NO_XLA}
    assert found["baseline"]["jit_compile"] is True
    said = list(script_notes(ScriptFacts.model_validate(found), 10.0))
    assert f"the script compiles with jit_compile=True. {NO_XLA}: remove it" in said


def test_the_longest_of_several_fits_is_tuned(told):
    assert script(told, "two_fits")["fit"] == 2
    assert len(script(told, "two_fits")["fits"]) == 3
    assert told["wrong_fit"]["message"].startswith("--fit 3: train.py has 2 calls of fit (train.py, line ")


def test_what_is_the_same_in_each_epoch_may_be_cached(told):
    found = script(told, "cacheable")
    assert found["baseline"]["cache"] is False
    assert [(site["call"], site["line"]) for site in found["sites"]["cache"]] == [("map", 10)]
    assert "has a cache already" in script(told, "cached")["not_reached"]["cache"]
    for name, why in (("truncated", "comes before a shuffle"), ("uncounted", "elements is not known")):
        assert why in script(told, name)["not_reached"]["cache"]
        assert "cache" not in script(told, name)["baseline"]


def test_what_writes_is_left_out(told, folder):
    assert script(told, "callbacks")["left_out"] == ["ModelCheckpoint (train.py, line 10)"]
    assert "Model.save" in script(told, "saves_before")["left_out"]
    assert not (folder / "saves_before" / "first.keras").exists()
    assert not (folder / "callbacks" / "a.keras").exists()


def test_what_is_written_to_a_file_that_exists_goes_to_another(told, folder):
    assert facts(told, "overwrites")["batch_size"] == 16
    assert script(told, "overwrites")["left_out"] == ["changes of files that exist"]
    assert (folder / "overwrites" / "kept.txt").read_text(encoding="utf-8") == "old"
    assert (folder / "overwrites" / "train.log").read_text(encoding="utf-8") == "old"


def test_a_change_that_cannot_be_redirected_ends_the_survey(told, folder):
    assert "train.py, line 2: would change" in told["removes"]["message"]
    assert "--allow-writes" in told["removes"]["hint"]
    assert (folder / "removes" / "out" / "model.txt").exists()


def test_ordinary_code_of_other_shapes_is_surveyed(told):
    assert script(told, "threads_by_name")["baseline"]["intra_op_threads"] == 2
    assert script(told, "partial")["trains"] == "loop"
    assert script(told, "partial")["epochs_range"] is None, "a list of numbers must have an end"
    assert facts(told, "forks_before")["batch_size"] == 32


def test_the_executions_of_one_fit_count_together(told):
    found = script(told, "folds")
    assert (found["fit"], found["fit_calls"]) == (1, 4)
    assert len({fit["site"]["line"] for fit in found["fits"]}) == 2
    assert found["fit_site"]["line"] == 10


def test_a_loop_is_surveyed_up_to_its_second_slow_round(told):
    assert len(script(told, "slow_folds")["fits"]) == script(told, "slow_folds")["fit_calls"] == 2
    within = script(told, "slow_folds_of_the_last")
    assert ([fit["site"]["line"] for fit in within["fits"]], within["fit_calls"]) == ([18, 15, 15], 2)
    assert len(script(told, "slow_folds_then_all")["fits"]) == script(told, "slow_folds_then_all")["fit"] == 5


def test_an_evaluation_by_the_same_helper_is_no_training(told):
    assert script(told, "helper_for_both")["baseline"]["batch_size"] == 16


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("trains_in_fork", "trains_in_fork/train.py, line 10"),
        ("trains_in_spawned", "trains_in_spawned/train.py, line 10"),
    ],
)
def test_a_training_in_a_child_is_stopped_and_named(told, folder, name, where):
    assert f"{where}: trains in a process that the script starts" in told[name]["message"]
    assert "tune the file that trains" in told[name]["hint"]
    assert not list((folder / name).glob("*.txt")), "the script goes on"


@pytest.mark.parametrize(
    ("name", "message", "command"),
    [
        ("replaced", "line 6: starts the script again in place of its process", "PYTHONHASHSEED=7 autotune tune {}`"),
        ("replaced_by_path", "line 6: starts the script again", "PYTHONHASHSEED=7 autotune tune {} -- --deep 'a b'`"),
        ("replaced_by_another", "line 6: replaces the process by `env PYTHONHASHSEED=7 nice other.py`", ""),
        ("run_again", "line 15: trains in a process that the script", "PYTHONHASHSEED=7 autotune tune {} -- --deep`"),
    ],
)
def test_a_script_that_starts_itself_again_names_the_command(told, folder, name, message, command):
    assert message in told[name]["message"]
    assert command.format("train.py") in told[name]["hint"].replace(f"{folder / name}/", "")
    assert not (folder / name / "done.txt").exists()


def test_updates_of_varying_work_are_counted_as_updates(told):
    for name in ("episodes", "episodes_by_predict"):
        assert script(told, name)["work_varies"]
        assert facts(told, name)["batch_size"] == 1
    assert not any(script(told, name)["work_varies"] for name in HELD)


def test_a_fork_that_ends_does_not_answer_for_the_script(told):
    assert facts(told, "forks_itself")["batch_size"] == 32


@pytest.mark.parametrize(
    ("name", "message", "help_"),
    [
        ("validates_for_ever", "fit() in train.py, line 10: validation_data is infinite", "validation_steps"),
        ("raises", "train.py raised ValueError: no such column: é", "python train.py"),
        ("exits", "train.py raised SystemExit: 2", "`autotune tune train.py -- --epochs 90`"),
        ("asks", "reads from stdin", "argument of the script"),
        ("session", "train.py, line 3: opens a tf.compat.v1.Session", "tf.GradientTape"),
        ("parameter_server", "train.py, line 2: makes a ParameterServerStrategy: autotune does not tune it", "fit"),
        ("of_keras", "train.py, line 2: makes a keras.distribution.DataParallel: keras.", "MirroredStrategy"),
        ("epoch_inside", "line 19: train_epoch loops over a dataset inside a tf.function", "on one batch"),
        ("distributed_epoch_inside", "train_epoch loops over a dataset inside a tf.function", "on one batch"),
        ("misses_a_package", "raised ModuleNotFoundError: No module named 'no_such_package'", "python train.py"),
        ("draws", "pydot", "python train.py"),
        ("never_trains", "ended, and autotune saw no training", "after `--`"),
        ("dies", "train.py ended the process before it trained", "python train.py"),
    ],
)
def test_a_script_that_cannot_be_tuned_is_refused_in_a_sentence(told, name, message, help_):
    assert message in told[name]["message"]
    assert help_ in told[name]["hint"]


def test_a_script_keeps_a_strategy_of_its_own(told):
    why = told["mirrored"]["facts"]["script"]["not_reached"]
    assert why["strategy"] == why["replicas"] == "the script sets its own MirroredStrategy"
    assert "fails inside TensorFlow" in why["steps_per_execution"]
    assert "strategy.run(step" in told["numpy_slices"]["facts"]["script"]["not_reached"]["strategy"]
    assert "strategy" not in told["pipeline"]["facts"]["script"]["not_reached"]


def test_a_script_that_finds_no_tpu_is_tuned_without_one(told):
    assert facts(told, "looks_for_a_tpu")["batch_size"] == 24


def test_a_script_has_its_own_arguments_and_may_print(told):
    assert facts(told, "arguments")["batch_size"] == 4
    assert facts(told, "prints_much")["batch_size"] == 32


HELD = ("on_batch", "numpy_slices", "no_arguments", "by_iterator_of_few", "by_iterator")
"""Loops whose batch size is not varied: no call of `batch()` can be given another one, or they count steps."""


@pytest.mark.parametrize(
    ("name", "batch_size", "function"),
    [
        ("tape", 16, "step"),
        ("tape_eager", 16, None),
        ("tape_with_test_loop", 16, "step"),
        ("explicit", 12, None),
        ("on_batch", 24, None),
        ("numpy_slices", 12, None),
        ("by_iterator", 16, None),
        ("by_iterator_of_few", 16, None),
        ("no_arguments", 40, "train"),
    ],
)
def test_a_loop_of_its_own_is_seen_by_its_steps(told, name, batch_size, function):
    found = script(told, name)
    assert found["trains"] == "loop"
    assert found["baseline"]["batch_size"] == batch_size
    assert (found["step_function"] or {}).get("function") == function
    runs_eagerly = name in ("tape_eager", "numpy_slices")
    assert ("graph_step" in found["sites"]) == runs_eagerly
    assert ("jit_compile" in found["not_reached"]) == (function is None and not runs_eagerly)
    assert ("batch_size" in found["not_reached"]) == (name in HELD)


def test_what_slows_the_steps_of_a_loop_is_named_with_its_line(told):
    before, _, _ = SCRIPTS["predicts"].partition("model.predict(same")
    said = [part["what"] for part in script(told, "predicts")["slow_parts"]]
    assert [what.partition(" makes")[0] for what in said] == [
        f"predict() in train.py, line {before.count(chr(10)) + 1}"
    ]
    assert script(told, "tape")["slow_parts"] == []
    (part,) = script(told, "step_in_its_loop")["slow_parts"]
    (site,) = script(told, "step_in_its_loop")["sites"]["graph_step"]
    assert (site["call"], part["what"]) == ("train_step", f"the step runs eagerly (train.py, line {site['line']})")


def test_a_value_that_is_asked_for_by_name_is_reached(told):
    assert "batch_size" not in script(told, "tuned")["not_reached"]
    assert facts(told, "tuned")["batch_size"] == 8


def test_a_sequence_is_tuned_as_far_as_it_listens(told):
    listening, deaf = script(told, "sequence"), script(told, "sequence_of_fixed_size")
    assert listening["baseline"]["workers"] == 2
    assert listening["baseline"]["max_queue_size"] == 5
    assert "batch_size" not in listening["not_reached"]
    assert "batch_size" in deaf["not_reached"]
    assert deaf["baseline"]["batch_size"] == 8
