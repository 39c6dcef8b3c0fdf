"""The search: ask, run, tell, confirm, recommend. No TensorFlow and no printing here."""
