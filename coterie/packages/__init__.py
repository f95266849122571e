"""The `.expert` file: its content, its signature, and the registry of installed ones."""
