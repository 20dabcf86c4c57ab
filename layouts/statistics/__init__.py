"""What is known of the inputs of a model's experts: importance matrices."""
