"""Rules for cards, where there is none: by the words, files and errors that CUDA and TensorFlow are known by."""

import sys
from types import SimpleNamespace

import pytest

from autotune.data.errors import ApplyError
from autotune.data.facts import Gpu
from autotune.machine.gpu import GpuReading, VisibleGpu, is_gpu_file, is_gpu_open
from autotune.recipe.apply import apply_before_build
from autotune.runtime import logs, template
from autotune.runtime.failures import call_user
from autotune.runtime.logs import gpu_fault_hint, is_busy_gpu_error, is_memory_error
from autotune.runtime.protocol import LossCurves
from autotune.training import gauges, losses

FULL_OR_TAKEN = [
    "OOM when allocating tensor: Out of memory while trying to allocate 1073741824 bytes.",
    "Failed to allocate request for 2.00GiB on device ordinal 0: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED",
    "Failed copying input tensor from CPU:0 to GPU:0 in order to run AddV2: Dst tensor is not initialized.",
    "Attempting to perform BLAS operation using StreamExecutor without BLAS support",
    "DNN library initialization failed. Look at the errors above for more details.",
    "cudnnCreate failed: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA runtime implicit initialization on GPU:0 failed. Status: all CUDA-capable devices are busy or unavailable",
    "failed call to cuDevicePrimaryCtxRetain: CUDA-capable device(s) is/are busy or unavailable",
    "std::bad_alloc",
]
OTHERWISE = [
    "Matrix size-incompatible: In[0]: [32,10], In[1]: [11,4]",
    "DNN library is not found.",  # it is not installed: less memory would not help
    "the printer is busy",
    "",
]


@pytest.mark.parametrize("text", FULL_OR_TAKEN)
def test_a_card_that_is_full_or_taken_is_want_of_memory(text):
    assert is_memory_error(text)
    assert is_memory_error(f"Graph execution error:\n\n{text.upper()}\n\t [[{{{{node dense/MatMul}}}}]]")


def test_busy_gpu_is_distinguished_from_a_full_one():
    assert [is_busy_gpu_error(each) for each in FULL_OR_TAKEN].count(True) == 2
    assert all(is_busy_gpu_error(each) == ("busy or unavailable" in each) for each in FULL_OR_TAKEN)


@pytest.mark.parametrize("text", OTHERWISE)
def test_other_errors_are_not(text):
    assert not is_memory_error(text)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", "gpu-reset"),
        ("Failed to synchronize: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", "Xid"),
        ("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", "Xid"),
        ("NVRM: Xid (PCI:0000:41:00): 31, pid=812", "Xid"),
    ],
)
def test_a_card_that_fails_is_named_with_what_to_do(monkeypatch, text, step):
    monkeypatch.setattr(logs, "visible_gpus", lambda: [VisibleGpu("GPU-3f8a", "NVIDIA H200")])
    hint = gpu_fault_hint(f"Graph execution error:\n\n{text.upper()}")
    assert "NVIDIA H200 (GPU-3f8a)" in hint
    assert step in hint
    assert not is_memory_error(text)


def test_a_card_that_nvml_does_not_name_is_the_card(monkeypatch):
    monkeypatch.setattr(logs, "visible_gpus", list)
    assert "The memory of the GPU has failed" in gpu_fault_hint("uncorrectable ECC error encountered")


@pytest.mark.parametrize("text", [*FULL_OR_TAKEN, *OTHERWISE])
def test_other_errors_blame_no_card(text):
    assert gpu_fault_hint(text) == ""


def test_a_failed_card_passes_through_the_users_own_functions():
    fault = RuntimeError("CUDA_ERROR_ECC_UNCORRECTABLE")

    def model():
        raise fault

    with pytest.raises(RuntimeError) as raised:
        call_user("model", model)
    assert raised.value is fault


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/dev/nvidia0", True),
        ("/dev/nvidiactl", True),
        ("/dev/dxg", True),
        ("/dev/nvhost-ctrl-gpu", True),
        ("/dev/null", False),
        ("/home/dev/nvidia0", False),
    ],
)
def test_an_open_file_tells_that_cuda_was_woken(path, expected):
    assert is_gpu_file(path) is expected


def test_a_template_that_holds_such_a_file_is_found_out(tmp_path):
    descriptors = tmp_path / "fd"
    descriptors.mkdir()
    (descriptors / "3").symlink_to("/dev/null")
    (descriptors / "4").write_text("closed meanwhile: no link any more")
    assert not is_gpu_open(descriptors)
    (descriptors / "5").symlink_to("/dev/nvidiactl")
    assert is_gpu_open(descriptors)


