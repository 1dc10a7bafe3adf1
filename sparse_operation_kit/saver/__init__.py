"""What SOK 1.1 had in `sparse_operation_kit.saver`."""
