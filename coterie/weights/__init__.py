"""Where a model's bytes come from. Knows not what the tensors are for."""
