"""The native API: inference, jobs, feedback, and the endpoints that belong to no vendor."""
