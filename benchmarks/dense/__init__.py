"""Dense models: tokens per second beside peers."""
