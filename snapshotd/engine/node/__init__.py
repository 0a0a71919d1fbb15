"""This daemon as a node of a fleet. `base` is the specification."""
