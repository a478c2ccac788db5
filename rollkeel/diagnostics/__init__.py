"""What happened in a run and why: metrics, run folder, live view, trackers."""
