"""What comes in: checkpoints as they are published, and where their experts lie."""
