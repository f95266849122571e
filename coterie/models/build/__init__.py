"""What architectures are built of: attention, rotary positions, MoE layers, adapters' places."""
