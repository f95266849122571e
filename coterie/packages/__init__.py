"""The `.expert` file: what is in one, who signed it, and which ones are installed."""
