"""Where Merlin has its layers."""
