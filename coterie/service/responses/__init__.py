"""Responses that are kept, so that a later request can continue or read them."""
