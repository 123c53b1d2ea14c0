"""A model of the commit protocol, and a checker that enumerates what crashes can leave behind."""
