"""What ends a training loop, its data or a count of steps: on loops over data that look around while they are read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.script.call_sites import running_frames
from autotune.script.loop_ends import StepLoop, find_step_loop

STEPS = 3


class Data:
    """Batches, which note at their third which loop reads them. Endless, or read over and over, as the loop has it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loops, self.read = str(folder), [], 0

    def __iter__(self) -> Iterator[float]:
        return Batches(self)

    def __len__(self) -> int:
        return 6

    cardinality = __len__


class Batches:
    """One pass over the data."""

    def __init__(self, data: Data) -> None:
        self.data, self.left = data, 6

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        self.data.read += 1
        if self.data.read == STEPS:
            is_data = lambda value: isinstance(value, Data)  # noqa: E731
            self.data.loops.append(find_step_loop(running_frames(), self.data.folder, is_data))
        if not self.left:
            raise StopIteration
        self.left -= 1
        return 1.0


def loop_of(folder: Path, source: str) -> StepLoop | None:
    """The loop that a script runs at its third step."""
    data, file = Data(folder), folder / "train.py"
    file.write_text(source, encoding="utf-8")
    names = {"__name__": "__main__", "batches": data, "step": lambda batch: batch, "optimizer": Optimizer(data)}
    exec(compile(source, str(file), "exec"), names)
    (found,) = data.loops
    return found


class Optimizer:
    """Counts what was read as updates."""

    def __init__(self, data: Data) -> None:
        self.data = data

    @property
    def iterations(self) -> int:
        """So far."""
        return self.data.read

    def apply_gradients(self, pairs: object) -> None:
        """One update."""


COUNTED = {
    "range": "it = iter(batches)\nfor i in range(5):  # here\n    step(next(it))\n",
    "range_in_epochs": "for e in range(2):\n    it = iter(batches)\n    for i in range(5):  # here\n"
    "        step(next(it))\n",
    "comprehension": "it = iter(batches)\n[step(next(it)) for i in range(5)]  # here\n",
    "while": "it, n = iter(batches), 0\nwhile n < 5:  # here\n    step(next(it))\n    n += 1\n",
    "while_around": "n = 0\nwhile n < 9:  # here\n    for b in batches:\n        step(b)\n        n = n + 1\n",
    "iterations": "while optimizer.iterations < 9:  # here\n    for b in batches:\n        step(b)\n",
    "iterations_read": "for b in batches:\n    done = int(optimizer.iterations)\n    step(b)\n"
    "    if done > 4:  # here\n        break\n",
    "break": "for e in range(2):\n    for i, b in enumerate(batches):\n        if i >= 4:  # here\n            break\n"
    "        step(b)\n",
    "return": "def train():\n    n = 0\n    for b in batches:\n        step(b)\n        n += 1\n"
    "        if n == 4:  # here\n            return\ntrain()\n",
    "two_breaks": "n = 0\nfor e in range(9):\n    for b in batches:\n        step(b)\n        n += 1\n"
    "    if n > 7:  # here\n        break\n",
    "first_batch_only": "for e in range(9):\n    for b in batches:\n        step(b)\n        break  # here\n",
    "zip": "for i, b in zip(range(5), batches):  # here\n    step(b)\n",
    "islice": "import itertools\nfor b in itertools.islice(batches, 5):  # here\n    step(b)\n",
    "helper": "it = iter(batches)\ndef get():\n    return next(it)\nfor i in range(5):  # here\n    step(get())\n",
    "generator": "def forever():\n    while True:\n        for b in batches:\n            yield b\n"
    "for i, b in enumerate(forever()):\n    if i == 5:  # here\n        break\n    step(b)\n",
    "next_of_generator": "def pairs():\n    for b in batches:\n        yield b\n"
    "it = pairs()\nfor i in range(5):  # here\n    step(next(it))\n",
    "starts_again": "it, n = iter(batches), 0\nwhile n < 9:  # here\n    try:\n        step(next(it))\n"
    "    except StopIteration:\n        it = iter(batches)\n    n += 1\n",
}
BY_DATA = {
    "for": "for e in range(2):\n    for b in batches:  # steps\n        step(b)\n",
    "logs": "for e in range(2):\n    for i, b in enumerate(batches):  # steps\n        step(b)\n"
    "        if i % 2 == 0:\n            print(i)\n",
    "comprehension": "for e in range(2):\n    [step(b) for b in batches]  # steps\n",
    "sum_of_generator": "for e in range(2):\n    sum(step(b) for b in batches)  # steps\n",
    "early_stopping": "bad = 0\nfor e in range(9):\n    for b in batches:  # steps\n        loss = step(b)\n"
    "    bad += 1\n    if bad > 2:\n        break\n",
    "loss_reached": "for e in range(2):\n    for b in batches:  # steps\n        if step(b) < 0.5:\n"
    "            break\n",
    "counts_examples": "seen = 0\nfor e in range(2):\n    for b in batches:  # steps\n        step(b)\n"
    "        seen += len('ab')\n"
    "    if seen > 10:\n        break\n",
    "function": "def train_epoch(data):\n    for b in data:  # steps\n        step(b)\nfor e in range(2):\n"
    "    train_epoch(batches)\n",
    "generator": "def pairs():\n    for b in batches:  # steps\n        yield b\nfor e in range(2):\n"
    "    for b in pairs():\n"
    "        step(b)\n",
    "next_to_the_end": "for e in range(2):\n    it = iter(batches)\n    while True:  # steps\n        try:\n"
    "            step(next(it))\n        except StopIteration:\n            break\n",
    "next_or_none": "for e in range(2):\n    it = iter(batches)\n"
    "    while (b := next(it, None)) is not None:  # steps\n"
    "        step(b)\n",
    "epochs_by_while": "e = 0\nwhile e < 2:\n    for b in batches:  # steps\n        step(b)\n    e += 1\n",
    "other_function_around": "for run in range(1):\n    def train():\n        for b in batches:  # steps\n"
    "            step(b)\n"
    "    train()\n",
}


