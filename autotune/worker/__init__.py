"""Inside one trial: what starts, trains and times a configuration. TensorFlow is imported in functions only."""
