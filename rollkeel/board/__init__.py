"""`rollkeel board`: a local page over run folders that go on. It reads, and writes nothing."""
