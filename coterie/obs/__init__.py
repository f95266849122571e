"""Counters, their Prometheus text, log lines. Knows no prompts and no keys."""
