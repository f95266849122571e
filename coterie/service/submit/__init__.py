"""The way into a worker: admitted, assigned, handed over, and the events back."""
