"""`python -m rollkeel_doctor`."""

from rollkeel_doctor.cli import main

main()
