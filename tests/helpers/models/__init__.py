"""Tiny and toy models: their checkpoints in every format, and ways to run one without an engine."""
