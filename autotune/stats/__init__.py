"""From slices to numbers: pure functions. No clocks, no files, no processes."""
