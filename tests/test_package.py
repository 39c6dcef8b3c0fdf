"""The package as a whole: its public names, its weight, its README."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from documents import PAGES, ROOT

import autotune
from autotune.front import cli
from autotune.version import DISTRIBUTION


def test_the_public_names_are_these():
    assert sorted(autotune.__all__) == [
        "AutotuneError",
        "DatasetConfig",
        "MachineMismatchWarning",
        "Recipe",
        "Verification",
        "Workload",
        "__version__",
        "activate",
        "compare",
        "load_history",
        "load_ops",
        "load_slices",
        "steps",
        "tune",
        "tuned",
        "verify",
    ]
    assert all(getattr(autotune, name) is not None for name in autotune.__all__)


def test_dir_lists_only_public_names():
    assert dir(autotune) == sorted(autotune.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="recipe_of"):
        autotune.recipe_of  # noqa: B018


def test_name_and_version_are_the_distributions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (DISTRIBUTION, autotune.__version__) == (project["name"], project["version"])


def test_version_names_the_command_and_its_distribution(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"autotune {autotune.__version__} (distribution {DISTRIBUTION})\n"


@pytest.mark.parametrize(
    ("imports", "unwanted"),
    [
        ("autotune; autotune.Workload; autotune.Recipe; autotune.tune", {"tensorflow", "keras", "pandas"}),
        ("autotune.runtime.template, autotune.script.loading", {"optuna", "pandas", "tensorflow"}),  # a trial's process
    ],
)
def test_imports_load_no_large_package_without_need(imports, unwanted):
    script = f"import sys, {imports}; loaded = {unwanted} & set(sys.modules); assert not loaded, loaded"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_every_file_that_a_page_links_to_exists():
    for page in (*PAGES.values(), ROOT / "results" / "recorded" / "README.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_that_the_package_names_exists():
    files = (ROOT / "autotune").rglob("*.py")
    named = {page for file in files for page in re.findall(r"\bdocs/[\w.]+\.md", file.read_text(encoding="utf-8"))}
    assert named == {page for page in named if (ROOT / page).exists()} != set()


def test_readme_has_no_placeholders_left():
    assert "@@" not in (ROOT / "README.md").read_text()


def test_ci_finds_command_two_in_the_readme():
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"(?s)<!-- command (one|two) -->\n```sh\n(.+?)\n```", text)
    assert [name for name, _ in found] == ["one", "two"]
    assert "pytest" in dict(found)["two"]
