"""How a script's own training is seen and changed: its `fit`, its loop and its callbacks, without TensorFlow."""

import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.data.facts import ScriptFacts, Trains, WorkloadReference
from autotune.runtime.protocol import Finish
from autotune.script import batch_dependence, fit_call, loop_watch, reach, trial
from autotune.script.batch_dependence import early_ends
from autotune.script.fit_call import FitCall, honours_batch_size
from autotune.script.interpose import Hooks, Wrappers
from autotune.script.loop_trial import LoopSession, timed_calls
from autotune.script.loop_watch import LoopWatch
from autotune.script.settings import Settings

# ------------------------------------------------------------------------------------------ `fit`


@pytest.mark.parametrize(("used", "steps"), [(20, 10), (40, 5), (48, 4), (30, 7), (1000, 1)])
def test_steps_per_epoch_follow_the_batch_size(monkeypatch, used, steps):
    monkeypatch.setattr(FitCall, "kind", "arrays")
    settings = Settings(changes={"batch_size": used})
    call = FitCall(model=None, arguments={"x": None, "batch_size": 20, "steps_per_epoch": 10}, settings=settings)
    assert call.steps_per_epoch == steps


class Batches:
    """A `PyDataset` of 12 examples; one that `ignores` its batch size yields batches of 2."""

    def __init__(self, *, ignores=False, fails=False):
        self.batch_size, self.ignores, self.fails = 2, ignores, fails

    def __len__(self):
        return 12 // (2 if self.ignores else self.batch_size)

    def __getitem__(self, index):
        if self.fails:
            raise ValueError("no such batch")
        return ([0.0] * (2 if self.ignores else self.batch_size),)


@pytest.mark.parametrize(("batches", "honours"), [({}, True), ({"ignores": True}, False), ({"fails": True}, False)])
def test_a_py_dataset_keeps_its_batch_size_when_it_is_probed(monkeypatch, batches, honours):
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(nest=SimpleNamespace(flatten=list)))
    data = Batches(**batches)
    assert honours_batch_size(data) is honours
    assert data.batch_size == 2


class Callback:
    """Notes the epochs that it sees."""

    def __init__(self):
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(epoch)


class EarlyStopping:
    """Sets the flag itself; a time limit and a lambda do so by a function."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


class TimeLimit:
    def on_epoch_end(self, epoch, logs=None):
        self.leave()

    def leave(self):
        set_flag(self.model)


def set_flag(model):
    setattr(model, "stop_training", model is not None)  # noqa: B010  # as scripts write it in a lambda


class TerminateOnNaN:
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = logs is None


ON_EPOCH_END = SimpleNamespace(on_epoch_end=lambda epoch, logs: set_flag(None))


@pytest.mark.parametrize("ender", [EarlyStopping(), TimeLimit(), ON_EPOCH_END], ids=lambda ender: type(ender).__name__)
@pytest.mark.parametrize("is_model", [False, True])
def test_what_may_end_a_fit_early_is_named_with_its_line(ender, is_model):
    found = early_ends([] if is_model else [ender], ender if is_model else None, [], str(Path(__file__).parent))
    assert re.fullmatch(rf"{type(ender).__name__} \({Path(__file__).name}, line \d+\)", found)


def test_keras_callback_is_named_with_the_line_that_creates_it(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import keras\n\nmodel.fit(x, callbacks=[keras.callbacks.EarlyStopping()])\n")
    monkeypatch.setattr(batch_dependence, "is_installed", lambda file: True)
    assert early_ends(EarlyStopping(), None, [script], str(tmp_path)) == "EarlyStopping (train.py, line 3)"


@pytest.mark.parametrize("callback", [TerminateOnNaN(), Callback(), SimpleNamespace(on_epoch_end=print)])
def test_other_callbacks_end_no_fit_early(callback):
    assert early_ends([callback], callback, [], "") == ""


def test_callbacks_see_the_scripts_own_epochs_over_and_over():
    callback = Callback()
    for epochs, start in ((range(2), 0), (range(2, 5), 0), ((0, 9), 8)):
        trial._repeat_epochs(callback, epochs, start=start)
        for epoch in range(start, start + 5):
            callback.on_epoch_begin(epoch)
    assert callback.seen == [0, 1, 0, 1, 0, 2, 3, 4, 2, 3, 0, 9, 0, 9, 0]


@pytest.mark.parametrize(("epochs", "seen"), [(9, [4, 8, 4, 8]), (5, [4, 4])])
def test_a_short_fit_shows_its_first_and_its_last_epoch(monkeypatch, epochs, seen):
    def fit(model, *, callbacks, initial_epoch, **_):
        for told in callbacks:
            told.on_epoch_begin(initial_epoch, None)
        for told in callbacks:
            told.on_epoch_end(initial_epoch, {})

    monkeypatch.setattr(fit_call, "keras", SimpleNamespace(callbacks=SimpleNamespace(LambdaCallback=SimpleNamespace)))
    callback = Callback()
    callback.on_epoch_end = callback.on_epoch_begin
    arguments = {"initial_epoch": 4, "epochs": epochs, "validation_data": None, "validation_split": 0.0}
    fit_call.few_steps(None, fit, arguments, [callback])
    assert callback.seen == seen


# ------------------------------------------------------------------------------------------ a loop of its own

EPOCHS = """
for fold in range(2):
    for epoch in range(3):
        if reads_here:
            probe()
        for index in range(4):
            probe()
