"""What travels: a change, its bytes in the log, its columns in Arrow, and its replay into rows."""
