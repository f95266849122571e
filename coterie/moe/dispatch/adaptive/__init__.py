"""adaptive: the parts of the strategy that keeps what was used most and moves what pays."""