"""


@pytest.mark.parametrize(
    ("reads_a_dataset", "line"), [(True, 3), (False, 2)], ids=["a dataset is read", "no dataset is read"]
)
def test_the_epochs_are_the_loop_around_the_dataset(tmp_path, monkeypatch, reads_a_dataset, line):
    file = tmp_path / "train.py"
    file.write_text(EPOCHS, encoding="utf-8")
    reference = WorkloadReference(file=str(file), search_path=(str(tmp_path),))
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(file)))
    place = (str(file), 5) if reads_a_dataset else None
    found = []
    scope = {
        "probe": lambda: found.append(reach._epochs_range(SimpleNamespace(place=place), reference)),
        "reads_here": False,
    }
    exec(compile(EPOCHS, str(file), "exec"), scope)
    assert {site.line for site in found} == {line}


class Dataset:
    """Six batches of eight examples."""

    element_spec = "eight examples"

    def __iter__(self):
        return Iterator(6)


class Iterator:
    """What reads them."""

    def __init__(self, batches):
        self.left = batches

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return SimpleNamespace(shape=(8,))


class Optimizer:
    """Updates nothing."""

    def apply(self, *_):
        """One update."""


class Model:
    """Trains nothing."""

    optimizer = Optimizer()

    def train_on_batch(self, x):
        """One step."""


class Unused:
    """A class of TensorFlow's that the loops here do not use."""

    def __call__(self):
        """Do nothing."""

    def run(self):
        """Do nothing."""

    experimental_distribute_dataset = distribute_datasets_from_function = run


class Steps(Hooks):
    """Notes the steps and epochs that are seen."""

    def __init__(self):
        self.seen = []

    def stepped(self, examples, logs):
        self.seen.append(examples)

    def epoch_ended(self):
        self.seen.append("end")


