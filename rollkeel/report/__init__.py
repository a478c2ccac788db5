"""`report.html`, rendered from the files of a run folder and nothing else."""

from rollkeel.report.page import render

__all__ = ["render"]
