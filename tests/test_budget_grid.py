"""The budget is wall-clock time for everything, kept to within a tenth: held over a grid of simulated machines."""

import itertools
import random
import re

import pytest
from simulated_runs import BASELINE, BATCH_SIZE, SMALL_SPACE, quick_tune, simulated_trials

from autotune.errors import BudgetError
from autotune.measure.deciding import Shortfall
from autotune.trial.live import TrialFailed
from autotune.trial.record import Outcome

OVERRUN = 1.10
BUDGETS = (60.0, 120.0, 300.0, 600.0)
IMPORT_SECONDS = (1.0, 5.0, 20.0)
START_SECONDS = (0.5, 2.0, 8.0)
EPOCHS = ((0.05, 40), (1.0, 100), (4.0, 2), (4.0, 2000), (16.0, 3), (16.0, 8), (16.0, 8000))
"""Seconds of an epoch of the baseline, and calls in it: few calls are timed as whole epochs, however long."""
SPACE_WITH_IMPORTS = (
    SMALL_SPACE
    + """
[knobs.onednn]
kind = "categorical"
choices = [true, false]
"""
)
WRONG = ("nothing", "crashes", "hangs", "hangs late", "stalls late", "all hang", "machine slows down")
MACHINES = list(itertools.product(IMPORT_SECONDS, START_SECONDS, EPOCHS, WRONG, ("auto", "bracketed")))
SAMPLE = 80
"""Machines per budget: drawn once from the 882 there are."""


def machine(budget, import_seconds, start_seconds, epoch, wrong):
    """Simulated trials in which XLA is twice as fast, and goes wrong in some way."""
    seconds, calls = epoch
    late = lambda: trials.clock() > 0.6 * budget  # noqa: E731  # a word for a moment

    def speed(configuration):
        factor = 1.3 if configuration.batch_size > BATCH_SIZE else 1.0
        if configuration["jit_compile"] is True:
            factor *= 1e-4 if wrong == "stalls late" and late() else 1.5
        if wrong == "machine slows down" and late():
            factor *= 0.5
        return factor * calls * BATCH_SIZE / seconds

    def failure(configuration):
        xla = configuration["jit_compile"] is True
        hanging = {"hangs": xla, "hangs late": xla and late(), "all hang": configuration != BASELINE}
        if hanging.get(wrong):
            return TrialFailed(Outcome.TIMEOUT, "hangs")
        return TrialFailed(Outcome.CRASHED, "killed") if wrong == "crashes" and xla else None

    trials = simulated_trials(
        speed,
        noise=0.08,
        instance_noise=0.01,
        failure=failure,
        import_seconds=import_seconds,
        start_seconds=start_seconds,
        examples=calls * BATCH_SIZE,
    )
    return trials


def share_used(path, budget, setting):
    """Share of a budget that a run takes, and its recipe or the error that refuses the budget."""
    *settings, pairing = setting
    trials = machine(budget, *settings)
    try:
        ended, _ = quick_tune(trials, path, budget=budget, pairing=pairing, space=SPACE_WITH_IMPORTS)
    except BudgetError as error:
        ended = error
    return trials.clock() / budget, ended


def drawn(budget, count=SAMPLE):
    """Machines to run a budget on, the same each time."""
    return random.Random(int(budget)).sample(MACHINES, count)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_budget_is_kept_whatever_the_machine_and_the_candidates_do(tmp_path, budget):
    """Slow imports, long epochs, hangs, stalls, a machine that slows down: the end comes within a tenth."""
    over = {}
    for setting in drawn(budget):
        share, _ = share_used(tmp_path, budget, setting)
        if share > OVERRUN:
            over[setting] = share
    assert over == {}


def test_a_budget_that_a_refusal_advises_is_enough_and_kept(tmp_path):
    """Where 60 s are refused, the budget that is named is not, and it is kept as well."""
    wrong, refused = {}, 0
    for setting in drawn(60.0):
        _, ended = share_used(tmp_path, 60.0, setting)
        advised = isinstance(ended, BudgetError) and re.search(r"--budget (\d+)s", ended.hint)
        if advised:
            refused += 1
            share, again = share_used(tmp_path, float(advised.group(1)), setting)
            if share > OVERRUN or isinstance(again, BudgetError):
                wrong[setting] = (share, again)
    assert wrong == {}
    assert refused > SAMPLE / 4


def test_who_runs_again_with_the_advised_budget_gets_an_answer(tmp_path):
    """Where a sound candidate was not confirmed for want of time, the budget that is named confirms it."""
    unanswered, asked = {}, 0
    for budget, *rest in itertools.product((60.0, 120.0), IMPORT_SECONDS, START_SECONDS, EPOCHS[:4]):
        setting = (*rest, "nothing", "auto")
        _, ended = share_used(tmp_path, budget, setting)
        if not isinstance(ended, BudgetError) and ended.evidence.shortfall is Shortfall.NO_TIME:
            asked += 1
            _, again = share_used(tmp_path, ended.evidence.sufficient_budget_seconds, setting)
            if again.evidence.verdict != "faster":
                unanswered[(budget, *setting)] = again.evidence.shortfall
    assert unanswered == {}
    assert asked > 3