@pytest.fixture
def watched(monkeypatch):
    """What watches the loops of a test, and what is seen of them."""
    for kind in (Dataset, Iterator, Optimizer, Model, Unused):
        for name, value in list(vars(kind).items()):
            if callable(value):
                monkeypatch.setattr(kind, name, value)  # undone afterwards
    classes = SimpleNamespace(datasets=(Dataset,), iterators=(Iterator,), function=Unused, strategy=Unused)
    monkeypatch.setattr(loop_watch, "loop_classes", lambda tf: classes)
    tf = SimpleNamespace(nest=SimpleNamespace(flatten=lambda element, expand_composites: [element]))
    keras = SimpleNamespace(__name__="keras", optimizers=SimpleNamespace(Optimizer=Optimizer), Model=Model)
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    monkeypatch.setitem(sys.modules, "keras", keras)
    hooks = Steps()
    wrappers = Wrappers(Settings(), hooks, "/")
    watch = LoopWatch(wrappers, ScriptFacts(trains=Trains.LOOP, baseline={}))
    watch.install(tf)
    watch.install_keras(keras)
    return watch, hooks.seen


@pytest.fixture
def steps(watched):
    """What is seen of the loops of a test."""
    return watched[1]


def test_a_loop_goes_on_with_the_element_that_it_keeps(watched):
    (watch, seen), elements = watched, []
    for element in Dataset():
        Optimizer().apply()
        elements.append(element)
        watch.keeps_element = 2 <= len(elements) < 9
    assert all(element is elements[1] for element in elements[1:9])
    assert len({*map(id, elements)}) == 6
    assert seen == [8] * 13 + ["end"]


@pytest.mark.parametrize(("device", "named"), [("/device:GPU:0", True), ("/device:CPU:0", False)])
def test_reading_a_tensor_of_a_gpu_in_each_step_is_noted(watched, device, named):
    (watch, _), optimizer = watched, Optimizer()
    for number, _ in enumerate(Dataset()):
        optimizer.apply()
        watch._note_read(lambda tensor: None, SimpleNamespace(device=device))
        if number == 2:
            reads = [watch._note_read(lambda tensor: None, SimpleNamespace(device=device)) for _ in range(2)]
            assert reads == [None, None]
    assert [kind for kind, _ in watch.slow_lines()] == ["reads"] * named


@pytest.mark.parametrize("batches", [2, 99])
def test_a_validation_before_the_first_update_hides_no_dataset(watched, batches):
    watch, seen = watched
    for index, _ in enumerate(Dataset()):
        if not index:
            assert list(itertools.islice(Dataset(), batches))
        Optimizer().apply()
    assert isinstance(watch.dataset, Dataset)
    assert seen == [8] * 6 + ["end"]


def test_another_loop_that_updates_gets_all_its_elements(watched):
    """Within a step, and after the loop whose element is kept was left."""
    (watch, _), read = watched, []
    for _ in range(2):
        for number, _ in enumerate(Dataset()):
            Optimizer().apply()
            watch.keeps_element = True
            for element in itertools.islice(Dataset(), 9):
                Optimizer().apply()
                read.append(element)
            if number:
                break
    for element in itertools.islice(Dataset(), 9):
        Optimizer().apply()
        read.append(element)
    assert len({*map(id, read)}) == len(read) == 30


def test_a_marked_step_counts_once_beside_other_iterators(watched):
    watch, seen = watched
    held = iter(Dataset())
    assert next(held) is not None
    for _ in watch.explicit(Dataset()):
        Optimizer().apply()
        assert len(list(itertools.islice(Dataset(), 2))) == 2
    assert seen == [8] * 6 + ["end"]


def test_a_validation_within_a_loop_that_keeps_its_element_ends(watched):
    watch, _ = watched
    for number, _ in enumerate(Dataset()):
        Optimizer().apply()
        watch.keeps_element = number < 3
        if number == 2:
            assert len(list(itertools.islice(Dataset(), 99))) == 6


def test_a_loop_that_waits_for_another_element_gets_it(watched):
    (watch, seen), elements = watched, []
    watch.keeps_element = True
    for element in Dataset():
        elements.append(element)
        if len(elements) in (3, 6):
            Optimizer().apply()
            watch.keeps_element = len(elements) == 3
    assert [number for number in range(1, 7) if elements[number] is elements[number - 1]] == [3]
    assert seen[-1] == "end"


