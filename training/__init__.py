"""Training of Saccade's own model "nano": data, augmentation, losses and the training loop. Not used at run time."""
