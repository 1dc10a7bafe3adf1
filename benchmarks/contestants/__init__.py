"""One module per contestant; `prepare(job)` gives its steps, `version()` what it is. Each imports only its own peer."""
