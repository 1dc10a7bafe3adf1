"""What is run from a shell: `sok doctor`, `inspect`, `verify`, `convert`."""
