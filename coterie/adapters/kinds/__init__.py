"""One adapter kind per file, and the table of them."""
