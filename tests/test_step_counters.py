"""Batch hooks of callbacks that write variables: they count steps, though a few steps may not show it."""

from autotune.training.step_counters import writing_hooks


class Copies:
    def on_train_batch_end(self, batch, logs=None):
        if batch % 500 == 499:
            self._copy()

    def _copy(self):
        self.target.set_weights(self.model.get_weights())


class AnnealsLater:
    def on_batch_begin(self, batch, logs=None):
        if self.seen > 100:
            self.beta.assign(self.seen / 1000)


class WarmsUp:
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate.assign(0.1 * batch)


class AnnealsByEpoch:
    def on_epoch_begin(self, epoch, logs=None):
        self.beta.assign(epoch / 10)

    def on_train_batch_end(self, batch, logs=None):
        self.seen = batch


def test_batch_hooks_that_write_variables_are_named():
    found = writing_hooks([Copies(), AnnealsLater()], lambda variables: True)
    assert [name.partition(" (test_step_counters.py, line ")[0] for name in found] == [
        "Copies.on_train_batch_end",
        "AnnealsLater.on_batch_begin",
    ]


def test_learning_rates_and_what_is_set_by_epoch_are_no_findings():
    assert writing_hooks([WarmsUp(), AnnealsByEpoch()], lambda variables: True) == []


def test_a_written_variable_that_no_step_reads_counts_nothing():
    (found,) = writing_hooks([Copies(), AnnealsLater()], lambda variables: False)
    assert found.startswith("Copies."), "its weights are a part of the training"
