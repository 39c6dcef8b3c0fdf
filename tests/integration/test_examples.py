"""Every workload in `examples/` trains in a trial process, and learns."""

import math
import re

import pytest
from real_trials import REPOSITORY, Case, configuration

from autotune.trial.live import Data

pytestmark = pytest.mark.slow

EXAMPLES = sorted(
    file
    for file in (REPOSITORY / "examples").glob("*.py")
    if re.search(r"^workload = ", file.read_text(), re.M)
)
ELSEWHERE = {"precision": "mixed_bfloat16", "steps_per_execution": 4, "prefetch": 2, "num_parallel_calls": 2}
"""Knobs that a workload can be written so as not to bear."""


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_learns(processes_of, tmp_path, file):
    """Its loss is finite and falls, with its own baseline, and with other precision and pipeline knobs."""
    processes = processes_of(file)
    facts = processes.open()
    data = None
    for name, knobs in {"baseline": facts.baseline, "elsewhere": facts.baseline | ELSEWHERE}.items():
        log = tmp_path / f"{name}.log"
        case = Case(processes.launch(configuration(facts.batch_size, **knobs), log=str(log), data=data), log)
        warm = case.warm_up()
        assert not warm.started.endless
        assert math.isfinite(warm.first_loss)
        assert case.measure(1.0).loss < 0.9 * warm.first_loss
        case.trial.kill()
        data = Data(examples=warm.started.examples, endless=False)
