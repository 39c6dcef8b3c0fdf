"""Knobs of a GPU, by rules: there is no GPU here."""

import sys
from types import SimpleNamespace

import pytest
from simulated_runs import A100, FACTS, MACHINE, on_disk, simulated_trials, space, tune_simulated

from autotune.data.errors import ApplyError
from autotune.machine import gpu
from autotune.machine.gpu import missing_xla_flags
from autotune.recipe import apply
from autotune.space.changes import Context
from autotune.space.configuration import baseline_configuration, reset_idle
from autotune.space.knobs import GPU_KNOBS, KNOBS, Device, Numerics, Stage
from autotune.space.space_file import find_search_space
from autotune.tuning import run_setup
from autotune.tuning.candidates import neighbours
from autotune.tuning.events import Notice
from autotune.tuning.notices import adopt_imported_settings

BASELINE = baseline_configuration(32, {"jit_compile": False}, Device.GPU, where="test")
VARIABLES = [knob for knob in GPU_KNOBS if knob.stage is Stage.START]


def resolved(name="gpu", *, baseline=BASELINE, **more):
    """A shipped search space on a GPU."""
    given = {"device": Device.GPU, "cores": 2, "examples": 4096, "dataset_takes_config": True}
    return find_search_space(name).resolve(baseline=baseline, **{**given, **more})


@pytest.mark.parametrize("knob", VARIABLES, ids=lambda knob: knob.name)
def test_each_variable_is_read_as_it_is_set(knob):
    shell = {"XLA_FLAGS": "--xla_dump_to=/d", "TF_XLA_FLAGS": "--tf_xla_clustering_debug"}
    assert knob.read({}) == knob.read(shell) == knob.default
    values = [False, True] if knob.domain.booleans else [*knob.domain.words, *(knob.domain.integers or ())]
    for value in values:
        variables = dict(shell)
        knob.set(variables, value)
        assert knob.read(variables) == value
        assert "--xla_dump_to=/d" in variables["XLA_FLAGS"]
        assert "--tf_xla_clustering_debug" in variables["TF_XLA_FLAGS"]


@pytest.mark.parametrize("knob", VARIABLES, ids=lambda knob: knob.name)
def test_text_that_is_no_value_is_tensorflows_own(knob):
    assert knob.read({knob.variable: "--x", "TF_GPU_ALLOCATOR": "mine"}) == knob.default


def test_what_changes_arithmetic_goes_through_the_numerics_check():
    same = {knob.name for knob in GPU_KNOBS if knob.numerics is Numerics.SAME}
    expected = {"gpu_thread_mode", "gpu_thread_count", "xla_gpu_graph_min_graph_size", "prefetch_to_device"}
    assert same == {*expected, "gpu_allocator"}


def test_the_thorough_space_has_all_of_the_usual_one():
    usual, thorough = find_search_space("gpu").ranges, find_search_space("gpu_thorough").ranges
    assert usual.items() <= thorough.items()
    assert set(thorough) - set(usual) == {
        "xla_gpu_enable_cublaslt",
        "xla_gpu_enable_cudnn_layer_norm",
        "xla_gpu_cudnn_gemm_fusion_level",
        "xla_gpu_exhaustive_tiling_search",
        "layout_optimizer",
        "remapping",
        "gpu_allocator",
    }


def test_no_knob_of_a_gpu_needs_another_import():
    assert {KNOBS[name].stage for name in find_search_space("gpu_thorough").ranges}.isdisjoint({Stage.IMPORT})


@pytest.mark.parametrize(
    ("capability", "expected", "tf32"),
    [
        ("6.1", ("float32",), False),
        ("7.0", ("float32", "mixed_float16"), False),
        ("7.5", ("float32", "mixed_float16"), False),
        ("8.0", ("float32", "mixed_float16", "mixed_bfloat16"), True),
        ("10.0", ("float32", "mixed_float16", "mixed_bfloat16"), True),
        (None, ("float32", "mixed_float16", "mixed_bfloat16"), True),
    ],
)
def test_precisions_without_tensor_cores_are_left_out(capability, expected, tf32):
    space = resolved(capability=capability)
    assert space.choices.get("precision", ("float32",)) == expected
    assert ("tensor_float_32" in space.choices) is tf32
    if capability == "7.5":
        assert space.left_out["precision=mixed_bfloat16"] == "needs compute capability 8.0, not 7.5"


