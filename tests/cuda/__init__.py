"""The device suite: whether answers are right on a CUDA device. See `__main__`."""
