"""Which eager step of a custom loop can be compiled, and what in it a graph would not repeat."""

import contextlib
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

from autotune.data.facts import Site
from autotune.script.changing_state import OwnSource
from autotune.script.eager_steps import EagerSteps

LOOP = """
import logging, math, random, time
import numpy as np

class Agent:
    scale, seen, keep, draw, net, drawn = 0.5, [], [].append, random.random, layer, iter([1])
    def __init__(self):
        self.count, self.beta, self.history, self.rows = 0, 1.0, [], [1, 2]

    def update(self, x, y, bag=[]):
        with tape():
            loss = self.loss(x, y)
            {line}
        apply(self)
        return loss

    def loss(self, x, y):
        return self.rows[0] * math.pi + 2 * np.log(2 * np.pi){deeper}

def step(x, y):
    with tape():
        loss = agent.loss(x, y)
    apply(agent)

agent, log = Agent(), logging.getLogger("train")
for epoch, (x, y) in enumerate(data):
    {between}
    agent.update(x, y)
"""


class Tensor:
    """What a function is given."""

    __module__, shape = "tensorflow.python", ()

    def numpy(self):
        return 1.0

    def __float__(self):
        return 1.0

    def __format__(self, spec):
        return "tensor"


def found_in(folder, source, eager=None, **given):
    """What is found in a script after three steps: the sites, and why others are held."""
    file, answers = folder / "train.py", []
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    eager, read = eager or EagerSteps(str(folder)), []
    eager._is_users = str(file).__eq__  # the names below stand for TensorFlow's
    tf = ModuleType("tensorflow")
    tf.random, tf.summary = ModuleType("tensorflow.random"), ModuleType("tensorflow.summary")
    tf.random.normal = tf.random.stateless_normal = lambda *_, **__: Tensor()

    def data():
        for _ in range(3):
            read.append(object())
            yield Tensor(), Tensor()

    class Reader:
        def __iter__(self):
            self._pairs = data()
            return self

        def __next__(self):
            try:
                return next(self._pairs)
            except StopIteration:
                sites, held = eager.find_sites(OwnSource([file], str(folder)), [layer], **given)
                answers.append((sites, "; ".join(held)))
                raise

    names = {"tape": contextlib.contextmanager(lambda: iter([eager.note_tape(lambda: None)])), "data": Reader()}
    names["layer"] = layer = SimpleNamespace(rate=0.5, name="dropout", variables=(), apply_gradients=None)
    names |= {
        "SimpleNamespace": SimpleNamespace,
        "apply": lambda optimizer: eager.note_update(optimizer, read[-1]),
        "tf": tf,
        "__name__": "__main__",
    }
    try:
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    finally:
        sys.setprofile(None)
    return answers[0]


def loop(line="pass", between="pass", deeper=""):
    """A loop with this line in the step, this one between steps, and this in what the step calls."""
    return LOOP.format(line=line, between=between, deeper=deeper)


def test_the_function_around_tape_and_update_is_found(tmp_path):
    update = Site(file="train.py", function="Agent.update", call="update", order=0, line=10)
    assert found_in(tmp_path, loop()) == ((update,), "")
    deeper = loop().replace("apply(self)", "self.apply()") + "\n"
    deeper = deeper.replace("    def loss(", "    def apply(self):\n        apply(self)\n\n    def loss(")
    assert found_in(tmp_path, deeper) == ((update,), "")


CRITIC = """
def value(x):
    with tape():
        {line}
    apply(agent)

agent, log"""


def test_each_function_of_a_step_is_compiled_or_held(tmp_path):
    two = loop(between="value(x)").replace("\nagent, log", CRITIC)
    sites, why = found_in(tmp_path, two.format(line="pass"))
    assert ([site.call for site in sites], why) == (["value", "update"], "")
    sites, why = found_in(tmp_path, two.format(line="print(x)"))
    assert [site.call for site in sites] == ["update"]
    assert why.startswith("train.py, line 27: value() calls print()")


@pytest.mark.parametrize(
    ("between", "awaited"),
    [("value(x)", False), ("pass", False), ("if epoch > 8: value(x)", True), ("if epoch > 8: agent.loss(x, y)", False)],
)
def test_a_step_that_the_script_calls_later_is_awaited(tmp_path, between, awaited):
    eager = EagerSteps(str(tmp_path))
    source = loop(between=between).replace("\nagent, log", CRITIC.format(line="pass"))
    found_in(tmp_path, source.replace("with tape()", "with (GradientTape := tape)()"), eager)
    assert eager.are_all_seen is not awaited
    whole = compile((tmp_path / "train.py").read_text(encoding="utf-8"), tmp_path / "train.py", "exec")
    eager.compiled |= {code for code in whole.co_consts if getattr(code, "co_name", "") == "value"}
    assert eager.are_all_seen


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("self.count += 1", "changes self.count"),
        ("self.history.append(loss)", "calls self.history.append()"),
        ("bag.append(loss)", "calls bag.append()"),
        ("Agent.seen[0:] = [loss]", "changes Agent.seen[0:]"),
        ("print(loss)", "calls print()"),
        ("x = vars(self)['count']", "calls vars()"),
        ("x = getattr(self, 'co' + 'unt')", "calls getattr()"),
        ("log.info('%s', loss)", "calls log.info()"),
        ("loss = float(y)", "calls float()"),
        ("loss = y.numpy()", "calls y.numpy()"),
        ("loss = np.asarray(y)", "calls np.asarray()"),
        ("x = np.random.normal()", "calls np.random.normal()"),
        ("x = random.random()", "calls random.random()"),
        ("began = time.time()", "calls time.time()"),
        ("x = tf.random.normal([3])", "draws by tf.random.normal()"),
        ("x = tf.random.normal([3], seed=4)", "gives tf.random.normal() a seed"),
        ("global epoch; epoch = 0", "changes epoch"),
        ("loss = x if isinstance(x, np.ndarray) else y", "calls isinstance()"),
        ("x = [*self.drawn]", "reads the iterator self.drawn"),
        ("self.keep(loss)", "calls self.keep()"),
        ("x = self.draw()", "calls self.draw()"),
        ("loss = f'{loss:.3f}'", "formats a value in f'{loss:.3f}'"),
        ("loss = '{}'.format(loss)", "calls '{}'.format()"),
        ("assert loss > 0", "asserts loss > 0"),
        ("import random as r; x = r.random()", "calls r.random()"),
        ("from random import gauss; x = gauss(0, 1)", "calls gauss()"),
        ("import numpy.random as r; x = r.rand()", "calls r.rand()"),
        ("pick = random.choice; x = pick([1, 2])", "calls pick()"),
        ("exec('def twice(x): return x + x', globals()); twice(1)", "calls exec()"),
    ],
)
def test_what_a_graph_would_not_repeat_is_named(tmp_path, line, what):
    sites, why = found_in(tmp_path, loop(line), reseeds=True)
    assert sites == ()
    assert why.startswith(f"train.py, line 13: update() {what}")


