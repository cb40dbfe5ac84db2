"""A page to look at runs, evaluations and files of episodes: it only reads them."""
