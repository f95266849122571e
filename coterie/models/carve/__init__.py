"""Cuts a dense model into a shared part and MoE experts."""
