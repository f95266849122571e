"""Adapters of a model: read, composed into stacks, kept in a pool. Knows no requests."""
