"""How fast the CUDA kernels are beside the fewest bytes that they must move: `python -m benchmarks.cuda`."""
