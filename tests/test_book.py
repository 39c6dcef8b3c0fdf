"""A recipe book: merging, reading, what damaged ones are told, and which recipe a machine takes."""

import json
import subprocess
import sys

import jsonschema
import pytest
from simulated_runs import BASELINE, MACHINE
from test_kind import H200, a_machine
from test_same_workload import ELEMENT, a_script, a_site

from autotune.data.errors import ArgumentError, MachineMismatchError, RecipeError
from autotune.data.figures import Interval
from autotune.front import cli
from autotune.machine.fingerprint import fingerprint
from autotune.recipe import book as book_module
from autotune.recipe import recipe as recipe_module
from autotune.recipe.book import merge_recipes, read_book, save_book
from autotune.recipe.evidence import Confirmation, Evidence, PeakMemory, Stability
from autotune.recipe.recipe import MOST_RECIPES, Book, CreatedBy, MachineMismatchWarning, Recipe, RecipeWorkload
from autotune.recipe.schema import BOOK_SCHEMA_FILE, book_schema, recipe_schema, schema_text
from autotune.stats.deciding import EndedBy, Verdict

RATE, MEMORY = Interval(value=100.0, low=90.0, high=110.0), PeakMemory(host=None, device=None)
GPU_MACHINE, OLD_TENSORFLOW = a_machine(H200), a_machine(tensorflow="2.18.0")


def a_workload(**fields):
    """The test's script, as a recipe knows it."""
    script = a_script(baseline=dict(BASELINE))
    shape = {"element": ELEMENT.format(None, None), "batch_ranks": (2, 1), "parameters": 85002}
    return RecipeWorkload(**{"name": "train", "fingerprint": "sha256:00", "script": script, **shape, **fields})


def a_recipe(machine=MACHINE, *, created_at="2026-11-20T19:10:01.250+00:00", workload=None, evidence=None, **changes):
    """A recipe of the test's script that recommends these knobs on this machine."""
    fields = {
        "verdict": Verdict.FASTER,
        "ended_by": EndedBy.SETTLED,
        "min_gain": 0.02,
        "candidates": 8,
        "excluded_gain": None,
        "speedup": Interval(value=1.5, low=1.4, high=1.6),
        "throughput": RATE,
        "baseline_throughput": RATE,
        "compile_seconds": None,
        "baseline_compile_seconds": None,
        "break_even_samples": None,
        "peak_memory_bytes": MEMORY,
        "baseline_peak_memory_bytes": MEMORY,
        "input_wait_fraction": None,
        "stability": Stability(checks=(), not_checked=()),
        "confirmation": Confirmation(
            processes=4, pairs=20, leaders=1, confidence=0.97, pairing="alternating", trials=()
        ),
    }
    return Recipe(
        configuration=dict(BASELINE.replace(**(changes or {"jit_compile": True}))),
        baseline=dict(BASELINE),
        evidence=Evidence(**{**fields, **(evidence or {})}),
        learning_rate_rule=None,
        machine=machine,
        workload=workload or a_workload(),
        created_by=CreatedBy(
            autotune="0.1.0",
            run="by hand",
            created_at=created_at,
            search_space="quick.toml",
            trials=9,
            seed=0,
            budget_seconds=60.0,
            spent_seconds=60.0,
        ),
    )


ON_CPU, ON_GPU, ON_OLD = a_recipe(), a_recipe(GPU_MACHINE, jit_compile=True, batch_size=256), a_recipe(OLD_TENSORFLOW)


@pytest.fixture
def folder(tmp_path):
    """A folder with a recipe of each machine."""
    for name, recipe in {"cpu": ON_CPU, "gpu": ON_GPU, "old": ON_OLD}.items():
        recipe.save(tmp_path / f"{name}.json")
    return tmp_path


@pytest.fixture
def book(tmp_path):
    """The file of a book of three machines."""
    path = tmp_path / "train.book.json"
    save_book(Book(recipes=(ON_CPU, ON_GPU, ON_OLD)), path)
    return path


