"""Finds adapters by content: probes that are learnt from packages, and their calibrated scores."""
