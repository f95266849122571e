"""Owns the endpoints of encoders: embeddings, rerank and score."""
