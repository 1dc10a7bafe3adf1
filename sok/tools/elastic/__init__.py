"""`sok elastic`: starts the workers of an elastic job, and brings those that there are together, again and again."""
