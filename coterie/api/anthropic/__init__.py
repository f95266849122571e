"""The Anthropic dialect: its request bodies, and how its answers are written."""