@pytest.mark.parametrize(("epoch_begins", "found"), [(False, 2.0), (True, None)])
def test_calls_after_a_first_one_are_timed_within_an_epoch(epoch_begins, found):
    progress = SimpleNamespace(calls=5, training=SimpleNamespace(synchronise=lambda: None))
    answers = []

    def close():
        clock = SimpleNamespace(progress=progress, now=itertools.count(10, 2).__next__)
        answers.append((yield from timed_calls(clock, 7.0)))

    for _ in close():
        progress.calls = 0 if epoch_begins else 5
    assert answers == [found]


def test_compiled_code_is_found_where_it_is_pythons():
    class Step:
        def __call__(self):
            """One step."""

    plain, written = Step(), Step.__call__.__code__
    assert loop_watch._code_of(SimpleNamespace(python_function=plain)) is written
    Step.__call__ = SimpleNamespace(python_function=Step.__call__)  # as tf.function makes of it
    assert loop_watch._code_of(SimpleNamespace(python_function=plain)) is written
    assert loop_watch._code_of(SimpleNamespace(python_function=len)) is None


def test_what_a_script_does_between_some_steps_is_no_wait():
    session = LoopSession.__new__(LoopSession)
    session._watch, session._waited, session._measured = SimpleNamespace(by_call=False), 0.1, 1.0
    session._shares_reading = False
    progress = SimpleNamespace(calls=5, training=SimpleNamespace(synchronise=lambda: None))
    slices = SimpleNamespace(usual_call_seconds=4.0, call_seconds=40.0)
    clock = SimpleNamespace(progress=progress, now=itertools.count(10, 2).__next__, slices=slices)
    answers = []

    def close():
        answers.append((yield from session.close(Finish(input_wait_seconds=1.0), clock)))

    assert len(list(close())) == 3
    assert answers == [{"input_wait_fraction": 0.5}]


def zipped():
    yield from zip(Dataset(), Dataset(), strict=True)


def read_in_two_lines():
    first = iter(Dataset())
    second = iter(Dataset())
    for element in first:
        yield element, next(second)


@pytest.mark.parametrize("elements", [Dataset, zipped, read_in_two_lines])
def test_each_element_is_a_step_where_several_make_one_update(steps, elements):
    optimizer = Optimizer()
    for _ in range(2):
        for index, _ in enumerate(elements()):
            if index % 3 == 2:
                optimizer.apply()
    assert steps == ([8] * 6 + ["end"]) * 2


@pytest.mark.parametrize("batches", [2, 99])
def test_a_validation_amid_an_update_loses_no_element(watched, batches):
    watch, seen = watched
    for index, _ in enumerate(Dataset()):
        if index % 3 == 2:
            Optimizer().apply()
        elif index % 3 == 1:
            assert list(itertools.islice(Dataset(), batches))
    assert seen == [8] * 6 + ["end"]
    assert watch.reads_several == (batches < 6), "what is read to its end is a validation"


def test_what_is_read_without_an_update_is_no_step(steps):
    optimizer = Optimizer()
    for _ in Dataset():
        pass
    for _ in Dataset():
        optimizer.apply()
    for _ in Dataset():
        pass
    assert steps == [8] * 6 + ["end"]


def test_a_step_without_a_dataset_is_an_update(steps):
    model = Model()
    for _ in range(3):
        model.train_on_batch(SimpleNamespace(shape=(4,)))
    assert steps == [4] * 3


@pytest.mark.parametrize("pairs", [zipped, read_in_two_lines])
def test_a_step_reads_several_iterators(watched, pairs):
    (watch, seen), elements = watched, []
    for _ in range(2):
        for pair in pairs():
            Optimizer().apply()
            elements.append(pair)
            watch.keeps_element = len(elements) in (8, 9)  # in the second pass
    assert seen[:13] == [8] * 6 + ["end"] + [8] * 6
    kept = [elements[index][side] is elements[index - 1][side] for index in range(8, 11) for side in (0, 1)]
    assert kept == [True] * 4 + [False] * 2
    assert watch.reads_several


