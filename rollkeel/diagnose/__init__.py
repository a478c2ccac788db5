"""What needs the model again: where two forwards part, what another objective would have done, a step done again."""
