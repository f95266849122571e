"""What the shipped router of eight specialists is trained on."""
