"""The machine: its fingerprint, its GPUs and what it counts."""
