"""`python -m envgym.openrlhf PROGRAM flags…`: `envgym openrlhf` for launchers that start modules."""

import sys

from envgym.cli import main

sys.argv[1:] = ["openrlhf", *(word for word in sys.argv[1:] if not word.startswith("--local_rank"))]
sys.exit(main())
