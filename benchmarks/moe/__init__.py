"""MoE models larger than their memory: strategies, disk, the planner."""
