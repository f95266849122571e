"""adaptive: the strategy that keeps the most used experts and moves one only when that pays."""
