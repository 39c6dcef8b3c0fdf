"""Ask, run, tell: search, pruning, feasibility, confirmation. No TensorFlow here, and no printing."""
