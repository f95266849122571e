"""Facts about a prompt: its instruction, its language, whether it contains code."""
