"""Jobs: tasks rolled out into a folder, from which an interrupted `envgym eval`, `rollout` or `score` resumes."""
