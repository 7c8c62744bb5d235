"""Training of the embedded model: data, augmentation, losses, the loop. Nothing of it is imported when a model runs."""
