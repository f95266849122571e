"""Training data of the shipped experts, and the items they are evaluated with."""
