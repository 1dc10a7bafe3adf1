"""Saves that are killed: at every step that they take on the disk, and at random times. `python -m tests.kills -h`."""
