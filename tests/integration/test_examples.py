"""Every workload in `examples/` trains in a trial process, and learns."""

import math
import re

import pytest
from real_trials import REPOSITORY, Case, configuration

EXAMPLES = sorted(
    file for file in (REPOSITORY / "examples").glob("*.py") if re.search(r"^workload = ", file.read_text(), re.M)
)
KNOBS = {"precision": "mixed_bfloat16", "steps_per_execution": 4, "prefetch": 2, "num_parallel_calls": 2}
"""Changes that a workload can be written so as not to bear."""


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_learns(processes_of, tmp_path, file):
    processes = processes_of(file)
    facts = processes.open()
    assert processes.isolation == "template", "importing it starts nothing"
    log = tmp_path / "trial.log"
    wanted = configuration(facts.batch_size, **facts.baseline | KNOBS)
    case = Case(processes.launch(wanted, log=str(log), data=None), log)
    warm = case.warm_up()
    assert not warm.started.endless
    assert math.isfinite(warm.first_loss)
    assert case.measure(1.0).loss < 0.9 * warm.first_loss
    case.trial.kill()
