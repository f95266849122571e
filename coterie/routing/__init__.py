"""Decides who answers a request and with which parameters. Knows no blocks and no engines."""
