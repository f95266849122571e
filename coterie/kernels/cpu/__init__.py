"""The native module of the CPU: compiled on first use from csrc/."""
