"""A run's settings: the schema, the words of the command line, recipes, and how they resolve."""
