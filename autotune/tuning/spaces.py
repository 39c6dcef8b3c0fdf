"""Which search space a run has, resolved for its workload and machine."""

from __future__ import annotations

from dataclasses import replace

from autotune.data.options import Options
from autotune.machine.gpu import lowest_capability, missing_xla_flags
from autotune.space.knobs import Device
from autotune.space.space_file import ResolvedSpace, SearchSpace, find_search_space
from autotune.tuning.events import Notice
from autotune.tuning.opening import Opened

DEFAULT_SPACE = {Device.CPU: "quick", Device.GPU: "gpu"}
SEVERAL_SPACE = "several_gpus"  # where a seat has several devices, over which the training may be spread
THOROUGH_SPACE = {Device.GPU: "gpu_thorough"}
WIDER_SPACE, FEW_KNOBS = "cpu", 4  # where the usual space has fewer knobs that reach the training


def space_of(written: SearchSpace | None, opened: Opened, options: Options) -> tuple[SearchSpace, ResolvedSpace]:
    """The search space that was asked for; or the device's usual one, or a wider one where that reaches little."""
    kept = dict.fromkeys(opened.warm.started.set_by_dataset, "the workload's dataset() sets it itself")
    if options.fixed_batch:
        kept["batch_size"] = "kept by --fixed-batch"
    if opened.facts.script is not None:
        kept |= opened.facts.script.not_reached

    def resolved(space: SearchSpace) -> ResolvedSpace:
        if opened.device is Device.GPU and (missing := missing_xla_flags(space.ranges.keys() - kept.keys())):
            opened.run.observe(Notice(text=f"not varied: {', '.join(sorted(missing))}: {min(missing.values())}"))
            kept.update(missing)
        return space.resolve(
            baseline=opened.run.baseline,
            device=opened.device,
            cores=opened.machine.cores,
            examples=opened.warm.started.examples,
            dataset_takes_config=opened.facts.dataset_takes_config,
            largest_batch=options.max_batch,
            devices=opened.warm.started.devices,
            fixed=kept,
            capability=lowest_capability(opened.machine.gpus),
        )

    if written is not None:
        return written, resolved(written)
    name = SEVERAL_SPACE if "strategy" in opened.run.baseline else DEFAULT_SPACE[opened.device]
    if options.thorough and opened.device in THOROUGH_SPACE:
        name = THOROUGH_SPACE[opened.device]
    elif options.thorough:
        opened.run.observe(Notice(text=f"there is no thorough search space for a {opened.device}: {name} is searched"))
    written = find_search_space(name)
    if "strategy" in opened.run.baseline and name != SEVERAL_SPACE:  # the thorough space is of one device
        several = find_search_space(SEVERAL_SPACE)
        written = replace(
            written, source=f"{written.source} with {several.source}", ranges={**several.ranges, **written.ranges}
        )
    found = resolved(written)
    if len(found.choices) < FEW_KNOBS and opened.device is Device.CPU:
        written = find_search_space(WIDER_SPACE)
        found = resolved(written)
    return written, found
