"""What several tests use: tiny models, servers and engines to talk to, files, reference results."""