def line_with(source: str, mark: str) -> str:
    """Where a mark stands."""
    return f"train.py, line {next(n for n, text in enumerate(source.splitlines(), 1) if text.endswith(mark))}"


@pytest.mark.parametrize("name", COUNTED)
def test_loop_ended_by_step_count_is_found_with_counting_line(tmp_path, name):
    found = loop_of(tmp_path, COUNTED[name])
    assert found is not None
    assert found.counted == line_with(COUNTED[name], "# here")


@pytest.mark.parametrize("name", BY_DATA)
def test_a_loop_that_reads_its_data_to_the_end_counts_nothing(tmp_path, name):
    assert loop_of(tmp_path, BY_DATA[name]) == StepLoop(line_with(BY_DATA[name], "# steps"), "")


@pytest.mark.parametrize(
    ("source", "is_scaled"),
    [
        ("it = iter(batches)\nfor i in range(len(batches)):\n    step(next(it))\n", True),
        ("n = len(batches)\nit = iter(batches)\nfor i in range(n):\n    step(next(it))\n", True),
        (
            "n = int(batches.cardinality())\nit, i = iter(batches), 0\nwhile i < n:\n    step(next(it))\n    i += 1\n",
            True,
        ),
        ("rows = [1] * 5\nit = iter(batches)\nfor i in range(len(rows)):\n    step(next(it))\n", False),
        ("n = len(batches)\nn = 5\nit = iter(batches)\nfor i in range(n):\n    step(next(it))\n", False),
        ("it, i = iter(batches), 0\nwhile i < len(batches) and i < 5:\n    step(next(it))\n    i += 1\n", False),
    ],
)
def test_a_count_that_is_the_number_of_batches_is_scaled(tmp_path, source, is_scaled):
    found = loop_of(tmp_path, source)
    assert found is not None
    assert (found.is_scaled, bool(found.counted)) == (is_scaled, not is_scaled)


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("if i % 2 == 0:  # here\n            evaluate(b)", True),
        ("if (i + 1) % 2 == 0 and i:  # here\n            evaluate(b)", True),
        ("if i % 2 == 0:  # here\n            print(i, float(b))", False),
        ("if i % 2 == 0:  # here\n            optimizer.apply_gradients(zip([b], [b]))", False),
        ("if b > 0:  # here\n            evaluate(b)", False),
    ],
)
def test_work_at_every_so_many_steps_is_found_but_for_logs(tmp_path, body, is_found):
    source = (
        f"evaluate = step\nfor e in range(2):\n    for i, b in enumerate(batches):\n        {body}\n        step(b)\n"
    )
    found = loop_of(tmp_path, source)
    assert found is not None
    assert found.counted == ""
    assert found.periodic == (line_with(source, "# here") if is_found else "")


def test_a_step_outside_of_any_loop_has_none(tmp_path):
    assert loop_of(tmp_path, "it = iter(batches)\nstep(next(it))\nstep(next(it))\nstep(next(it))\n") is None
