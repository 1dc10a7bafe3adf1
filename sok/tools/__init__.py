"""What is run from a shell: `sok doctor`, `inspect`, `verify`, `find`, `convert`; and `sok.erase`."""
