"""Things that generate tokens, all behind the `Engine` protocol of `rollkeel.types`."""
