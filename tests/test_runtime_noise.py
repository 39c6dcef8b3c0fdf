"""What of a trial's log is shown: what says something, and nothing of the runtime's chatter."""

import pytest

from autotune.runtime.logs import remove_runtime_noise

NOISE = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795211797.449557   30689 port.cc:153] oneDNN custom operations are on. You may see slightly different
I0000 00:00:1795211797.449990   30689 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not
I0000 00:00:1795211797.659979   30689 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the \
appropriate compiler flags.
E0000 00:00:1795211800.780831   30689 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: UNKNOWN (303)
2026-11-20 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.
2026-11-20 10:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed call to cuInit
E0000 00:00:1763670501.123456   12345 cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting to register
W0000 00:00:1763670501.123456   12345 computation_placer.cc:177] computation placer already registered. Please check
W0000 00:00:1763670501.123456   12345 gpu_device.cc:2342] Cannot dlopen some GPU libraries. Please make sure
Skipping registering GPU devices...
2026-11-20 10:00:00.1: W tensorflow/core/framework/local_rendezvous.cc:404] Local rendezvous is aborting with status: \
OUT_OF_RANGE: End of sequence
\t [[{{node IteratorGetNext}}]]""".splitlines()

WORDS = [
    "Epoch 1/10",
    "WARNING: my own",
    "I1120 10:00:00.123456 140736 train.py:12] written by absl in the user's code",
    "2026-11-20 10:00:00.123456: I train.py:12] the user's own logger",
    "F0000 00:00:1763670501.123456   12345 tensor.cc:100] Check failed: dims == 2",
    "2026-11-20 10:00:00.1: F tensorflow/core/framework/tensor.cc:852] Check failed: 1 == NumElements() (1 vs. 2)",
    "I0000 00:00:1763670501.123456   12345 tensor.cc:100] Check failed: dims == 2",
    "W0000 00:00:1763670501.123456   12345 bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying",
    "2026-11-20 10:00:00.1: E external/local_xla/xla/service/slow_operation_alarm.cc:73] Very slow compile?",
    "Traceback (most recent call last):",
    "\t [[{{node IteratorGetNext}}]]",
]


@pytest.mark.parametrize("line", [each for each in NOISE if "[[{{node" not in each])
def test_a_line_of_the_runtime_that_says_nothing_is_dropped(line):
    assert remove_runtime_noise(line) == ""


@pytest.mark.parametrize("line", WORDS)
def test_a_line_that_says_something_is_kept(line):
    assert remove_runtime_noise(f"{NOISE[0]}\nbefore\n{line}\nafter") == f"before\n{line}\nafter"
