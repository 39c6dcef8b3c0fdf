"""Steps that stand in their loops: which are moved into a function, and that the script then does the same."""

import ast
import contextlib
import sys
import textwrap
from types import SimpleNamespace

import pytest

from autotune.script.changing_state import OwnSource
from autotune.script.eager_steps import EagerSteps
from autotune.script.inline_steps import find_inline_steps, is_moved, move_inline_steps

STEP = """
with tf.GradientTape() as tape:
    loss = model * x
optimizer.apply_gradients(tape.gradient(loss))
"""


class Tape(contextlib.nullcontext):
    """Stands for a tape and an optimizer: what they are given is written down."""

    GradientTape, gradient = staticmethod(lambda **_: Tape()), staticmethod(lambda loss: -loss)

    def __enter__(self):
        return self

    def __init__(self, seen=None):
        super().__init__()
        self.seen = [] if seen is None else seen

    def apply_gradients(self, gradients):
        self.seen.append(gradients)

    apply = update_state = apply_gradients


def indented(text, by):
    return textwrap.indent(text.strip("\n"), " " * by).lstrip()


def run(source, *, moved):
    """What a script has applied and printed."""
    tree, seen = ast.parse(source), []
    if moved:
        move_inline_steps(tree)
    exec(
        compile(tree, "train.py", "exec"),
        {"tf": Tape, "Tape": Tape, "optimizer": Tape(seen), "print": seen.append, "model": 3},
    )
    return seen


SCRIPTS = {
    "of_a_script": (
        f"""
        for epoch in range(2):
            for step, x in enumerate([1.0, 2.0]):
                {indented(STEP, 16)}
                if step % 2 == 0:
                    print((epoch, loss))
        """,
        "loss = train_step(x)",
    ),
    "nothing_is_read_later": (f"for x in [1.0, 2.0]:\n    {indented(STEP, 4)}\n", "train_step(x)"),
    "of_a_main_function": (
        f"""
        def main():
            scale, total = 2.0, 0.0
            for x in [1.0, 2.0]:
                {indented(STEP.replace("model", "scale"), 16)}
                total += loss
            print(total)
        main()
        """,
        "loss = train_step(x)",
    ),
    "of_a_function_that_is_called_often": (
        f"""
        def train(model, data):
            for x in data:
                {indented(STEP, 16)}
        for epoch in range(3):
            train(epoch, [1.0, 2.0])
        """,
        "train_step(x, model)",
    ),
    "of_a_method": (
        f"""
        class Trainer:
            model = 2
            def fit(self, data):
                for x in data:
                    {indented(STEP.replace("model", "self.model"), 20)}
        Trainer().fit([1.0])
        """,
        "train_step(x, self)",
    ),
    "carries_a_value_on": (
        """
        total = 1.0
        for x in [1.0, 2.0]:
            with tf.GradientTape() as tape:
                total += model * x
            optimizer.apply(tape.gradient(total))
        """,
        "total = train_step(total, x)",
    ),
    "of_two_tapes": (
        f"for x in [1.0, 2.0]:\n    {indented(STEP, 4)}\n    y = x + 1\n    {indented(STEP.replace('x', 'y'), 4)}\n"
        "    print(loss)\n",
        "loss = train_step(x)",
    ),
    "with_inner_variables": (
        """
        g = 7
        for x in [1.0, 2.0]:
            with tf.GradientTape(persistent=True) as tape:
                loss = sum([g * x for g in range(3)]) + (lambda x: x)(1)
                for part in (1, 2):
                    loss = loss + part
            optimizer.apply_gradients(tape.gradient(loss))
            del tape
        print(g)
        """,
        "train_step(x)",
    ),
    "beside_a_function_of_that_name": (
        f"""
        def train_step():
            loss = 1
            return loss
        for x in [1.0]:
            {indented(STEP, 12)}
        """,
        "train_step_2(x)",
    ),
    "of_an_inner_loop_only": (
        f"""
        for x in [1.0]:
            for y in [2.0]:
                {indented(STEP.replace("x", "y"), 16)}
            for z in [3.0]:
                {indented(STEP.replace("x", "z"), 16)}
        """,
        "train_step(y)",
    ),
    "of_a_function_that_records": (
        """
        def grad(model, x):
            with tf.GradientTape() as tape:
                loss = model * x
            return loss, tape.gradient(loss)
        for x in [1.0, 2.0]:
            loss, gradients = grad(model, x)
            optimizer.apply_gradients(gradients)
            print(loss)
        for x in [3.0]:
            optimizer.apply(grad(model, x)[1])
        """,
        "loss = train_step(x)",
    ),
    "with_metrics_that_live_on": (
        f"""
        mean, scores = Tape(), []
        for epoch in range(2):
            other = Tape()
            for x in [1.0, 2.0]:
                {indented(STEP, 16)}
                mean.update_state(loss)
                other.update_state(loss)
            scores.append(mean.seen + other.seen)
        print(scores)
        """,
        "loss = train_step(x)",
    ),
    "default_is_read_within": (
        """
        def main():
            for x in [1.0, 2.0]:
                scale = x + 1
                with tf.GradientTape() as tape:
                    loss = (lambda by=scale: by)()
                optimizer.apply(loss)
        main()
        """,
        "train_step(scale)",
    ),
    "default_is_read_later": (
        f"for x in [1.0, 2.0]:\n    {indented(STEP, 4)}\n    print((lambda loss=loss: loss)())\n",
        "loss = train_step(x)",
    ),
    "either_branch_sets_it": (
        """
        for x in [1.0, 2.0]:
            with tf.GradientTape() as tape:
                if x > 1:
                    loss = x
                else:
                    loss = 3
            optimizer.apply(loss)
            print(loss)
        """,
        "loss = train_step(x)",
    ),
    "an_error_leads_elsewhere": (
        """
        batches = iter([1.0, 2.0])
        while True:
            try:
                x = next(batches)
            except StopIteration:
                break
            with tf.GradientTape() as tape:
                loss = sum(x for _ in range(2))
            optimizer.apply(loss)
        """,
        "train_step(x)",
    ),
    "a_match_sets_what_it_reads": (
        f"""
        def main():
            for pair in [(1.0, 2.0)]:
                match pair:
                    case (x, _):
                        pass
                {indented(STEP, 16)}
        main()
        """,
        "train_step(x)",
    ),
    "declares_a_type": (
        f"for x in [1.0]:\n    {indented(STEP, 4)}\n".replace("    loss =", "    loss: float\n        loss ="),
        "train_step(x)",
    ),
    "beside_an_argument_of_that_name": (
        f"def main(train_step=None):\n    for x in [1.0]:\n        {indented(STEP, 8)}\nmain()\n",
        "train_step_2(x)",
    ),
    "in_a_branch": (f"for x in [1.0, 2.0]:\n    if x > 1:\n        {indented(STEP, 8)}\n", "train_step(x)"),
}


