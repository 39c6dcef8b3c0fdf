"""Tuning and training a script as it is: what it does is found, and set, by wrapping what it calls."""
