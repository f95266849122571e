"""Benchmarks of encoders."""
