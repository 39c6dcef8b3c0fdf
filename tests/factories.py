"""Recipes written by hand."""

from simulated_runs import BASELINE, MACHINE

from autotune.data.figures import Interval
from autotune.recipe.evidence import Confirmation, CreatedBy, Evidence, PeakMemory, RecipeWorkload, Stability
from autotune.recipe.recipe import Recipe
from autotune.stats.deciding import EndedBy, Verdict

RATE, MEMORY = Interval(value=100.0, low=90.0, high=110.0), PeakMemory(host=None, device=None)
CREATED_AT = "2026-11-20T19:10:01.250+00:00"
WORKLOAD = RecipeWorkload(name="train", fingerprint="sha256:00")


def a_recipe(
    machine=MACHINE, *, configuration, baseline=BASELINE, workload=WORKLOAD, evidence=None, created_at=CREATED_AT
):
    """A recipe that claims ×1.5 for a configuration, with changes to its evidence."""
    fields = {
        "verdict": Verdict.FASTER,
        "ended_by": EndedBy.SETTLED,
        "min_gain": 0.02,
        "candidates": 8,
        "excluded_gain": None,
        "speedup": Interval(value=1.5, low=1.4, high=1.6),
        "throughput": RATE,
        "baseline_throughput": RATE,
        "compile_seconds": None,
        "baseline_compile_seconds": None,
        "peak_memory_bytes": MEMORY,
        "baseline_peak_memory_bytes": MEMORY,
        "input_wait_fraction": None,
        "stability": Stability(checks=(), not_checked=()),
        "confirmation": Confirmation(
            processes=4, pairs=20, leaders=1, confidence=0.97, pairing="alternating", trials=()
        ),
    }
    return Recipe(
        configuration=dict(configuration),
        baseline=dict(baseline),
        evidence=Evidence(**{**fields, **(evidence or {})}),
        learning_rate_rule=None,
        machine=machine,
        workload=workload,
        created_by=CreatedBy(
            autotune="0.1.0",
            run="by hand",
            created_at=created_at,
            search_space="quick.toml",
            trials=9,
            seed=0,
            budget_seconds=60.0,
            spent_seconds=60.0,
        ),
    )
