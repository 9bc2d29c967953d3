"""How the weights of the reference models came about: initialisation, curriculum, training."""
