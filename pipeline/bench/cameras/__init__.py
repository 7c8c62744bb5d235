"""`saccade bench cameras`: overloads a model with simulated cameras that have different frame rates."""
