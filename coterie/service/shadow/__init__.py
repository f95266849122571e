"""Shadows: a second specialist answers too, only to be judged; no caller gets its answer."""
