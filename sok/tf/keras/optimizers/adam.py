"""`Adam`: that of `tf.keras`, which trains tables inside `sok.OptimizerScope`.

SOK v1 had a copy of it that adds up gradients of duplicate rows on the GPU. Inside the scope the rows of tables are
updated by `sok.optimizers.Adam`, with no such copy.
"""

import tensorflow as tf

Adam = tf.keras.optimizers.Adam

__all__ = ["Adam"]
