"""MoE experts at work: tiers, transfers between them, and one layer of a step after another."""
