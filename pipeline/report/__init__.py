"""Output for people and programs: tables, plots, progress, and the events of --json."""
