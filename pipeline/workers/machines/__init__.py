"""The stores of events on the machines of the workers: each is written on its own machine, and asked by the front."""
