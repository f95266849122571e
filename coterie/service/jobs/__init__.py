"""Jobs: accepted when they are on disk, run when there is capacity, ended exactly once."""
