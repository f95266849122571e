"""MoE experts: where they are stored, where they lie while a model runs, and who decides that."""
