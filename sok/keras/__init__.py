"""Layers and callbacks for Keras 3 and tf_keras."""
