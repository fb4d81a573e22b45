"""A source, a sink and a format for Headrace."""
