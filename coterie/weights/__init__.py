"""Finds, fetches and reads a model's files. Does not know what the tensors are used for."""
