"""What a model is held to: labelled data, reference numbers, the plain generation loop, the device's limits."""
