"""Owns the encoders of a server: their limits, their queue, and how requests reach them."""
