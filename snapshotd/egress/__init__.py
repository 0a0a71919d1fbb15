"""The way out of sandboxes that reach some hosts only: a process for each, outside of it, through which all their
connections go."""
