"""What is GPTQ's own: its settings, the consumer of the walk that compensates, the shard it writes, the library's engine beside it."""
