"""What came of requests: a bounded log, and the adapters' rates of success."""
