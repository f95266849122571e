"""Owns the processes that run encoders: their messages, their program and their supervision."""
