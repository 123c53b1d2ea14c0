"""What a config will take, in the forms in which the verb `plan` says it."""
