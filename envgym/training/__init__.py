"""The training loop: a run, its stages, its folder, and one step after the other."""
