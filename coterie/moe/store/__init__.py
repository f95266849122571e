"""MoE experts on disk: read from a checkpoint or a packed store, exported, edited, inspected."""