@pytest.mark.parametrize(("source", "call"), SCRIPTS.values(), ids=SCRIPTS)
def test_moved_step_does_the_same(source, call):
    source = textwrap.dedent(source)
    assert find_inline_steps(ast.parse(source))[0].call == call
    assert run(source, moved=True) == run(source, moved=False) != []


HELD = {
    "break": "for x in [1.0]:\n    with tf.GradientTape() as tape:\n        break\n    optimizer.apply(0)\n",
    "return": "def main():\n    for x in [1.0]:\n        with tf.GradientTape() as tape:\n            return 1\n"
    "        optimizer.apply(0)\n",
    "its_tape_is_read": f"for x in [1.0]:\n    {indented(STEP, 4)}\n    print(tape)\n",
    "may_not_be_set": f"for x in [1.0]:\n    {indented(STEP, 4)}\n    if x:\n        pass\n".replace(
        "    loss = model * x", "    loss = 1\n        if x:\n            extra = 2"
    )
    + "    print(extra)\n",
    "not_yet_set": f"for x in [1.0]:\n    {indented(STEP, 4)}\n    late = 1\n".replace(
        "model * x", "late if x > 1 else 0"
    ),
    "global": f"count = 0\ndef main():\n    global loss\n    for x in [1.0]:\n        {indented(STEP, 8)}\n",
    "reads_what_may_not_be_set": f"""
for epoch in range(2):
    for x in [1.0]:
        if epoch:
            last = x
        {indented(STEP.replace("model * x", "last if epoch else x"), 8)}
""",
    "deletes_what_is_set_again": f"for x in [1.0]:\n    {indented(STEP, 4)}\n    del loss\n"
    "    loss = 1\n    print(loss)\n",
    "deletes_another": f"y = 1\nfor x in [1.0]:\n    {indented(STEP, 4)}\n    del y\n",
    "names_within_an_expression": f"y = 1\nfor x in [1.0]:\n    {indented(STEP, 4)}\n".replace(
        "model * x", "(y := y + x)"
    ),
    "may_be_suppressed": f"for x in [1.0]:\n    {indented(STEP, 4)}\n    late = 1\n    print(late)\n".replace(
        "    loss =", "    with contextlib.suppress(Exception):\n            late = x\n        loss ="
    ),
    "its_function_reads_what_it_sets": f"""
def main():
    def double():
        return half * 2
    for x in [1.0]:
        {indented(STEP.replace("    loss = model * x", "    half = x; loss = double()"), 8)}
""",
    "its_function_sets_what_it_reads": f"""
count = 0
def advance():
    global count
    count += 1
for x in [1.0]:
    count = x
    {indented(STEP.replace("model * x", "advance() or count"), 4)}
""",
    "a_function_reads_and_sets_it": f"""
def log():
    global loss
    print(loss)
    loss = 0
for x in [1.0]:
    {indented(STEP, 4)}
    log()
""",
    "a_handler_of_its_errors_reads_it": f"""
for x in [1.0]:
    try:
        {indented(STEP, 8)}
    except ValueError:
        print(loss)
""",
    "all_names_are_read_later": f"for x in [1.0]:\n    {indented(STEP, 4)}\n    print(locals()['loss'])\n",
    "private_name": f"""
class Trainer:
    def fit(self):
        for x in [1.0]:
            {indented(STEP.replace("model", "self.__model"), 12)}
""",
    "of_a_class": f"x = 1\nclass Trainer:\n    model = 2\n    for x in [1.0]:\n        {indented(STEP, 8)}\n",
    "calls_a_whole_step": f"def step(x):\n    {indented(STEP, 4)}\nfor x in [1.0]:\n    step(x)\n    other.apply(x)\n",
    "no_loop": f"def step(x):\n    {indented(STEP, 4)}\nstep(1.0)\n",
    "reads_all_names": f"for x in [1.0]:\n    {indented(STEP, 4)}\n".replace("model * x", "locals()['x']"),
    "in_a_class": f"class A:\n    def step(self, x):\n        {indented(STEP, 8)}\n",
}


