"""One architecture per file: what its config.json means and what its blocks hold."""
