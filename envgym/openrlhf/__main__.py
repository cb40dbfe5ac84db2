"""`python -m envgym.openrlhf PROGRAM flags…`: `envgym openrlhf` for launchers that start modules."""

import sys
from importlib.metadata import entry_points

sys.argv[1:] = ["openrlhf", *(word for word in sys.argv[1:] if not word.startswith("--local_rank"))]
(program,) = entry_points(group="console_scripts", name="envgym")  # `cli/` is above this folder
sys.exit(program.load()())