@pytest.fixture
def here(monkeypatch):
    """Makes this machine another: `here(machine)`."""
    return lambda machine: monkeypatch.setattr(recipe_module, "fingerprint", lambda: machine)


# ------------------------------------------------------------------------------------------------- merging


def test_recipes_become_a_book_that_is_read_as_it_was(folder):
    merged = merge_recipes([folder / "cpu.json", folder / "gpu.json"])
    assert merged == (Book(recipes=(ON_CPU, ON_GPU)), [])
    save_book(merged.book, folder / "train.book.json")
    assert read_book(folder / "train.book.json") == merged.book


def test_a_recipe_is_a_book_of_one(folder):
    assert read_book(folder / "gpu.json").recipes == (ON_GPU,)


def test_folders_books_and_run_directories_are_merged_as_well(folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    a_recipe(a_machine(cores=64)).save(run / "recipe.json")
    merged = merge_recipes([folder, run])
    assert [recipe.machine.cores for recipe in merged.book.recipes] == [2, 2, 2, 64]
    save_book(merged.book, tmp_path / "book")
    assert merge_recipes([tmp_path / "book", folder / "gpu.json"]) == (merged.book, [])


@pytest.mark.parametrize("order", [1, -1])
def test_the_newest_recipe_of_a_kind_of_machine_counts(folder, order):
    patched = a_machine(tensorflow="2.21.4")
    newer = a_recipe(patched, created_at="2026-11-21T07:00:00.000+00:00", steps_per_execution=8)
    newer.save(folder / "new.json")
    merged = merge_recipes([folder / "cpu.json", folder / "new.json"][::order])
    assert merged.book.recipes == (newer,)
    (text,) = merged.notes
    assert text == (
        f"{folder}/cpu.json is left out: {folder}/new.json has a newer recipe for simulated × 2 cores, "
        "TensorFlow 2.21, Keras 3"
    )


def test_unlike_trainings_are_refused_by_call_site(folder):
    other = a_script(sites={**a_script().sites, "prefetch": (a_site("prefetch", line=31),)})
    a_recipe(GPU_MACHINE, workload=a_workload(script=other)).save(folder / "gpu.json")
    with pytest.raises(RecipeError) as caught:
        merge_recipes([folder / "cpu.json", folder / "gpu.json"])
    assert caught.value.message == (
        f"{folder}/cpu.json and {folder}/gpu.json are of unlike trainings: prefetch() in train.py, line 31 leads to "
        "the training of one only"
    )
    assert caught.value.hint


def test_a_folder_without_recipes_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"holds no \.json files and no runs"):
        merge_recipes([tmp_path])


def test_the_runs_of_a_folder_are_merged(folder, tmp_path):
    for name, recipe in {"one": ON_CPU, "two": ON_GPU}.items():
        (run := tmp_path / "results" / name).mkdir(parents=True)
        recipe.save(run / "recipe.json")
    (tmp_path / "results" / "latest").symlink_to("two")
    assert merge_recipes([tmp_path / "results"]) == (Book(recipes=(ON_CPU, ON_GPU)), [])
    (tmp_path / "results" / "run.json").write_text("{}")
    with pytest.raises(ArgumentError, match="it has not ended"):
        merge_recipes([tmp_path / "results"])


def test_only_a_book_is_written_over(folder):
    merged = merge_recipes([folder / "cpu.json", folder / "gpu.json"])
    save_book(merged.book, folder / "gpu.json")
    assert read_book(folder / "gpu.json") == merged.book
    (folder / "train.py").write_text("import keras\n")
    with pytest.raises(ArgumentError, match=r"train\.py exists and is no recipe book"):
        save_book(merged.book, folder / "train.py")
    assert (folder / "train.py").read_text() == "import keras\n"


