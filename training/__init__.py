"""Training of the embedded model nano: data, augmentation, losses and training loop; not used at run time."""
