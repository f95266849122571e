"""MoE experts: how they are stored, where they are while a model runs, and what decides that."""
