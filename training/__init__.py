"""Training of the model nano: data, augmentation, losses and the training loop. Not used at run time."""