@pytest.mark.parametrize("source", HELD.values(), ids=HELD)
def test_step_that_no_function_can_have_stays(source):
    tree = ast.parse(source)
    assert find_inline_steps(tree) == []
    before = ast.dump(tree)
    move_inline_steps(tree)
    assert ast.dump(tree) == before


@pytest.mark.parametrize(
    ("line", "count"), [("metric.update_state(loss)", 3), ("total.append(loss)", 2), ("del tape", 3)]
)
def test_step_ends_with_metrics_and_tape(line, count):
    source = (
        f"for x in [1.0]:\n    other = Metric()\n    {indented(STEP, 4)}\n    {line}\n    other.update_state(loss)\n"
    )
    assert len(find_inline_steps(ast.parse(source))[0].statements) == count


def test_moved_step_keeps_its_lines():
    """What fails in it is shown at its own line, and nothing else counts as moved."""
    source = f"def other():\n    pass\nfor x in [1.0]:\n    {indented(STEP, 4)}\n"
    tree = ast.parse(source)
    move_inline_steps(tree)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [is_moved(function) for function in functions] == [False, True]
    assert [statement.lineno for statement in functions[1].body] == [4, 6, 6]


def test_message_does_not_name_a_function_that_the_user_has_not(tmp_path):
    file, eager = tmp_path / "train.py", EagerSteps(str(tmp_path))
    file.write_text(f"for x in [1.0]:\n    {indented(STEP, 4)}\n", encoding="utf-8")
    tree, tf = ast.parse(file.read_text(encoding="utf-8")), SimpleNamespace(GradientTape=lambda: eager.note_tape(Tape))
    move_inline_steps(tree)
    optimizer = SimpleNamespace(apply_gradients=lambda _: eager.note_update(optimizer, object()))
    try:
        exec(compile(tree, str(file), "exec"), {"tf": tf, "optimizer": optimizer, "model": 3.0, "__name__": "__main__"})
        _, reasons = eager.find_sites(OwnSource([file], str(tmp_path)), [])
    finally:
        sys.setprofile(None)
    assert reasons == ["train.py, line 2: the step was called once only while it was looked at"]
