"""Tables on TensorFlow's GPU device, with the emulator's in its place: see conftest.py."""
