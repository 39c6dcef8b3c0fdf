"""The only room that prints."""
