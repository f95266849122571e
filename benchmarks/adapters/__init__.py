"""What adapters cost: on a CPU, on a GPU, in the pool."""
