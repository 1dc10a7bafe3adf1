"""`sok serve`: exported models over HTTP, in the words of TensorFlow Serving's REST."""
