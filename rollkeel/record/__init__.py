"""What a run writes while it runs: run folder, rollouts, metrics, checks and alarms, live view, trackers."""
