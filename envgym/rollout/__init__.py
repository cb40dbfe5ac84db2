"""Playing episodes: the runner, what it samples with, and the buffer its groups go to."""
