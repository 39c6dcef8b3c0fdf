"""Running one configuration: the template, the trial process, and the tuner's side of both.

TensorFlow is imported only on the child's side (`template`, `worker`).
"""
