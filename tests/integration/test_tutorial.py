"""docs/tutorial.md, and the Workload of docs/scripts.md: code and commands run as printed."""

import json
import os
import subprocess
import sys

from documents import ROOT, code_blocks

from autotune.recipe.recipe import Recipe

STEPS = "\nimport json\nprint(json.dumps([int(model.optimizer.iterations), int(model.steps_per_execution)]))\n"


def test_the_workload_guides_code_runs_as_printed(run_code, tmp_path):
    _, workload, training = code_blocks("scripts.md", "python")
    (tmp_path / "job.py").write_text(workload, encoding="utf-8")
    recorded = Recipe.load(ROOT / "results" / "recorded" / "digits_mlp_command_one" / "recipe.json")
    changes = {"batch_size": 64, "steps_per_execution": 5}
    recipe = recorded.model_copy(update={"configuration": {**recorded.configuration, **changes}})
    recipe.save(tmp_path / "recipe.json")
    printed = run_code(training + STEPS, PYTHONWARNINGS="ignore").stdout
    assert json.loads(printed.splitlines()[-1]) == [3 * 960 // 64, 5]


def test_the_tutorials_commands_run_as_printed(environment, tmp_path):
    (script,) = code_blocks("tutorial.md", "python")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    command = tmp_path / "bin" / "autotune"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m autotune "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    variables = {**environment, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    shell = ["bash", "-e", "-c", "".join(code_blocks("tutorial.md", "sh"))]
    ended = subprocess.run(shell, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    run = tmp_path / "results" / "train" / "latest"
    assert (run / "report.html").exists()
    assert Recipe.load(run / "recipe.json").workload.name == "train"
