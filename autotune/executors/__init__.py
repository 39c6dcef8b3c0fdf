"""Where trials run: the interface, and processes on this machine."""
