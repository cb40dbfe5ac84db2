"""Files written for OpenRLHF, as they stand: reward functions and agents. Reached by their path (see `files`)."""
