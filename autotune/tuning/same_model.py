"""Tell whether the processes of a run train the same model, and where a script draws another one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from autotune.data.errors import WorkloadError
from autotune.data.facts import WorkloadReference
from autotune.runtime.executor import WarmUp
from autotune.runtime.protocol import LossCurves
from autotune.runtime.sources import directory_of
from autotune.script.call_sites import calls_in
from autotune.script.loading import source_files

MOST_OTHER_MODELS = 2  # trials, after which the run ends: one may follow from a knob
_INPUT = re.compile(r"shape=\((?:None|\d+)([^)]*)\)")  # of a tensor of a batch, from its second axis on
_DRAWS = re.compile(
    r"suggest_\w+|choices?|rand(int|range|bits|below|om|n)?|getrandbits|sample|uniform|integers|urandom|token_bytes|uuid4"
    r"|time(_ns)?"
)
_SEEDED = re.compile(r"default_rng|RandomState|Random|\w+Sampler|create_study")  # draws by chance without an argument


def find_model_difference(baseline: WarmUp, own: WarmUp | LossCurves, *, same_batch: bool) -> str:
    """Return how a process's model differs from the baseline's, in half a sentence; empty if it does not.

    Properties that may follow from the batch size, such as a layer's state, are compared only at the `same_batch`.
    """
    if own.shapes != baseline.shapes or (same_batch and own.parameters != baseline.parameters):
        sides = []
        for model, other in ((own, baseline), (baseline, own)):
            shape = next(iter(Counter(model.shapes) - Counter(other.shapes)), "")
            sides.append(f"{model.parameters:,} weights" + (f" (with one of shape {shape})" if shape else ""))
        return f"trained a model of {sides[0]}, and the baseline's has {sides[1]}"
    if isinstance(own, LossCurves):
        return ""
    inputs = [_INPUT.findall(warm.started.element) for warm in (own, baseline)]
    for shape, expected in zip(*inputs, strict=False):  # long elements are cut
        if same_batch and shape != expected:
            return f"trained on batches of shape (batch{shape}); the baseline's are (batch{expected})"
    return ""


def make_other_models_error(reference: WorkloadReference, found: Sequence[str]) -> WorkloadError:
    """Return the error of a run whose processes train different models; it names calls that draw by chance."""
    lines = []
    directory = directory_of(reference)
    for file in source_files(reference):
        for site, call in calls_in(str(file), directory).values():
            if _DRAWS.fullmatch(site.call) or (_SEEDED.fullmatch(site.call) and not call.args + call.keywords):
                lines.append(str(site))
    where = f" ({', '.join(dict.fromkeys(lines))})" if lines else ", such as Python's random or a sampler"
    return WorkloadError(
        f"{reference} trains another model in each process: {'; '.join(found)}",
        hint=f"Seed what chooses its sizes or its data{where}. If they follow from the batch size, give --fixed-batch.",
    )
