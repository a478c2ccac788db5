"""The loop over many processes and machines, placed and started by Ray."""