def test_import_that_opens_a_gpu_is_detected_before_forking(monkeypatch):
    monkeypatch.setattr(template, "is_gpu_open", lambda: True)
    monkeypatch.setattr(template, "run_in_fork", lambda run: pytest.fail("a process with a GPU was forked"))
    assert template.inspect_import()[0] == "cuda"


class Cards:
    """What TensorFlow knows of cards, with the errors that it raises: `tf.config` and `tf.config.experimental`."""

    def __init__(self, divided, started=False):
        self.divided = divided
        self.started = started
        self.growing = set()
        self.experimental = self

    def list_physical_devices(self, kind):
        """Names stand for devices."""
        return list(self.divided) if kind == "GPU" else []

    def get_visible_devices(self, kind):
        """Devices have names here."""
        return [SimpleNamespace(name=f"/physical_device:{card}") for card in self.list_physical_devices(kind)]

    def get_memory_growth(self, card):
        """None where nobody has said."""
        return True if card in self.growing else None

    def get_logical_device_configuration(self, card):
        """What the user has divided it into; None where nobody has."""
        return ["a part"] if self.divided[card] else None

    def set_memory_growth(self, card, enable):
        """As TensorFlow 2.21 answers."""
        if self.divided[card]:
            raise ValueError("Cannot set memory growth on device when virtual devices configured")
        if self.started:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        if enable:
            self.growing.add(card)


@pytest.mark.parametrize(("visible", "asked"), [((), []), ((1,), [[1]]), ((0, 2), [[0, 2]])])
def test_nvml_is_asked_of_the_cards_that_tensorflow_trains_on(monkeypatch, visible, asked):
    seen = []
    devices = [SimpleNamespace(name=f"/physical_device:GPU:{name}") for name in visible]
    config = SimpleNamespace(get_visible_devices=lambda kind: devices)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    monkeypatch.setattr(gauges, "open_meters", lambda places: seen.append(places) or ["a card"])
    assert gauges.cards_in_use() == ["a card"] * len(asked)
    assert seen == asked


def test_a_recipe_is_applied_to_cards_that_the_user_has_limited(monkeypatch):
    cards = Cards({"GPU:0": True, "GPU:1": False})
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=cards))
    apply_before_build({})
    assert cards.growing == {"GPU:1"}


def test_memory_growth_after_the_first_tensor_is_refused(monkeypatch):
    cards = Cards({"GPU:0": False}, started=True)
    kinds = {"data": SimpleNamespace(Dataset=Divided), "Variable": Divided, "Tensor": Divided}
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=cards, **kinds))
    with pytest.raises(ApplyError, match="GPU memory growth cannot act any more"):
        apply_before_build({})


class Divided(Cards):
    """Cards that are visible, with the parts that a workload has made of them."""

    def get_logical_device_configuration(self, card):
        """Their limits in MiB; None where nobody has limited it."""
        parts = self.divided[card.name.removeprefix("/physical_device:")]
        return [SimpleNamespace(memory_limit=part) for part in parts] or None


GIB = 1 << 30


@pytest.mark.parametrize(
    ("cards", "sizes", "expected"),
    [
        ({"GPU:0": []}, [80], 80 * GIB),
        ({"GPU:0": [], "GPU:1": []}, [80, 24], 24 * GIB),
        ({"GPU:0": [4096]}, [80], 4 * GIB),
        ({"GPU:0": [4096, None]}, [80], 4 * GIB),
        ({"GPU:0": [4096, 2048]}, [80], 2 * GIB),
        ({"GPU:0": [200000]}, [80], 80 * GIB),
        ({"GPU:0": [4096]}, [], None),
        ({}, [80], None),
    ],
)
def test_device_limit_is_card_memory_or_the_configured_limit(monkeypatch, cards, sizes, expected):
    found = GpuReading(tuple(Gpu(name="card", memory_bytes=size * GIB) for size in sizes))
    monkeypatch.setattr(gauges, "read_gpus", lambda: found)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=Divided(cards)))
    assert gauges.device_limit_bytes() == expected


def test_a_process_for_losses_tells_of_its_cards(monkeypatch):
    told = {"gpu_names": lambda: ("NVIDIA H200",), "describe_weights": lambda weights: {"parameters": 2}}
    monkeypatch.setattr(losses, "gauges", SimpleNamespace(**told))
    found = losses.describe_losses(SimpleNamespace(weights=[], trainable_weights=[]), ((1.0,),))
    assert found == LossCurves(curves=((1.0,),), gpus=("NVIDIA H200",), parameters=2)
