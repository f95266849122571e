"""The Anthropic dialect: its bodies, and how its answers are written."""
