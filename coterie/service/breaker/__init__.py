"""State machines over a clock that keep traffic away from what is broken or overloaded."""
