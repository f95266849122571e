"""Jobs: accepted when they are on disk, run when there is room, ended exactly once."""
