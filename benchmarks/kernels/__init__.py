"""The native kernels compared with torch and the limits of the machine."""
