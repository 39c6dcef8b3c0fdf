"""The version of this package, and the name of its distribution: `autotune` in package indexes is another project."""

__version__ = "0.1.0"
DISTRIBUTION = "tf-autotune"
