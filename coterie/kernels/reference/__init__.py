"""The plain torch twins of the fast paths."""
