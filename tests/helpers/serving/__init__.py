"""Servers, workers, pipelines and child programs that tests start, and requests to send to them."""
