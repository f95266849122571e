"""What each specialist delivers: latency quantiles and the share of valid answers, kept on disk."""
