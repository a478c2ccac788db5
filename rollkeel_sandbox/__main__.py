from rollkeel_sandbox.cli import main

main()
