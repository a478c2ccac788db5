"""Forward, backward, step: blind to the algorithm. Log-probs that never hold `[T, V]`, SFT, checkpoints."""
