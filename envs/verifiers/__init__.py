"""verifiers: its environments in envgym, played by its own engine in an interpreter of its own."""
