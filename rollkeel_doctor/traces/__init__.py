"""Recorded tokens of a run, whoever recorded them: one in-memory form, and readers for rollkeel's and others' files."""
