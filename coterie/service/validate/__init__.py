"""Checks whether an answer has the form that was asked for: validators, and their sandbox."""
