"""What a machine has, and what it counts."""
