"""The actions of `envgym envs`, and the templates of new environments."""
