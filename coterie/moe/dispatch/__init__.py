"""Strategies: which MoE experts run where, what moves and what stays. Decisions, no tensors."""
