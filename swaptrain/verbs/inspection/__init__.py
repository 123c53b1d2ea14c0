"""What a run directory holds, as the verb `inspect` reads it."""
