"""The benchmark `saccade bench cameras`: overloads a model with simulated cameras of different frame rates."""
