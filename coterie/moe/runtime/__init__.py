"""MoE experts of a running model: the tiers, transfers between them, and running one layer."""
