"""The recipe: the artefact, its schema, and how it is applied."""
