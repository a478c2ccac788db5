"""Programs that measure speed and memory against a peer in the same run; never timed tests."""
