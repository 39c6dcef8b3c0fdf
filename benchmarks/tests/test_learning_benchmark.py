"""`benchmarks/learning.py`: times to a held-out loss, what is made of them, and predictions from two batch sizes."""

import json
import math

import learning
import pytest

SLOW = [(20.0, 1.0), (30.0, 0.8), (40.0, 0.9), (50.0, 0.4), (60.0, 0.2)]
"""Ends of epochs and held-out losses; a start of 10 s."""
FAST = [(15.0, 1.0), (20.0, 0.8), (25.0, 0.9), (30.0, 0.4), (35.0, 0.2)]


def tuned(kind="same training", claim=(2.0, 1.8, 2.2), **more):
    """What a run recommends."""
    found = {"verdict": "faster", "kind": kind, "changes": {}, "claim": claim, "larger_claim": None}
    return learning.Tuned(**found | {"learning_share": 0.1} | more)


def results_of(tuned_scripts, trained, file=None):
    """What a benchmark has measured."""
    results = learning.Results(file)
    results.tuned, results.trained = tuned_scripts, trained
    return results


def sides(recommended=FAST, baseline=SLOW):
    """Two seeds of each side; the second one is a little slower."""
    return {
        side: [curve, [(1.1 * seconds, loss) for seconds, loss in curve]]
        for side, curve in (("baseline", baseline), ("recommended", recommended))
    }


def test_a_start_and_a_slow_first_epoch_are_left_out():
    assert learning.without_start(SLOW) == [(10.0, 1.0), (20.0, 0.8), (30.0, 0.9), (40.0, 0.4), (50.0, 0.2)]
    late = [(90.0, 1.0), (91.0, 0.5), (93.0, 0.4), (94.0, 0.3)]
    assert learning.without_start(late) == [(1.0, 1.0), (2.0, 0.5), (4.0, 0.4), (5.0, 0.3)]


def test_the_target_is_the_best_loss_of_the_median_seed_so_far():
    rising = [(1.0, 0.5), (2.0, 0.3), (3.0, 0.6), (4.0, 0.1), (5.0, 0.0)]
    assert learning.target_loss([SLOW]) == 0.8
    assert learning.target_loss([SLOW, rising, [(1.0, 0.7)]]) == 0.7


@pytest.mark.parametrize(
    ("target", "seconds"), [(1.0, 20.0), (1.5, 20.0), (0.8, 30.0), (0.6, 45.0), (0.3, 55.0), (0.1, None)]
)
def test_a_loss_is_reached_between_two_epochs(target, seconds):
    assert learning.seconds_to(SLOW, target) == (None if seconds is None else pytest.approx(seconds))


def test_only_a_baseline_that_misses_the_loss_counts():
    assert learning.log_ratios([SLOW], [FAST[:3]], 0.3) is None
    assert learning.log_ratios([SLOW[:3]], [FAST], 0.3) == [pytest.approx(math.log(40.0 / 32.5))]


def test_ratios_and_last_losses_have_their_bars():
    found = learning.figures(results_of({"lstm": tuned()}, {"lstm": sides()}))
    assert found["lstm: claim, faster, same training"]["ci95"] == [1.8, 2.2]
    assert found["lstm: real ratio of times to the loss"]["value"] == pytest.approx(2.0)
    assert found["lstm: the same with start and compilation"]["value"] == pytest.approx(1.5)
    assert found["lstm: held-out loss after its epochs, over the baseline's"]["value"] == pytest.approx(1.0)
    assert found["real ratio lies in the claimed interval"]["value"] == 1
    assert found["recommended reaches the loss later than the baseline"]["value"] == 0
    assert found["held-out loss no worse than the baseline's seeds, same training"]["value"] == 1
    assert found["held-out loss no worse than the baseline's seeds, larger batch"]["count"] == 0
    assert found["largest share of a budget spent on learning"]["value"] == 0.1


def test_a_recipe_that_learns_worse_is_counted():
    worse = [(seconds, loss + 0.3) for seconds, loss in FAST]
    found = learning.figures(results_of({"lstm": tuned("larger batch")}, {"lstm": sides(worse)}))
    assert found["real ratio lies in the claimed interval"]["value"] == 0
    assert found["held-out loss no worse than the baseline's seeds, larger batch"] == learning.one(0, 1)
    never = [(seconds, 1.0) for seconds, _ in FAST]
    found = learning.figures(results_of({"lstm": tuned()}, {"lstm": sides(never)}))
    assert found["lstm: real ratio of times to the loss"]["value"] is None
    assert found["recommended reaches the loss later than the baseline"]["value"] == 1


def test_a_script_that_keeps_its_settings_is_not_compared():
    kept = tuned("baseline", None, verdict="no_significant_gain")
    found = learning.figures(results_of({"lstm": kept}, {}))
    assert found["lstm: claim, no_significant_gain, baseline"]["value"] is None
    assert found["real ratio lies in the claimed interval"]["count"] == 0


def test_results_are_the_same_after_a_file(tmp_path):
    file = tmp_path / "learning.json"
    results = results_of({"lstm": tuned()}, {"lstm": sides()}, file)
    results.save()
    loaded = learning.Results(file)
    assert json.dumps(loaded.parts) == json.dumps(results.parts)
    assert learning.figures(loaded) == json.loads(file.read_text())["figures"]


def test_larger_batches_are_predicted_from_the_two_smallest():
    def needed(size):
        return 3.0 * (1 + size / 1000)

    found = learning.predicted_log_examples([(size, needed(size)) for size in (100, 200, 400, 1600)])
    assert found == pytest.approx([math.log(needed(400)), math.log(needed(1600))])
    assert learning.predicted_log_examples([(1, 2.0), (2, 1.9), (8, 1.8)]) == pytest.approx([math.log(2.0)])


def test_the_predictions_error_is_that_of_every_larger_batch():
    found = learning.convergence_figures(
        [{"needed": [(1, 1.0), (2, 2.0), (4, 5.0)]}, {"needed": [(1, 1.0), (2, 1.0), (4, 1.0)]}]
    )
    error, unchanged = found.values()
    assert (error["value"], error["count"]) == (pytest.approx(0.1), 2)
    assert unchanged["value"] == pytest.approx(0.4)


def test_the_public_sets_have_rising_batch_sizes():
    sets = json.loads(learning.CONVERGENCE.read_text(encoding="utf-8"))["sets"]
    assert len(sets) == 22
    assert all(len(found["needed"]) >= 3 for found in sets)
    assert all(found["needed"] == sorted(found["needed"], key=lambda point: point[0]) for found in sets)
