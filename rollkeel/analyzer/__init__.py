"""Two ways of computing the same tokens, operation by operation: where they part beyond what their dtypes explain."""
