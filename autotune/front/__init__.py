"""The commands and everything that prints."""
