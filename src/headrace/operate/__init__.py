"""What an operator sees and does: an overview, retention, keys; by the server or on the log."""
