"""transformers' server, with our experts in its model."""