def test_the_baselines_own_precision_stays():
    space = resolved(baseline=BASELINE.replace(precision="mixed_bfloat16"), capability="7.0")
    assert "mixed_bfloat16" in space.choices["precision"]


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({"xla_gpu_graph_min_graph_size": 1}, True),
        ({"xla_gpu_graph_min_graph_size": 1, "jit_compile": True}, False),
        ({"xla_gpu_graph_min_graph_size": 1, "xla_auto_clustering": True}, False),
        ({"gpu_thread_count": 4}, True),
        ({"gpu_thread_count": 4, "gpu_thread_mode": "gpu_private"}, False),
        ({"xla_auto_clustering": True}, False),
    ],
)
def test_a_knob_that_does_nothing_is_no_other_candidate(changes, idle):
    assert (reset_idle(BASELINE.replace(**changes), BASELINE) == BASELINE) is idle


def test_a_step_that_is_compiled_whole_leaves_nothing_to_cluster():
    both = BASELINE.replace(jit_compile=True, xla_auto_clustering=True)
    assert reset_idle(both, BASELINE) == BASELINE.replace(jit_compile=True)


def test_no_neighbour_is_the_same_under_another_name():
    found = neighbours(BASELINE, resolved("gpu_thorough"), Context(on_gpu=True))
    assert BASELINE not in found
    assert all(reset_idle(each, BASELINE) == each for each in found)
    changed = {name for each in found for name in each.differences(BASELINE)}
    assert {"xla_gpu_graph_min_graph_size", "xla_auto_clustering", "cublaslt", "gpu_thread_mode"} <= changed


# ---------------------------------------------------------------------------------------------- applying


class Started:
    """TensorFlow as far as applying asks for it; its runtime may have started."""

    def __init__(self, started):
        self.started, self.threads = started, 0
        self.threading = self.optimizer = self
        self.data = SimpleNamespace(Dataset=Started)
        self.Variable = self.Tensor = Started

    @property
    def config(self):
        """Itself."""
        return self

    def list_physical_devices(self, kind):
        """None."""
        return []

    def get_inter_op_parallelism_threads(self):
        """As set."""
        return self.threads

    def set_inter_op_parallelism_threads(self, threads):
        """Refused once the runtime runs."""
        if self.started:
            raise RuntimeError("cannot be modified after initialization")


def test_the_variables_are_set_before_the_runtime_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", Started(False))
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/d")
    monkeypatch.delenv("TF_GPU_THREAD_MODE", raising=False)
    monkeypatch.setattr(apply.os, "environ", dict(apply.os.environ))
    apply.apply_before_build({"gpu_thread_mode": "gpu_private", "cublaslt": False, "xla_gpu_graph_min_graph_size": 1})
    assert apply.os.environ["TF_GPU_THREAD_MODE"] == "gpu_private"
    assert apply.os.environ["XLA_FLAGS"] == "--xla_dump_to=/d --xla_gpu_graph_min_graph_size=1"
    assert "TF_USE_CUBLASLT" not in apply.os.environ


def test_a_variable_comes_too_late_once_the_runtime_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", Started(True))
    monkeypatch.setattr(apply.os, "environ", {})
    with pytest.raises(ApplyError, match="TF_USE_CUBLASLT='1' cannot act any more"):
        apply.apply_before_build({"cublaslt": True})


def test_what_the_shell_sets_is_the_baselines(monkeypatch):
    monkeypatch.setenv("TF_GPU_THREAD_MODE", "gpu_private")
    facts = FACTS.model_copy(update={"in_force": {"gpu_thread_mode": "gpu_private", "cublaslt": False}})
    baseline, notices = adopt_imported_settings(BASELINE, facts, where="train.py")
    assert baseline == BASELINE.replace(gpu_thread_mode="gpu_private")
    assert notices == ("the environment sets gpu_thread_mode=gpu_private, so the baseline has it too",)


# -------------------------------------------------------------------------------------------- XLA's flags

NAMES = ["batch_size", "xla_gpu_graph_min_graph_size", "xla_gpu_enable_cublaslt"]


def test_one_process_is_asked_for_all_flags():
    asked = []
    assert missing_xla_flags(NAMES, lambda text: asked.append(text) or (0, "")) == {}
    assert asked == ["--xla_gpu_graph_min_graph_size=5 --xla_gpu_enable_cublaslt=false"]


def test_flags_that_the_binary_lacks_are_left_out():
    said = "F0000 00:00 1 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_gpu_enable_cublaslt=false\n"
    assert list(missing_xla_flags(NAMES, lambda text: (-6, said))) == ["xla_gpu_enable_cublaslt"]


