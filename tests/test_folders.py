"""A folder of recipes: which recipe a machine takes, and what is said where none can be taken."""

import json
import subprocess
import sys

import factories
import pytest
from simulated_runs import BASELINE, MACHINE
from test_kind import H200, a_machine
from test_same_workload import ELEMENT, a_script

from autotune.data.errors import MachineMismatchError, RecipeError
from autotune.data.options import LongRunOptions
from autotune.front import cli
from autotune.machine.fingerprint import fingerprint
from autotune.recipe import recipe as recipe_module
from autotune.recipe.evidence import RecipeWorkload
from autotune.recipe.recipe import MachineMismatchWarning, Recipe, read_recipes, select_nearest
from autotune.script.long_run import prepare_run
from autotune.stats.deciding import Verdict

GPU_MACHINE, OLD_TENSORFLOW = a_machine(H200), a_machine(tensorflow="2.18.0")


def a_workload(**fields):
    """The test's script, as a recipe knows it."""
    script = a_script(baseline=dict(BASELINE))
    shape = {"element": ELEMENT.format(None, None), "batch_ranks": (2, 1), "parameters": 85002}
    return RecipeWorkload(**{"name": "train", "fingerprint": "sha256:00", "script": script, **shape, **fields})


def a_recipe(machine=MACHINE, *, workload=None, evidence=None, created_at=factories.CREATED_AT, **changes):
    """A recipe of the test's script that recommends these knobs on this machine."""
    configuration = BASELINE.replace(**(changes or {"jit_compile": True}))
    given = {"workload": workload or a_workload(), "evidence": evidence, "created_at": created_at}
    return factories.a_recipe(machine, configuration=configuration, **given)


ON_CPU, ON_GPU, ON_OLD = a_recipe(), a_recipe(GPU_MACHINE, jit_compile=True, batch_size=256), a_recipe(OLD_TENSORFLOW)
LATER = "2026-11-21T07:00:00.000+00:00"


