"""A run on disk: its record, its checkpoint, its trace, and the trained model read back."""
