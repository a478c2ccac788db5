"""What a run takes of a device's memory, computed from its config before anything is built."""
