"""The variances of `benchmarks/templates.py`, on speeds with planted ones."""

import random

import pytest
import templates

FORK, TEMPLATE, RATIO = 0.01, 0.025, 0.015


def repeats(rng, *, template, ratio):
    """Speeds as `speeds` gives them: what templates give to both configurations and to one, and forks' luck."""
    found = []
    for _ in range(7):
        found.append([])
        for _ in range(templates.TEMPLATES):
            both, one = rng.gauss(0.0, template), rng.gauss(0.0, ratio)
            means = [5.0 + both, 7.0 + both + one]
            found[-1].append([[rng.gauss(mean, FORK) for _ in range(templates.FORKS)] for mean in means])
    return found


def held(truth, figure):
    """Whether a figure's interval holds the truth."""
    return figure["ci95"][0] <= truth <= figure["ci95"][1]


def test_planted_deviations_are_found():
    """At least 90% of 100 intervals hold each of them."""
    rng, counts = random.Random(1), [0, 0, 0]
    for _ in range(100):
        forks, part, _, _, ratio = templates.figures(repeats(rng, template=TEMPLATE, ratio=RATIO)).values()
        for index, (truth, figure) in enumerate(((FORK, forks), (TEMPLATE, part), (RATIO, ratio))):
            counts[index] += held(truth, figure)
    assert min(counts) >= 90


def test_what_templates_give_to_both_is_not_in_the_ratio():
    """However much that is, the ratio's part is nothing, within its interval, in at least 90% of 100."""
    rng = random.Random(2)
    found = [[*templates.figures(repeats(rng, template=0.3, ratio=0.0)).values()][-1] for _ in range(100)]
    assert sum(held(0.0, figure) for figure in found) >= 90
    assert max(figure["value"] for figure in found) < 0.03


def test_templates_that_differ_by_what_their_forks_do_add_nothing():
    """A variance ratio below 1 is no negative variance."""
    part = templates.component(0.5, 14, 1.0, 21)
    assert part.value == part.low == 0.0
    assert part.high == pytest.approx((0.5 * 2.7 - 1) ** 0.5, abs=0.2)
