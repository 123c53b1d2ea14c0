"""A config to begin with."""