def test_no_machine_of_an_older_book_is_lost(folder, book):
    only = merge_recipes([folder / "cpu.json"]).book
    with pytest.raises(ArgumentError, match=r"has a recipe for NVIDIA H200, .* which would be lost"):
        save_book(only, book)
    other = Book(recipes=(a_recipe(workload=a_workload(parameters=7)),))
    with pytest.raises(ArgumentError, match=r"cpu\.json is of another training, and would be lost"):
        save_book(other, folder / "cpu.json")
    assert len(read_book(book).recipes) == 3


@pytest.mark.parametrize("order", [1, -1])
def test_an_undecided_recipe_replaces_no_answer(folder, order):
    later = "2026-11-21T07:00:00.000+00:00"
    a_recipe(created_at=later, evidence={"verdict": Verdict.UNDECIDED}).save(folder / "new.json")
    merged = merge_recipes([folder / "cpu.json", folder / "new.json"][::order])
    assert merged.book.recipes == (ON_CPU,)
    assert merged.notes[0].startswith(f"{folder}/new.json is left out: {folder}/cpu.json has an answer for simulated")


def test_an_undecided_recipe_is_not_written_over_an_answer(folder, book):
    undecided = a_recipe(evidence={"verdict": Verdict.UNDECIDED})
    with pytest.raises(ArgumentError, match=r"has an answer for simulated.*, which would be lost"):
        save_book(Book(recipes=(undecided, ON_GPU, ON_OLD)), book)
    save_book(Book(recipes=(undecided,)), folder / "undecided.json")
    save_book(Book(recipes=(ON_CPU,)), folder / "undecided.json")
    assert read_book(folder / "undecided.json").recipes == (ON_CPU,)


def test_a_book_that_could_not_be_read_is_not_written(folder, monkeypatch):
    monkeypatch.setattr(book_module, "LARGEST_FILE_BYTES", 1 << 10)
    with pytest.raises(ArgumentError, match="Merge fewer recipes"):
        save_book(Book(recipes=(ON_CPU, ON_GPU)), folder / "train.book.json")
    assert not (folder / "train.book.json").exists()


# ------------------------------------------------------------------------------------------- damaged books


def document_of(*recipes):
    """A book's JSON, to be damaged; not checked."""
    return {"schema_version": 1, "recipes": [json.loads(recipe.to_json()) for recipe in recipes]}


def damaged(change, *recipes):
    """A book's text after a change of its JSON."""
    document = document_of(*(recipes or (ON_CPU, ON_GPU)))
    change(document)
    return json.dumps(document)


def set_in(*place, to):
    """A change of one value."""

    def change(document):
        *parents, last = place
        for key in parents:
            document = document[key]
        document[last] = to

    return change


def without(*place):
    """A change that removes one value."""

    def change(document):
        *parents, last = place
        for key in parents:
            document = document[key]
        del document[last]

    return change


