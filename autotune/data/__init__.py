"""Data that crosses rooms: records, files, options, errors. It imports no other room."""
