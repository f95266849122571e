"""Whether a prompt finds its expert, and how long that takes."""
