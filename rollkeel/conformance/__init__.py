"""Is another implementation of a recipe right? The tokens on which it is judged, the right answers, and one runner.

An implementation is a function of a `Batch` that returns its loss; `check(function, "icepop", {"low": 0.5})` gives a
`Verdict`, and `rollkeel conformance MODULE:FUNCTION RECIPE` prints it. `batches.json` and `golden.json` can be read without
this package.
"""

from rollkeel.conformance.batch import Batch
from rollkeel.conformance.runner import Difference, Finding, Implementation, Verdict, check

__all__ = ["Batch", "Difference", "Finding", "Implementation", "Verdict", "check"]
