"""rollkeel against TRL on the same tiny mixture-of-experts model, rollouts, lengths and cores."""
