"""The arguments of each verb, and what hands them over; torch is imported by what needs it."""
