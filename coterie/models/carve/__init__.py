"""Divides a dense model's MLPs into a shared part and MoE experts."""
