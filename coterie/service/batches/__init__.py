"""Batches: files of requests that are on disk when they are accepted, run beside everything else,
and end exactly once."""
