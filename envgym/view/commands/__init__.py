"""Commands of `envgym` that look at runs: `view`, `export`, `runs`. Each has a file."""
