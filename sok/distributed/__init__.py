"""Training on several workers: one `op` for embedding rows and dense weights alike.

    model.compile(optimizer=sok.DistributedOptimizer(keras.optimizers.Adam(1e-3)), ...)

or, in a loop of one's own, `sok.DistributedGradientTape`. Neither is needed on one worker, and neither hurts.
"""

from sok.distributed.broadcast import broadcast_variables
from sok.distributed.optimizer import DistributedOptimizer
from sok.distributed.reduction import Average, Sum
from sok.distributed.tape import DistributedGradientTape

__all__ = ["Average", "DistributedGradientTape", "DistributedOptimizer", "Sum", "broadcast_variables"]
