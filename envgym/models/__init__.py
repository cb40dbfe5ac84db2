"""Models by name: folders, hub ids, runs, recipes; made, merged and exported."""
