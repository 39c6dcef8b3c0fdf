"""The template process itself: what it must not wake."""

import subprocess
import sys

ASK = """
import keras
import tensorflow
from tensorflow.python.eager import context
from autotune.runtime.template import inspect_import

assert inspect_import()[0] is None
# TensorFlow has no public way to ask this without doing it: the list is made when CUDA is initialised.
assert context.context()._physical_devices is None, "asking initialised the devices"
tensorflow.config.list_physical_devices()
assert context.context()._physical_devices is not None, "this check cannot fail any more"
tensorflow.constant(1)
assert inspect_import()[0] == "runtime"
"""


def test_asking_whether_the_runtime_has_started_wakes_no_device():
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
