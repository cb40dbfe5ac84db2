"""A run's settings: the schema, the overrides of the command line, recipes, and their resolution."""
