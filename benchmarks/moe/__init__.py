"""MoE models bigger than their memory: strategies, disk, the planner."""
