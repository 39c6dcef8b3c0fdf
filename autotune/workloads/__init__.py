"""What is trained, and how it is loaded."""
