"""Where Merlin has its ops."""
