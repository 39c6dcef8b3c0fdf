"""Knobs, configurations and search-space files."""
