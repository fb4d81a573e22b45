"""What a process reports of itself while it works: the lines of its log, and traces."""
