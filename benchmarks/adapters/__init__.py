"""The cost of adapters: on a CPU, on a GPU, in the pool."""
