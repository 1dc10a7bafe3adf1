"""Errors of our own that several rooms raise or tell their peers."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged, or is not one. The message names the file."""