def test_no_answer_leaves_all_flags_out():
    assert list(missing_xla_flags(NAMES, lambda text: (1, "ModuleNotFoundError"))) == NAMES[1:]


def test_the_process_that_tries_the_flags_sees_no_gpu(monkeypatch):
    tried = []
    ended = SimpleNamespace(returncode=0, stderr="")
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **options: tried.append(options["env"]) or ended)
    assert missing_xla_flags(NAMES) == {}
    assert (tried[0]["CUDA_VISIBLE_DEVICES"], "--xla_gpu_graph" in tried[0]["XLA_FLAGS"]) == ("", True)


def test_a_space_without_flags_asks_nobody():
    assert missing_xla_flags(["batch_size", "cublaslt"], lambda text: pytest.fail("asked")) == {}


# ------------------------------------------------------------------------------------------------- runs

SPACE = space(xla_gpu_graph_min_graph_size=[1, 5], jit_compile=[False, True], cublaslt=[False, True])


def on_gpu(**settings):
    """Simulated trials on a GPU that are faster with cuBLASLt."""
    return simulated_trials(
        lambda each: 6400.0 if each.get("cublaslt") else 4000.0, noise=0.02, gpus=("NVIDIA A100",), **settings
    )


def test_a_run_on_a_gpu_leaves_out_what_the_binary_lacks(tmp_path, monkeypatch):
    notices = []
    monkeypatch.setattr(
        run_setup,
        "missing_xla_flags",
        lambda names: missing_xla_flags(names, lambda text: (-6, f"Unknown flag in XLA_FLAGS: {text}")),
    )
    machine = MACHINE.model_copy(update={"gpus": (A100,)})
    with on_disk(tmp_path / "run") as directory:
        recipe = tune_simulated(
            on_gpu(), directory, space=SPACE, machine=machine, observe=lambda notice: notices.append(notice)
        )
        left_out = directory.read_run().search_space.left_out
    said = [notice.text for notice in notices if isinstance(notice, Notice) and "no such flag" in notice.text]
    assert said == ["not varied: xla_gpu_graph_min_graph_size: the installed TensorFlow has no such flag of XLA"]
    assert list(left_out) == ["xla_gpu_graph_min_graph_size"]
    assert recipe.changes["cublaslt"] is True
    assert "xla_gpu_graph_min_graph_size" not in recipe.changes


def test_a_run_on_a_processor_has_no_knob_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(run_setup, "missing_xla_flags", lambda names: pytest.fail("asked"))
    with on_disk(tmp_path / "run") as directory:
        recipe = tune_simulated(simulated_trials(noise=0.02), directory, space=SPACE, budget=60.0, trials=1)
    assert not set(recipe.baseline) & {knob.name for knob in GPU_KNOBS}


def test_unsafe_or_ignored_shell_settings_are_reported_at_start(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    monkeypatch.setenv("TF_ENABLE_CUBLAS_TENSOR_OP_MATH_FP32", "1")
    notices = []
    with on_disk(tmp_path / "run") as directory:
        tune_simulated(simulated_trials(), directory, space=SPACE, budget=60.0, trials=1, observe=notices.append)
    said = [notice.text for notice in notices if isinstance(notice, Notice)]
    assert said[0].startswith("XLA_FLAGS has --xla_gpu_autotune_level=0: below 4, XLA does not check")
    assert said[1] == "TF_ENABLE_CUBLAS_TENSOR_OP_MATH_FP32 is set, but TensorFlow 2.21.0 no longer reads it"


def test_two_compilations_never_run_at_once_on_a_gpu(tmp_path):
    trials = on_gpu()
    cold, most = [], []

    def watch(trial):
        cold.append(trial)
        most.append(len(cold))
        for method in ("warm_up", "loss_curves", "kill"):
            _then(trial, method, lambda: cold.remove(trial) if trial in cold else None)

    trials.on_launch = watch
    machine = MACHINE.model_copy(update={"gpus": (A100,)})
    with on_disk(tmp_path / "run") as directory:
        recipe = tune_simulated(
            trials, directory, space=SPACE.replace("xla_gpu_graph_min_graph_size", "gpu_thread_count"), machine=machine
        )
    assert recipe.changes["cublaslt"] is True
    assert len(most) > 8
    assert max(most) == 1


def _then(trial, method, done):
    """Call something after a method of a trial, however it ends."""
    usual = getattr(trial, method)

    def wrapped(*given, **named):
        try:
            return usual(*given, **named)
        finally:
            done()

    setattr(trial, method, wrapped)
