"""`python -m rollkeel`."""

from rollkeel.cli import main

main()
