"""The names and files of other systems: SOK v1 and v2, DeepRec, feature columns."""
