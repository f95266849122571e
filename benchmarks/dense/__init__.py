"""Dense models: tokens per second compared with peers."""
