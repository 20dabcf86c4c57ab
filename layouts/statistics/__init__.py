"""Statistics of the inputs of a model's experts: importance matrices and second moments."""
