"""autotune finds the fastest stable way to run a TensorFlow training on one machine."""

from autotune.workload import DatasetConfig, Workload

__all__ = ["DatasetConfig", "Workload"]
