"""Deliberate privacy bugs, the properties that must notice them, and the score (`make mutants`)."""
