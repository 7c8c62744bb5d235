"""`saccade bench cameras`: overloads a model with cameras of mixed frame rates."""