def save_all(folder, **recipes):
    """Write a folder of recipes, each under its name, and return it."""
    folder.mkdir(exist_ok=True)
    for name, recipe in recipes.items():
        recipe.save(folder / f"{name}.json")
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder with a recipe of each machine."""
    return save_all(tmp_path / "recipes", cpu=ON_CPU, gpu=ON_GPU, old=ON_OLD)


@pytest.fixture
def here(monkeypatch):
    """Makes this machine another: `here(machine)`."""
    return lambda machine: monkeypatch.setattr(recipe_module, "fingerprint", lambda: machine)


# ------------------------------------------------------------------------------------------------- reading


def test_a_folder_has_the_json_files_directly_in_it(folder):
    (folder / "README.md").write_text("Our recipes.")
    (folder / ".cpu.json").write_text("hidden")
    save_all(folder / "older", cpu=a_recipe(a_machine(cores=64)))
    source = read_recipes(folder)
    assert [file.path.name for file in source.files] == ["cpu.json", "gpu.json", "old.json"]
    assert (source.recipes, source.notes) == ((ON_CPU, ON_GPU, ON_OLD), ())


@pytest.mark.parametrize("is_latest", [False, True])
def test_a_run_directory_has_one_recipe(tmp_path, is_latest):
    run = save_all(tmp_path / "20261128-101112-abcdef", recipe=ON_GPU, space=ON_CPU)
    (run / "run.json").write_text("{}")
    (tmp_path / "latest").symlink_to(run.name)
    source = read_recipes(tmp_path / "latest" if is_latest else run)
    assert (source.files, source.is_folder) == (((run / "recipe.json", ON_GPU),), False)
    (run / "recipe.json").unlink()
    with pytest.raises(RecipeError, match="it has not ended"):
        read_recipes(run)


@pytest.mark.parametrize("names", [("a", "z"), ("z", "a")])
@pytest.mark.parametrize(
    ("other", "left", "why"),
    [
        (a_recipe(a_machine(tensorflow="2.21.4"), created_at=LATER, steps_per_execution=8), "old", "a newer recipe"),
        (a_recipe(created_at=LATER, evidence={"verdict": Verdict.UNDECIDED}), "other", "an answer"),
    ],
)
def test_the_newest_answer_of_a_kind_of_machine_counts(tmp_path, names, other, left, why):
    files = dict(zip(("old", "other"), names, strict=True))
    save_all(tmp_path, **{files["old"]: ON_CPU, files["other"]: other})
    dropped, kept = (tmp_path / f"{files[name]}.json" for name in sorted(files, key=lambda name: name != left))
    source = read_recipes(tmp_path)
    assert source.recipes == (other if left == "old" else ON_CPU,)
    kind = "simulated × 2 cores, TensorFlow 2.21, Keras 3"
    assert source.notes == (f"{dropped} is left out: {kept} has {why} for {kind}",)


def test_another_training_is_named_with_its_file(folder):
    a_recipe(GPU_MACHINE, workload=a_workload(parameters=7)).save(folder / "gpu.json")
    with pytest.raises(RecipeError) as caught:
        read_recipes(folder)
    assert caught.value.message == (
        f"{folder}/cpu.json and {folder}/gpu.json are of unlike trainings: their models have 85,002 and 7 weights"
    )
    assert "a folder of their own" in caught.value.hint


NO_RECIPE = {
    "cut": (ON_GPU.to_json()[:-9], "not a recipe: the file: Invalid JSON"),
    "empty": ("", "not a recipe: the file: Invalid JSON"),
    "another JSON file": ('{"name": "project"}', "not a recipe: configuration: Field required"),
    "newer": (
        ON_GPU.to_json().replace('"schema_version": 1', '"schema_version": 2'),
        "reads recipes of schema_version",
    ),
}


@pytest.mark.parametrize("case", NO_RECIPE)
def test_a_file_that_is_no_recipe_is_named(folder, case):
    text, expected = NO_RECIPE[case]
    (folder / "gpu.json").write_text(text)
    for path in (folder / "gpu.json", folder):
        with pytest.raises(RecipeError, match=expected) as caught:
            Recipe.load(path)
        assert caught.value.message.startswith(f"{folder}/gpu.json")
        assert ("Move it out of" in caught.value.hint) == (path == folder)


def test_an_empty_folder_is_told_what_is_expected(tmp_path):
    with pytest.raises(RecipeError, match="neither a run nor a folder of recipes") as caught:
        Recipe.load(tmp_path)
    assert "a folder that has the recipe.json files of one training" in caught.value.hint


# ------------------------------------------------------------------------------------- the recipe of a machine


def test_the_recipe_of_this_kind_of_machine_is_taken_and_named(folder, here, capsys):
    here(a_machine(tensorflow="2.18.1", memory_bytes=1 << 30))
    assert Recipe.load(folder) == Recipe.load(folder, strict=True) == ON_OLD
    assert capsys.readouterr().err.splitlines()[0] == (
        f"autotune: {folder}/old.json was measured on this kind of machine: simulated × 2 cores, TensorFlow 2.18, "
        "Keras 3"
    )


def test_where_none_fits_a_folder_gives_the_baseline(folder, here):
    here(a_machine(H200, tensorflow="2.18.0"))
    has = (
        f"{folder} has no recipe for NVIDIA H200, TensorFlow 2.18, Keras 3. It has recipes for simulated × 2 cores, "
        "TensorFlow 2.21, Keras 3; NVIDIA H200, TensorFlow 2.21, Keras 3; simulated × 2 cores, TensorFlow 2.18, Keras 3"
    )
    with pytest.warns(MachineMismatchWarning) as warned:
        assert Recipe.load(folder).changes == {}
    assert str(warned[0].message) == (
        f"{has}. Training as the script has it. To tune here, beginning with what is known: "
        f"autotune tune … --begin-with {folder}"
    )
    with pytest.raises(MachineMismatchError) as caught:
        Recipe.load(folder, strict=True)
    assert (caught.value.message, caught.value.hint) == (has, f"Tune here: autotune tune … --begin-with {folder}")
    nearest = select_nearest(read_recipes(folder))
    assert (nearest.recipe, nearest.text) == (ON_GPU, f"{folder}/gpu.json is the nearest to this machine")


def test_single_recipe_of_another_machine_loads_unless_strict(folder, here):
    here(GPU_MACHINE)
    assert Recipe.load(folder / "cpu.json") == ON_CPU
    with pytest.raises(MachineMismatchError, match="measured on another machine: device"):
        Recipe.load(folder / "cpu.json", strict=True)


def test_a_machine_of_a_folder_cannot_steer_a_terminal(tmp_path, here):
    save_all(tmp_path, strange=a_recipe(a_machine(cpu="Xeon\x1b[2J\n\u202etwo")))
    here(MACHINE)
    with pytest.warns(MachineMismatchWarning, match="Xeon") as warned:
        Recipe.load(tmp_path)
    assert str(warned[0].message).isprintable()


# --------------------------------------------------------------------------------------------- the commands


def test_a_folder_is_shown_with_what_this_machine_takes(folder, here, capsys):
    here(GPU_MACHINE)
    assert cli.main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    for text in ("gpu.json", "NVIDIA H200, TensorFlow 2.21, Keras 3", "×1.50 (1.40 to 1.60)", "batch_size=256"):
        assert text in shown
    assert f"Here: {folder}/gpu.json was measured on this kind of machine" in shown
    assert cli.main(["show", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipe"] is None
    assert [*document["recipes"]] == [f"{folder}/{name}.json" for name in ("cpu", "gpu", "old")]


def test_a_script_is_run_with_the_recipe_of_its_machine(tmp_path):
    save_all(tmp_path / "recipes", gpu=a_recipe(GPU_MACHINE), here=a_recipe(fingerprint(), onednn=False))
    (tmp_path / "train.py").write_text("import os\nprint('oneDNN', os.environ.get('TF_ENABLE_ONEDNN_OPTS'))\n")
    command = [sys.executable, "-m", "autotune", "run", "recipes", "--strict", "--skip-missing", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "oneDNN 0\n")
    assert "recipes/here.json was measured on this kind of machine" in ended.stderr


def test_without_a_recipe_of_its_machine_a_script_runs_as_it_is(folder, here, tmp_path, capsys):
    here(a_machine(H200, tensorflow="2.18.0"))
    (tmp_path / "train.py").write_text("raise SystemExit('run')")
    assert prepare_run(folder, str(tmp_path / "train.py"), [], LongRunOptions()).long_run is None
    assert "Training as the script has it" in capsys.readouterr().err
