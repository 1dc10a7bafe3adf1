"""What all rooms use: the native library, errors, names, traces, progress."""
