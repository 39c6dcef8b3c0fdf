"""Workloads: scripts as they are and the Workload class, how they run, and what autotune wraps in them."""
