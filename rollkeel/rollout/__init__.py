"""From prompts to complete rollouts, over any engine."""
