"""Training of the model nano: data, augmentation, losses and the training loop. It is not used at run time."""