LOOPING = a_workload(script=a_script(fit_site=a_site("fit", 1, line=44)))
DAMAGED = {
    "cut": (damaged(lambda book: None)[:-9], "Invalid JSON"),
    "empty": (damaged(set_in("recipes", to=[])), "recipes: Tuple should have at least 1 item"),
    "no list": (damaged(set_in("recipes", to={"cpu": 1})), "recipes: Input should be a valid array"),
    "no recipes at all": (damaged(without("recipes")), "configuration: Field required"),
    "newer": (damaged(set_in("schema_version", to=2)), "this autotune reads recipe books of schema_version 1 only"),
    "no version": (damaged(without("schema_version")), "schema_version is missing"),
    "a recipe without a version": (damaged(without("recipes", 1, "schema_version")), "schema_version is missing"),
    "a newer recipe": (damaged(set_in("recipes", 1, "schema_version", to=2)), "recipes.1.schema_version"),
    "a field too many": (damaged(set_in("command", to="rm -rf /")), "command: Extra inputs are not permitted"),
    "a recipe that is text": (damaged(set_in("recipes", 1, to="gpu.json")), "recipes.1"),
    "an unknown knob": (damaged(set_in("recipes", 0, "configuration", "LD_PRELOAD", to="/x.so")), "LD_PRELOAD"),
    "no machine": (damaged(without("recipes", 1, "machine")), "recipes.1.machine: Field required"),
    "no cores": (damaged(set_in("recipes", 1, "machine", "cores", to=0)), "recipes.1.machine.cores"),
    "no number": (
        damaged(set_in("recipes", 0, "evidence", "speedup", "value", to=float("nan"))),
        "recipes.0.evidence.speedup.value",
    ),
    "two of a kind": (
        damaged(lambda book: None, ON_CPU, ON_GPU, a_recipe(a_machine(tensorflow="2.21.4"))),
        "recipes 1 and 3 are both of simulated × 2 cores, TensorFlow 2.21, Keras 3",
    ),
    "another model": (
        damaged(lambda book: None, ON_CPU, a_recipe(GPU_MACHINE, workload=a_workload(parameters=7))),
        "recipes 1 and 2 are of unlike trainings: their models have 85,002 and 7 weights",
    ),
    "another call site": (
        damaged(lambda book: None, ON_CPU, a_recipe(GPU_MACHINE, workload=LOOPING)),
        "fit() in train.py, line 10 leads to the training of one only",
    ),
    "a Workload among scripts": (
        damaged(lambda book: None, ON_CPU, a_recipe(GPU_MACHINE, workload=a_workload(script=None))),
        "one was tuned as a script, the other as a Workload",
    ),
    "a model that nobody knows": (
        damaged(lambda book: None, ON_CPU, a_recipe(GPU_MACHINE, workload=a_workload(parameters=None))),
        "the baseline of one was never started",
    ),
    "too many": (
        damaged(lambda book: book.update(recipes=book["recipes"][:1] * (MOST_RECIPES + 1))),
        f"at most {MOST_RECIPES} items",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_or_contradictory_book_is_refused_in_one_sentence(tmp_path, case):
    text, expected = DAMAGED[case]
    (tmp_path / "train.book.json").write_text(text)
    for read in (Recipe.load, read_book, lambda path: merge_recipes([path])):
        with pytest.raises(RecipeError) as caught:
            read(tmp_path / "train.book.json")
        assert caught.value.message.startswith(f"{tmp_path}/train.book.json: ")
        assert expected in caught.value.message
        assert caught.value.message.isprintable()
        assert caught.value.hint


def test_a_machine_of_a_book_cannot_steer_a_terminal(tmp_path, here):
    strange = a_recipe(a_machine(cpu="Xeon\x1b[2J\n\u202etwo"))
    save_book(Book(recipes=(strange,)), tmp_path / "book.json")
    here(MACHINE)
    with pytest.warns(MachineMismatchWarning, match="Xeon") as warned:
        Recipe.load(tmp_path / "book.json")
    assert str(warned[0].message).isprintable()


def test_the_shipped_schema_is_that_of_the_models(book):
    assert BOOK_SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(book_schema())
    recipes = {"$id": recipe_schema()["$id"]} | recipe_schema()
    whole = book_schema() | {"$defs": {"recipe": recipes}}
    jsonschema.validate(json.loads(book.read_text()), whole)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(damaged(set_in("recipes", 0, "machine", "cores", to=0))), whole)


# ------------------------------------------------------------------------------------- the recipe of a machine


def test_the_recipe_of_this_kind_of_machine_is_taken_and_named(book, here, capsys):
    here(a_machine(tensorflow="2.18.1", memory_bytes=1 << 30))
    assert Recipe.load(book) == ON_OLD
    assert capsys.readouterr().err == (
        f"autotune: recipe 3 of 3 in {book} was measured on this kind of machine: simulated × 2 cores, TensorFlow "
        "2.18, Keras 3\n"
    )


def test_where_none_fits_the_nearest_is_named_and_the_baseline_returned(book, here):
    here(a_machine(H200, tensorflow="2.18.0"))
    with pytest.warns(MachineMismatchWarning) as warned:
        recipe = Recipe.load(book)
    assert str(warned[0].message) == (
        f"no recipe of this kind of machine; nearest is recipe 2 of 3 in {book}: TensorFlow: measured on "
        "2.21, here 2.18; training as the script has it. To tune here, beginning with what is known: "
        f"autotune tune … --book {book}"
    )
    assert recipe.changes == {}
    assert recipe.machine == GPU_MACHINE


def test_the_nearest_can_be_wished_for_refused_and_taken_silently(book, here, capsys):
    here(a_machine(H200, tensorflow="2.18.0"))
    with pytest.warns(MachineMismatchWarning, match="training with it all the same"):
        assert Recipe.load(book, on_mismatch="nearest") == ON_GPU
    with pytest.raises(MachineMismatchError, match="nearest is recipe 2 of 3"):
        Recipe.load(book, on_mismatch="error")
    assert Recipe.load(book, on_mismatch="ignore") == ON_GPU
    with pytest.raises(ArgumentError, match="on_mismatch='warn'"):
        Recipe.load(book, on_mismatch="warn")


def test_the_same_wish_means_the_same_for_a_single_recipe(folder, here):
    path = folder / "cpu.json"
    here(GPU_MACHINE)
    assert Recipe.load(path) == ON_CPU
    with pytest.warns(MachineMismatchWarning, match="training as the script has it"):
        assert Recipe.load(path, on_mismatch="baseline").changes == {}
    with pytest.raises(MachineMismatchError, match="measured on another machine: device"):
        Recipe.load(path, on_mismatch="error")
    here(MACHINE)
    assert Recipe.load(path, on_mismatch="baseline") == Recipe.load(path, on_mismatch="error") == ON_CPU


# --------------------------------------------------------------------------------------------- the commands


def test_merging_shows_the_book_and_what_this_machine_takes(folder, here, capsys):
    here(GPU_MACHINE)
    assert cli.main(["merge", str(folder), "-o", str(folder / "train.book.json")]) == 0
    merged = capsys.readouterr().out
    assert "NVIDIA H200, TensorFlow 2.21, Keras 3" in merged
    assert "×1.50 (1.40 to 1.60)" in merged
    assert "batch_size=256 jit_compile=true" in merged
    assert f"Here: recipe 2 of 3 in {folder}/train.book.json was measured on this kind of machine" in merged
    assert cli.main(["show", str(folder / "train.book.json")]) == 0
    assert capsys.readouterr().out == merged


SCRIPT = "import os\nprint('oneDNN', os.environ.get('TF_ENABLE_ONEDNN_OPTS'))\n"


@pytest.fixture
def trained(tmp_path):
    """Trains by a book of these recipes: `trained(recipes, *options)`."""

    def run(recipes, *options):
        save_book(Book(recipes=recipes), tmp_path / "train.book.json")
        (tmp_path / "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "autotune", "run", "train.book.json", *options, "train.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_a_script_is_run_with_the_recipe_of_its_machine(trained):
    ended = trained((a_recipe(GPU_MACHINE), a_recipe(fingerprint(), onednn=False)))
    assert (ended.returncode, ended.stdout) == (0, "oneDNN 0\n")
    assert "recipe 2 of 2 in train.book.json was measured on this kind of machine" in ended.stderr


def test_without_one_it_is_run_as_it_is_or_with_the_nearest(trained):
    recipes = (a_recipe(GPU_MACHINE), a_recipe(onednn=False))
    ended = trained(recipes)
    assert (ended.returncode, ended.stdout) == (0, "oneDNN None\n")
    assert "nearest is recipe 2 of 2 in train.book.json" in ended.stderr
    assert "training as the script has it" in ended.stderr
    ended = trained(recipes, "--on-mismatch", "nearest")
    assert (ended.returncode, ended.stdout) == (0, "oneDNN 0\n")
    assert "training with it all the same" in ended.stderr
    ended = trained(recipes, "--on-mismatch", "error")
    assert (ended.returncode, ended.stdout) == (MachineMismatchError.exit_code, "")
