"""Harbor: its tasks, played by Harbor's own program in Harbor's interpreter."""
