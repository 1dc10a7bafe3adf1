"""Which table goes where: Merlin's rules, and a planner that knows what each choice costs. Arithmetic alone."""
