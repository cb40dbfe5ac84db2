"""Monitoring of a run: metrics, alarms, the display, trackers, the report."""
