"""What engine and trainer share about a model."""
