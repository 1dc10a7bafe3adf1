"""Predict whether a user will like a movie, from multi-hot pooled features of MovieLens 100K."""
