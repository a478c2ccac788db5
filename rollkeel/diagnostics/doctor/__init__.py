"""Why a run went bad: causes with evidence, from recorded tokens alone, or healthy. `docs/doctor.md` explains each."""

from rollkeel.diagnostics.doctor.diagnosis import CAUSES, Cause, Diagnosis
from rollkeel.diagnostics.doctor.verdict import diagnose

__all__ = ["CAUSES", "Cause", "Diagnosis", "diagnose"]
