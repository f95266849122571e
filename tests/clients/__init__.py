"""Real clients of others against a real server: `make clients`, docs/clients.md."""
