"""What run.json says once the baseline is warm."""

from __future__ import annotations

from autotune.devices.machine import Machine
from autotune.run_directory import RunRecord, SearchSpaceRecord, WorkloadRecord
from autotune.space.knobs import Device
from autotune.space.search_space import ResolvedSpace
from autotune.tuning.opening import Invocation, Opened
from autotune.tuning.progress import Notice


def completed(
    record: RunRecord, opened: Opened, invocation: Invocation, source: str, space: ResolvedSpace
) -> RunRecord:
    """run.json with what is known only once the baseline is warm.

    Args:
        record: As it was written first.
        opened: The run.
        invocation: What it works with.
        source: Where the search space comes from.
        space: The search space.
    """
    facts, started = opened.facts, opened.warm.started
    workload = WorkloadRecord(
        name=facts.name,
        reference=str(invocation.reference),
        fingerprint=facts.fingerprint,
        batch_size=facts.batch_size,
        batched=facts.batched,
        drop_remainder=facts.drop_remainder,
        takes_config=facts.dataset_takes_config,
        examples=started.examples,
        endless=started.endless,
        element=started.element,
        batch_ranks=started.batch_ranks or None,
        parameters=started.parameters,
        device=opened.device.value,
    )
    return record.model_copy(
        update={
            "machine": _completed_machine(opened, invocation),
            "workload": workload,
            "search_space": SearchSpaceRecord(
                source=source, choices=dict(space.choices), left_out=dict(space.left_out)
            ),
            "baseline": dict(opened.run.baseline),
            "isolation": invocation.isolation,
        }
    )


def _completed_machine(opened: Opened, invocation: Invocation) -> Machine:
    """The fingerprint with what only TensorFlow knows; a notice where it does not see a GPU that is there."""
    machine = invocation.machine
    if opened.device is Device.CPU:
        if machine.gpus:
            invocation.observe(
                Notice(
                    text=f"there is a GPU ({machine.gpus[0].name}), but TensorFlow does not see it, so the CPU is "
                    "tuned; pip install 'tensorflow[and-cuda]' brings the CUDA libraries"
                )
            )
        return machine
    build = opened.warm.started.build
    return machine.model_copy(
        update={"tensorflow_cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}
    )
