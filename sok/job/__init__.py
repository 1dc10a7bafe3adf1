"""Who we are: rank and size, how workers reach and agree with one another, GPUs, peers that are gone."""
