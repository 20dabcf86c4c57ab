"""Where bytes lie: checkpoints that come in, outputs that go out, and how files appear."""
