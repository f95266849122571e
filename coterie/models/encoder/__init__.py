"""Owns encoders: models that turn a text into a vector, or a pair of texts into a score."""
