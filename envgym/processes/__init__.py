"""Processes and their ends: children that die with their parent, users' code under deadlines, the event loop's end."""
