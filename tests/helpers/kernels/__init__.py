"""Random inputs for kernels, and the check of a machine that needs torch alone."""
