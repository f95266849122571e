"""`coterie store`: export, inspect, verify, prune, replace, profile."""
