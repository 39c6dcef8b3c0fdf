"""Finished runs: pandas frames, comparisons and the HTML page. Nothing is measured here."""
