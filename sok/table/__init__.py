"""Tables of rows: their arguments, keys, initial values, placement and state."""