@pytest.mark.parametrize(
    ("between", "deeper", "what"),
    [
        ("agent.beta = 0.9", " * self.beta", "reads self.beta"),
        ("agent.beta = 0.9", " * getattr(self, 'beta')", "reads self.beta"),
        ("agent.beta = 0.9", " * self.__dict__['beta']", "reads self.__dict__"),
        ("agent.beta = 0.9 if epoch > 8 else agent.beta", " * self.beta", "reads self.beta"),
        ("factor = 0.5", " * factor", "reads factor"),
        ("pass", " * (1 if epoch < 5 else 2)", "reads epoch"),
        ("agent.rows.append(3)", "", "reads self.rows"),
        ("setattr(agent, 'beta', 0.9)", " * self.beta", "reads self.beta"),
        ("agent.net = agent.net if epoch < 9 else None", " * self.net.rate", "reads self.net"),
    ],
)
def test_a_value_that_changes_between_steps_is_named(tmp_path, between, deeper, what):
    sites, why = found_in(tmp_path, loop(between=between, deeper=deeper))
    assert sites == ()
    assert why.startswith(f"train.py, line 18: loss() {what}, which the script changes")


UPDATE = "agent.update(x, y)"
NOTE = "\ndef note(x):\n    print(x)\nscale = 2.0\nagent, log"


@pytest.mark.parametrize(
    ("edits", "what"),
    [
        ({UPDATE: "agent.update(epoch, y)"}, "line 10: update() is given x as a Python number"),
        ({UPDATE: "agent.update(x, 0.1 * epoch)"}, "line 10: update() is given y as a Python number"),
        ({"    def update": "    @wrap\n    def update"}, "line 10: update() is decorated by wrap"),
        ({UPDATE: "with tape():\n        apply(agent)"}, "line 29: the eager step stands in its loop"),
        ({UPDATE: "exec('def made(x):\\n with tape(): apply(x)'); made(x)"}, "the source of made() cannot be found"),
        ({UPDATE: f"layer.trainable = epoch > 1\n    {UPDATE}"}, "line 28: sets .trainable as it trains"),
        ({UPDATE: f"layer.rate = epoch / 9\n    {UPDATE}"}, "line 28: sets .rate as it trains"),
        ({UPDATE: f"SimpleNamespace()\n    {UPDATE}"}, "line 28: makes an optimizer as it trains"),
        ({UPDATE: f"{UPDATE}\nagent.beta = 2\n{UPDATE}", "math.pi": "self.beta"}, "line 18: loss() reads self.beta"),
        ({"math.pi": "(scale if x else note(x))", "\nagent, log": NOTE}, "line 26: note() calls print()"),
        ({"            pass": "            try: pass\n            except: pass"}, "line 14: update() has an except"),
    ],
)
def test_a_step_of_another_form_is_held(tmp_path, edits, what):
    source = "def wrap(f): return lambda *given: f(*given)" + loop()
    for old, new in edits.items():
        source = source.replace(old, new)
    sites, why = found_in(tmp_path, source)
    assert sites == ()
    assert what in why


@pytest.mark.parametrize(
    ("line", "between"),
    [
        ("logs: dict = {}; logs['loss'] = loss", "pass"),
        ("parts = [x]; parts.append(y)", "pass"),
        ("x = tf.random.stateless_normal([3], seed=(1, 2))", "pass"),
        ("scale = float(self.scale) * math.sqrt(2.0)", "agent.steps = epoch"),
        ("pass", "print(epoch)"),
        ("inner = lambda: (x, loss); inner()", "loss = x"),
        ("parts = int(self.scale), 2", "agent.update(x, 0.5)"),
        ("pass", "agent.rate = epoch"),
        ("x = tf.random.normal([3])", "pass"),
        ("assert x.shape == y.shape, f'{x} and {y}'", "pass"),
        ("name = f'layer {self.scale}'", "pass"),
        ("import math as m; x = m.sqrt(2.0)", "pass"),
        ("scale = getattr(self, 'scale')", "agent.steps = epoch"),
    ],
)
def test_what_a_graph_repeats_holds_nothing(tmp_path, line, between):
    eager = EagerSteps(str(tmp_path))
    sites, why = found_in(tmp_path, loop(line, between), eager)
    assert ([site.call for site in sites], why) == (["update"], "")
    assert eager.draws == (["train.py, line 13"] if "random.normal" in line else [])
