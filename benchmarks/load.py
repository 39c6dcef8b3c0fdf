"""A load for benchmarks: on every core a process that computes in bursts, as other users of a machine do."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

BURST_SECONDS = 0.7  # on average, of computing as of resting; both are exponentially distributed


@contextlib.contextmanager
def beside_load(wanted: bool) -> Iterator[None]:
    """Keep the load running until the block ends, if it is wanted."""
    cores = sorted(os.sched_getaffinity(0)) if wanted else []
    processes = [subprocess.Popen([sys.executable, __file__, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compute_in_bursts(core: int) -> None:
    """Compute and rest by turns on a core, for ever."""
    os.sched_setaffinity(0, {core})
    draw = random.Random(core)
    while True:
        ends = time.monotonic() + draw.expovariate(1 / BURST_SECONDS)
        while time.monotonic() < ends:
            sum(range(1000))
        time.sleep(draw.expovariate(1 / BURST_SECONDS))


if __name__ == "__main__":
    compute_in_bursts(int(sys.argv[1]))
