"""Models by name: the package index, the hub, paths; fetched once, checked, kept."""
