"""The native API: inference, jobs, feedback, and what belongs to no vendor."""
