"""Traces of requests: W3C context, spans and their export; off unless a receiver is named."""
