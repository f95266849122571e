"""Runs one model step by step: schedule, run, commit. Knows no routing and no transport."""
