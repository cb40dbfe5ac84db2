"""What a run shows and keeps of itself: metrics, alarms, the display, trackers, the report."""
