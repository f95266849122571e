"""Brings a request into a worker: admission, assignment, submission; and its events back."""
