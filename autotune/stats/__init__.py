"""Pure functions from slices to figures."""
