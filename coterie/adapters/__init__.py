"""Adapters beside a model: read, composed into stacks, held in a pool. Knows no requests."""
