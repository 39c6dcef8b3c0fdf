"""What may vary: knobs, configurations, search spaces. No TensorFlow here, and no Optuna study."""
