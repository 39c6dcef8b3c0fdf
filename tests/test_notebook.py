"""Notebooks as they are: their cells as a script with the same lines, refusals, sites, `run` and `show --diff`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_patch import changed_lines, recipe_of

from autotune.data.errors import ArgumentError, WorkloadError
from autotune.runtime.sources import describe_line
from autotune.script.call_sites import calls_in, functions_in
from autotune.script.loading import parse_reference
from autotune.script.notebook import open_notebook
from autotune.script.patch import script_diff

WAIT = "get_ipython().wait("


def write(file, *cells, counts=None, tags=(), **fields):
    """Write a notebook of code cells; a text cell begins with `#md`. `tags`: of the last cell."""
    written = []
    for cell in cells:
        kind = "markdown" if cell.startswith("#md") else "code"
        written.append({"cell_type": kind, "metadata": {}, "source": cell.splitlines(keepends=True)})
        if kind == "code":
            written[-1] |= {"outputs": [], "execution_count": counts and counts[len(written) - 1]}
    written[-1]["metadata"]["tags"] = list(tags)
    kernel = {"kernelspec": {"name": "python3", "language": "python"}}
    content = {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5, **fields}
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def opened(file, skip_cells=None, say=print):
    """The script that a notebook is translated to."""
    folder = file.parent / "translated"
    return Path(open_notebook(parse_reference(str(file)), folder, skip_cells, say).file)


def code_of(tmp_path, *cells):
    """The lines of the script that cells are translated to, without the first and the ends of cells."""
    lines = opened(write(tmp_path / "train.ipynb", *cells)).read_text(encoding="utf-8").splitlines()[1:]
    return [line for line in lines if line != "#"]


@pytest.fixture
def run(tmp_path):
    """Runs a notebook by `autotune run` with a recipe that changes nothing; returns how it ended."""

    def start(*cells, **fields):
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        file = write(folder / "train.ipynb", *cells, **fields)
        before = file.read_bytes()
        recipe_of(Path("train.py"), {"batch_size": 16}).save(tmp_path / "recipe.json")
        command = [sys.executable, "-W", "error", "-m", "autotune", "run", "recipe.json", "work/train.ipynb"]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        ended = subprocess.run(command, cwd=tmp_path, env=buffered, capture_output=True, text=True, check=False)
        assert file.read_bytes() == before
        assert sorted(path.name for path in folder.iterdir() if path.suffix != ".txt") == ["train.ipynb"]
        return ended

    return start


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("%matplotlib inline\nx = 1", ["None", "x = 1"]),
        ("\n%%time\n\nx = 1", ["", "", "", "x = 1"]),
        ("%%capture out\n%%timeit -n 3\nx = 1", ["out = get_ipython()", "", "x = 1"]),
        ("%time x = 1\ny = %time f(x)", ["x = 1", "y = f(x)"]),
        ("if a:\n    %timeit -n 2 -r 3 f(x)\nx = 1", ["if a:", "    f(x)", "x = 1"]),
        ("!pip install a \\\n  b\nx = 1", ["None", "", "x = 1"]),
        ("%pip install a\nx.fit?", ["None", "None"]),
        ("é = '''\n%cd\n'''; await f(await g())", ["é = '''", "%cd", f"'''; {WAIT} f({WAIT} g())))"]),
        ("async def f():\n    await g()", ["async def f():", "    await g()"]),
        ("x = !ls \\\n  -l\ny", ["x = get_ipython().getoutput('ls    -l')", "", "y"]),
        ("%%writefile a.py\nx = 1\ny", ["get_ipython().run_cell_magic('writefile', 'a.py', 'x = 1\\ny\\n')", "", ""]),
        (">>> x = 1\n>>> y", ["x = 1", "y"]),
    ],
)  # fmt: skip
def test_each_line_of_a_cell_keeps_its_place(tmp_path, cell, lines):
    assert code_of(tmp_path, "#md # Title", cell, "after()") == [*lines, "after()"]


def test_an_import_from_the_future_is_the_first_line(tmp_path):
    file = opened(write(tmp_path / "train.ipynb", "x = 1", "from __future__ import annotations\ny: A = 1"))
    assert file.read_text(encoding="utf-8").splitlines() == [
        "from __future__ import annotations", "x = 1", "#", "None", "y: A = 1", "#",
    ]  # fmt: skip
    compile(file.read_bytes(), "train", "exec")


def test_a_line_is_named_by_its_cell_and_by_another_number_shown(tmp_path):
    file = str(opened(write(tmp_path / "train.ipynb", "a = 1\nb", "#md text", "c\nd", counts=[1, None, 7])))
    assert describe_line(file, 3) == "train.ipynb, cell 1, line 2"
    assert describe_line(file, 6) == "train.ipynb, cell 2 (In [7]), line 2"
    assert describe_line("train.py", 6) == "train.py, line 6"


@pytest.mark.parametrize(
    ("cells", "fields", "why"),
    [
        (["x = 1"], {"nbformat": 3}, "has nbformat 3; autotune reads 4"),
        (["x = 1"], {"metadata": {"kernelspec": {"language": "R"}}}, "is in R"),
        (["#md # Text", "  "], {}, "has no cell with code"),
        (["x = 1"], {"cells": [{"source": "x"}]}, "is no notebook's JSON: KeyError: 'cell_type'"),
        (["x = 1", "y = 2\nx = = 2"], {}, "cell 2, line 2: invalid syntax"),
        (["x = 1\n\n%%R\ny"], {}, "cell 1, line 3: the magic %%R cannot run in a script"),
        (["x = 1", "\n%%R\ny"], {}, "cell 2, line 2: the magic %%R cannot run in a script"),
        (["if x:\n  %prun f()"], {}, "cell 1, line 2: the magic %prun cannot run in a script"),
        (["async for x in y:\n    pass"], {}, "cell 1, line 1: 'async for' outside async function"),
    ],
)
def test_what_cannot_run_as_a_script_is_refused_in_one_line(tmp_path, cells, fields, why):
    file = write(tmp_path / "train.ipynb", *cells, **fields)
    with pytest.raises(WorkloadError) as caught:
        opened(file)
    assert caught.value.message.removeprefix(f"{file}: ").removeprefix("train.ipynb, ") == why
    assert caught.value.hint


def test_a_file_that_is_no_json_and_a_missing_ipython_are_said(tmp_path, monkeypatch):
    file = tmp_path / "train.ipynb"
    file.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"train.ipynb: is no notebook's JSON: JSONDecodeError: Expecting value"):
        opened(file)
    monkeypatch.setitem(sys.modules, "IPython.core", None)
    with pytest.raises(WorkloadError, match="a notebook needs IPython") as caught:
        opened(write(file, "x = 1"))
    assert caught.value.hint == "Run pip install ipython; the extra `notebook` has it."
    with pytest.raises(WorkloadError, match="a notebook has no Workload"):
        parse_reference(f"{file}:workload")


def test_cells_with_a_tag_are_left_out_and_keep_their_number(tmp_path):
    file = write(tmp_path / "train.ipynb", "x = 1", "%%R\ny", tags=["skip"])
    assert opened(file, "skip").read_text(encoding="utf-8").splitlines() == ["", "x = 1", "#", "", "", "#"]
    with pytest.raises(WorkloadError, match="no code cell has the tag 'slow'") as caught:
        opened(file, "skip,slow")
    assert caught.value.hint == "Its tags: skip."
    (tmp_path / "train.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match="--skip-cells is for notebooks"):
        opened(tmp_path / "train.py", "skip")


def test_another_order_and_installations_are_said_once(tmp_path):
    said = []
    cells = ["a", "!pip install b", "!{sys.executable} -m pip install c", "d"]
    opened(write(tmp_path / "train.ipynb", *cells, counts=[4, 3, 2, 1]), say=said.append)
    assert [text.partition(";")[0] for text in said] == [
        "train.ipynb, cell 2 (In [3]) last ran before a cell above it",
        "train.ipynb, cell 2 (In [3]) and later ones install nothing here: install packages before",
    ]
    said.clear()
    opened(write(tmp_path / "train.ipynb", "a", "!ls", "b", counts=[1, None, 5]), say=said.append)
    assert said == []


def sites(tmp_path, *cells, counts=None):
    """The keys of the calls and functions of a notebook, by what is called; with `counts`, as last run."""
    file = opened(write(tmp_path / "train.ipynb", *cells, counts=counts))
    calls_in.cache_clear()
    found = [site for site, _ in calls_in(str(file), str(tmp_path)).values()]
    tree = compile(file.read_bytes(), "train", "exec", 1024)
    return [(site.call, site.key) for site in (*found, *(site for site, _ in functions_in(tree, str(file), "")))]


def test_other_cells_other_numbers_and_another_run_move_no_site(tmp_path):
    cells = ["def f():\n    g()\n    g()", "x.batch(1)", "x.batch(2)\nx.fit(epochs=3)", "x.batch(1)"]
    before = sites(tmp_path, *cells)
    assert len({key for _, key in before}) == len(before) == 7
    cells[2] = "x.batch(2)\nx.fit(epochs=90)"
    assert sites(tmp_path, "#md text", *cells, counts=[None, 3, 4, 5, 6]) == before
    more = sites(tmp_path, "y = h(1).batch(8)", *cells)
    assert [site for site in more if site in before] == before
    assert [site for site in sites(tmp_path, *cells[:3]) if site in before] == [*before[:5], before[6]]


def test_a_notebook_runs_in_its_directory_and_its_file_stays(run):
    ended = run(
        "import os\nfrom IPython.display import display as show, clear_output\nprint(os.path.basename(os.getcwd()))",
        "%env A=3\nname = 'x.txt'\nlines = !echo {name} $name; echo 3\n!test $A = 3 && echo env\nprint(lines)",
        "%%writefile x.txt\nkept",
        "def f(local):\n    !cat {local}\nf(name)\n%cd ..\nprint(os.path.basename(os.getcwd()) != 'work')",
        "import asyncio\nasync def g():\n    return 5\nprint(await asyncio.gather(g(), g()))",
        "display(1); show(2); clear_output(); get_ipython().events.register('a', print)",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint(plt.get_backend())",
        "try:\n    import google.colab\nexcept ImportError:\n    print('local')",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "work",
        "env",
        "['x.txt x.txt', '3']",
        "kept",
        "True",
        "[5, 5]",
        "Agg",
        "local",
    ]
    assert ended.stderr.count("plots are not shown") == 1


def test_a_traceback_names_cells(run):
    ended = run("#md text", "def f():\n    raise ValueError('a')", "x = 1\nf()", counts=[None, None, 9])
    assert ended.returncode == 1
    assert "  train.ipynb, cell 2 (In [9]), line 2, in <module>\n" in ended.stderr
    assert "  train.ipynb, cell 1, line 2, in f\n" in ended.stderr
    assert ".py" not in ended.stderr.partition("cell 2")[2]


def test_a_spawned_process_finds_functions_and_does_not_train(run):
    ended = run(
        "import multiprocessing\nN = 3\ndef f(x):\n    return x * N",
        "print('trains')",
        "with multiprocessing.get_context('spawn').Pool(1) as pool:\n    print(pool.map(f, [1, 2]))",
    )
    assert ended.stdout.splitlines() == ["trains", "[3, 6]"], ended.stderr


def test_colab_is_there_for_a_notebook_that_needs_it(run, tmp_path):
    mount = "from google.colab import drive, files\ndrive.mount({!r})\nfiles.download('a')\nprint('mounted')"
    assert run(mount.format(str(tmp_path))).stdout == "mounted\n"
    ended = run("x = 1", mount.format("/content/no drive"))
    assert ended.returncode == WorkloadError.exit_code
    assert "train.ipynb, cell 2, line 2: calls google.colab.drive.mount(/content/no drive), which" in ended.stderr
    ended = run("from google.colab import files\nfiles.upload()")
    assert "cell 1, line 2: calls google.colab.files.upload()" in ended.stderr
    assert "--skip-cells" in ended.stderr


def test_the_diff_is_of_the_cells_as_they_are_written(tmp_path):
    cells = [
        "!nproc\nimport tensorflow as tf\nimport keras",
        "#md text",
        "%%time\nx = tf.data.Dataset.range(9).batch(16)\n%matplotlib inline\n# é",
        "import os",
        "model.fit(x)",
    ]
    file = write(tmp_path / "train.ipynb", *cells)
    script = opened(file)
    calls_in.cache_clear()
    baseline = {"batch_size": 16, "precision": "float32"}
    recipe = recipe_of(script, baseline, batch_size=64, precision="mixed_bfloat16")
    diff, rest = script_diff(recipe, file)
    assert rest == []
    names = [line for line in diff.splitlines() if line.startswith("+++")]
    assert names == ["+++ train.ipynb, cell 1", "+++ train.ipynb, cell 2"]
    removed, added = changed_lines(diff)
    assert removed == ["x = tf.data.Dataset.range(9).batch(16)"]
    assert [line for line in added if line] == [
        'keras.config.set_dtype_policy("mixed_bfloat16")',
        "x = tf.data.Dataset.range(9).batch(64)",
    ]
    assert " %matplotlib inline" in diff
