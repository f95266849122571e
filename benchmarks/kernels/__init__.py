"""The native kernels beside torch and the limits of the machine."""
