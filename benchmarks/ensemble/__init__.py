"""Measures an ensemble: overhead, load, simulation, shadows."""
