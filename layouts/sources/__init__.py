"""Files of a checkpoint: containers of tensors, config.json, companion files, and the hub they are downloaded from."""
