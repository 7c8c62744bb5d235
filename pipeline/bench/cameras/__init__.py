"""`saccade bench cameras`: cameras of mixed rates that offer more than the model can answer."""
