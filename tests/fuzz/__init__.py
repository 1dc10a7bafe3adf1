"""What reads files, given what nobody meant to write: fuzzers (`make fuzz`), and the inputs that they have found."""