@pytest.mark.parametrize(
    ("order", "reads_several"),
    [(["train", "read"], False), (["read", "train"], True), (["train", "read", "train"], True)],
)
def test_a_batch_read_after_each_update_is_no_part_of_it(watched, order, reads_several):
    watch, _ = watched
    held, trained = iter(Dataset()), Dataset()
    for _ in trained:
        for act in order:
            if act == "train":
                Optimizer().apply()
            else:
                assert next(held)
    assert watch.reads_several == reads_several
    assert watch.dataset is trained


def test_the_loop_of_a_step_that_another_iterator_ends_is_found(watched):
    watch, _ = watched
    watch.eager = SimpleNamespace(note_update=lambda optimizer, element: None)
    held = iter(Dataset())
    for _ in Dataset():
        Optimizer().apply()
        assert next(held)
    line = test_the_loop_of_a_step_that_another_iterator_ends_is_found.__code__.co_firstlineno + 4
    assert watch.loop.line.endswith(f"test_script_training.py, line {line}")
    assert watch.loop.counted == ""


def test_a_pass_over_two_datasets_begins_once(steps, monkeypatch):
    monkeypatch.setattr(Steps, "epoch_began", lambda hooks: hooks.seen.append("began"))
    for _ in range(3):
        for _ in zipped():
            Optimizer().apply()
    assert [steps.count("began"), steps.count("end")] == [2, 3]


def test_a_validation_between_steps_loses_none(watched):
    watch, seen = watched
    for index, _ in enumerate(Dataset()):
        Optimizer().apply()
        if index % 2:
            assert len(list(itertools.islice(Dataset(), 4))) == 4
    assert seen == [8] * 6 + ["end"]
    assert not watch.reads_several


def test_a_pass_that_the_script_leaves_counts_its_last_step(steps):
    for _ in range(2):
        for _ in itertools.islice(Dataset(), 3):
            Optimizer().apply()
    assert next(iter(Dataset())) is not None
    assert steps == [8] * 6


def test_iterator_created_per_step_is_noted_and_hides_no_steps(watched):
    (watch, seen), model = watched, Model()
    for _ in range(3):
        model.train_on_batch(next(iter(Dataset())))
    assert [kind for kind, _ in watch.slow_lines()] == ["iterates"]
    assert seen == [8] * 3
    reasons = reach._not_reached_by_loop(watch, None)
    assert {name for name, why in reasons.items() if why == watch.why_unseen} >= {"prefetch", "cache", "batched_map"}
    assert watch.why_unseen.endswith("starts the pipeline anew in each step: make one iterator before the loop")


def test_an_iterator_made_per_step_beside_arrays_hides_no_dataset(watched):
    (watch, _), model = watched, Model()
    for _ in range(3):
        model.train_on_batch(SimpleNamespace(shape=(4,)))
        assert next(iter(Dataset()))
    assert [kind for kind, _ in watch.slow_lines()] == ["iterates"]
    assert watch.why_unseen == ""


def test_iterators_created_per_step_of_two_optimizers_are_noted(watched):
    optimizers = [Optimizer(), Optimizer()]
    for _ in range(4):
        assert next(iter(Dataset()))
        for optimizer in optimizers:
            optimizer.apply()
    assert [kind for kind, _ in watched[0].slow_lines()] == ["iterates"]


def test_an_iterator_of_each_epoch_is_usual(watched):
    for _ in range(3):
        for _ in Dataset():
            Optimizer().apply()
    assert not list(watched[0].slow_lines())


def test_a_sample_that_was_read_before_hides_no_steps(steps):
    assert next(iter(Dataset())) is not None
    model = Model()
    for _ in range(3):
        model.train_on_batch(SimpleNamespace(shape=(4,)))
    assert steps == [4] * 3
