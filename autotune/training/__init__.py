"""One training inside one process: how it starts, trains and is timed. Functions import TensorFlow; modules do not."""
