"""README.md and docs/: their commands exist, their code runs, and what they quote was printed."""

import ast
import re
import shlex

import pytest
import readme
from documents import PAGES, ROOT, code_blocks

from autotune.data.figures import Interval
from autotune.data.options import USUAL_BUDGET
from autotune.front import cli
from autotune.front.cli import app
from autotune.space.space_file import find_search_space

RUN_BY_TESTS = {"history.md": 1, "recipes.md": 4, "scripts.md": 3, "tutorial.md": 1}
"""Blocks of Python by page: here, in `integration/test_recipe_guide.py` or in `integration/test_tutorial.py`."""


def commands_of(page):
    """The commands of autotune in a page's shell code, as words."""
    for block in code_blocks(page, "sh"):
        for part in re.split(r"\n|&&|\|\|| [|>] ", block):
            words = shlex.split(part, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words[:1] == ["autotune"]:
                yield words[1:]


COMMANDS = [pytest.param(words, id=f"{page}: {shlex.join(words)}") for page in PAGES for words in commands_of(page)]


def test_pages_show_commands():
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_a_page_can_be_parsed(words):
    own, _ = cli._split(words)
    app.parse_args([word for word in own if word != "-m"], exit_on_error=False, print_error=False)


def test_every_block_of_python_is_run_by_a_test():
    counts = {page: len(code_blocks(page, "python")) for page in PAGES}
    assert {page: count for page, count in counts.items() if count} == RUN_BY_TESTS


def test_the_history_page_runs_as_printed(tmp_path, monkeypatch):
    (tmp_path / "results").symlink_to(ROOT / "results" / "recorded")
    monkeypatch.chdir(tmp_path)
    names = run_block("history.md")
    assert len(names["frame"]) > len(names["best"])
    assert set(names["best"]["answer"]) == {"baseline", "same training", "larger batch"}
    assert set(names["with_xla"].jit_compile) == {True}
    assert len(names["runs"]) > 0


def test_a_scripts_own_batch_size_is_read_as_printed():
    assert run_block("scripts.md")["steps"] == 50_000 // 32


def run_block(page):
    """Run a page's first block of Python, and return the names that it binds."""
    block = code_blocks(page, "python")[0]
    names = {}
    exec(compile(block, page, "exec"), names)
    return names


def test_the_search_space_is_read_as_printed(tmp_path):
    (block,) = code_blocks("search_space.md", "toml")
    (tmp_path / "space.toml").write_text(block, encoding="utf-8")
    assert set(find_search_space(str(tmp_path / "space.toml")).ranges) == {"batch_size", "precision"}


def test_the_readme_quotes_the_recorded_run():
    (quoted,) = code_blocks("README.md", "text")
    assert quoted.splitlines() == readme.quoted_end(readme.RUN)
    assert max(map(len, quoted.splitlines())) <= 80


def test_the_terminal_shows_command_one():
    lines = re.search(r"<!-- command one -->\n```sh\n(.+?)```", PAGES["README.md"].read_text(), re.DOTALL)[
        1
    ].splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split("#")[0].strip() for line in lines[-2:]] == [readme.COMMAND, readme.AFTERWARDS]
    shown = readme.shown_lines(readme.RUN)
    assert shown[0] == f"$ {readme.COMMAND}"
    assert shown[1].startswith(f"{readme.WORKLOAD}: budget 3:00")
    assert any("(confirmed " in line for line in shown)


def test_the_first_commands_name_the_same_budget():
    """`demo` has it, and `doctor` on a busy machine names it too."""
    (tutorial,) = [words for words in commands_of("tutorial.md") if words[0] == "tune"]
    assert tutorial[tutorial.index("--budget") + 1] == USUAL_BUDGET


@pytest.mark.parametrize("theme", readme.THEMES)
def test_pictures_load_nothing(theme):
    for picture in readme.PICTURES.glob(f"*-{theme}.svg"):
        text = re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", picture.read_text(encoding="utf-8"))
        assert not re.search(r"https?:|<script|<image|@import", text), picture.name


def test_an_unmeasured_answer_has_no_bar():
    shown = Interval(value=2.0, low=1.5, high=3.0)
    trainings = [readme.Answers(name="a & b", same=shown, larger=None)]
    picture = readme.bars_picture(trainings, readme.THEMES["light"])
    assert "×2 (1.5 to 3)" in picture
    assert "a &amp; b" in picture
    assert picture.count("<rect") == 3 + 2  # the legend's, as it is, same training


def test_nothing_says_to_install_autotune_from_an_index():
    """`autotune` there is another project, and `tf-autotune` is not published."""
    sources = [*PAGES.values(), ROOT / "docs" / "llms.txt", *(ROOT / "autotune").rglob("*.py")]
    found = [(file.name, line) for file in sources for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(name, line) for name, line in found if re.search(r"pip install [^`|&]*\bautotune\b(?!/)", line)] == []


def test_the_site_and_llms_txt_name_every_page():
    pages = PAGES.keys() - {"README.md", "CONTRIBUTING.md"}
    assert set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == pages
    linked = re.findall(r"\]\((\w+)\.html\)", (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8"))
    assert {f"{name}.md" for name in linked} == pages - {"index.md"}


def test_the_messages_that_a_page_explains_are_autotunes():
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "autotune").rglob("*.py"))
    nodes = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts = "\n".join(text for text in nodes if isinstance(text, str))
    rows = re.findall(r"^\| (`.+?) \| .+ \|$", PAGES["messages.md"].read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [words for row in rows for words in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 40
    assert [words for words in quoted if words not in texts] == []
