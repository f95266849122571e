"""The arithmetic: every fast path has a plain twin. Knows no models and no sequences."""
