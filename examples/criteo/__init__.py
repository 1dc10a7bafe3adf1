"""Click-through-rate models on Criteo's log: reader, generator, models, training script."""
