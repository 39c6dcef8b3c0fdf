"""The knob `cache`: filled once in each training, which counts; a file of it is new, and gone afterwards."""

import pytest
from real_trials import PATIENCE_SECONDS
from test_long_run import TRAIN, by_recipe, numbers_of, recipe_of, trained

MAPPED = TRAIN.replace(".shuffle(96", ".map(lambda a, b: (tf.sin(a), b)).shuffle(96")


WINDOWS = TRAIN.replace(".shuffle(96", ".window(1).flat_map(lambda a, b: tf.data.Dataset.zip(a, b)).shuffle(96")


@pytest.mark.parametrize("source", [MAPPED, WINDOWS])
def test_filling_it_counts_in_each_epoch(trials_of_script, source):
    trials = trials_of_script(source)
    trial = trials.launch(cache=True)
    filling = trial.warm_up(PATIENCE_SECONDS).started.filling_seconds
    measured = trial.measure(0.1, PATIENCE_SECONDS)
    assert filling > 0
    assert measured.charged_seconds == pytest.approx(filling / 3 * measured.examples / 96)


@pytest.mark.parametrize("file_bytes", [0, 4096])
def test_a_run_trains_on_the_same_and_leaves_no_file(trials_of_script, tmp_path, monkeypatch, file_bytes):
    facts = trials_of_script(MAPPED).facts
    script = facts.script.model_copy(update={"cache_file_bytes": file_bytes})
    recipe = recipe_of(facts.model_copy(update={"script": script}), tmp_path, cache=True)
    (tmp_path / "train.py").write_text(MAPPED + "import os, glob\nprint('files', glob.glob('tmp/*/epoch*') != [])\n")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    ended = by_recipe(tmp_path, recipe)
    assert ended.returncode == 0, ended.stderr
    assert f"files {file_bytes > 0}" in ended.stdout
    assert numbers_of(ended, "losses") == numbers_of(trained(tmp_path, ["train.py"]), "losses")
    assert list((tmp_path / "tmp").glob("autotune-cache-*")) == []
