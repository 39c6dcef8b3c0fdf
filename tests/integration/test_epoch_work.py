"""The calls of an epoch as a trial sees them, also where the source does not show that the script counts steps."""

import pytest
from real_trials import PATIENCE_SECONDS
from test_survey import COMPILED, TAPE

COUNTS_UNSEEN = (
    TAPE
    + """
step = tf.function(step)

class Budget:
    left = 0
    def is_spent(self):
        self.left -= 1
        return self.left < 0

budget = Budget()
for epoch in range(50):
    budget.left = 2
    for a, b in batches:
        if budget.is_spent():
            break
        step(a, b)
"""
)


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        (COUNTS_UNSEEN, (2, 2)),
        (TAPE + "for epoch in range(50):\n    for a, b in batches:\n        step(a, b)\n", (6, 3)),
        (COMPILED + "model.fit(x, y, batch_size=16, epochs=50)\n", (6, 3)),
    ],
)
def test_a_trial_counts_the_calls_of_an_epoch_that_is_left(trials_of_script, source, calls):
    trials, seen = trials_of_script(source), []
    for size in (16, 32):
        trial = trials.launch(batch_size=size)
        trial.warm_up(PATIENCE_SECONDS)
        trial.measure(0.2, PATIENCE_SECONDS)
        seen.append(trial.finish(0.0, PATIENCE_SECONDS).calls_per_epoch)
        trial.kill()
    assert tuple(seen) == calls
